"""Drafts from the text so far, against what is found by looking through the whole of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.exllamav2 import ngrams
from workers.engines.exllamav2.ngrams import LONGEST, Ngrams

TEXTS = st.lists(st.integers(0, 4), max_size=60)


def next_after(ending: list[int], text: list[int]) -> int | None:
    """What came behind the longest part of `ending` that stands in `text`, the last time."""
    for length in range(min(LONGEST, len(ending)), 0, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == ending[-length:]:
                return text[place]
    return None


@given(TEXTS, st.integers(1, 6), st.lists(st.integers(1, 60), max_size=5), st.integers(1, 7))
def test_what_followed_last_time_is_proposed(text: list[int], count: int, told_at: list[int], at_once: int) -> None:
    """Whenever and in whatever pieces the text was learned."""
    made = Ngrams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "LEARNED_AT_ONCE", at_once)
        for length in sorted(told_at):
            made.learn(text[:length])
        for _ in range(len(text)):
            made.learn(text)
    expected: list[int] = []
    while len(expected) < count and (token := next_after([*text, *expected], text)) is not None:
        expected.append(token)
    found = made.propose(text, count)
    if not expected:
        assert found is None
    else:
        assert found == expected + expected[-1:] * (count - len(expected))


def test_a_step_learns_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is learned over many steps: all lanes wait for each."""
    monkeypatch.setattr(ngrams, "LEARNED_AT_ONCE", 10)
    made, text = Ngrams(), [*range(15), 0]
    made.learn(text)
    assert made.propose([0], 3) == [1, 2, 3] and made.propose([12], 1) is None
    made.learn(text)
    assert made.propose([12], 3) == [13, 14, 0]
