"""Order: whatever way entries arrive, every frame comes out once and in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.relay.order import Order, Verdict
from shared.errors import LogLost
from shared.frames import Delta, End, Frame, Name, Take

Entry = tuple[Name, list[Frame]]


def history(cuts: list[int], attempts: int) -> list[Entry]:
    """Entries of a request that was taken `attempts` times; `cuts` are the sizes of the delta entries."""
    entries: list[Entry] = []
    seq = token = 0
    for attempt in range(1, attempts + 1):
        seq += 1
        entries.append((Name(attempt * 10, seq), [Take("w")]))
        for size in cuts:
            frames: list[Frame] = []
            for _ in range(size):
                token += 1
                frames.append(Delta(0, [token], f"<{token}>"))
            seq += size
            entries.append((Name(attempt * 10, seq), frames))
    entries.append((Name(attempts * 10 + 1, seq + 1), [End({})]))
    return entries


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(1, 3), st.integers(0, 2**32))
def test_lost_doubled_and_repaired_entries_give_every_frame_once(cuts: list[int], attempts: int, seed: int) -> None:
    log, rng = history(cuts, attempts), random.Random(seed)
    order, out = Order(), list[Frame]()

    def take(entry: Entry) -> bool:
        new = order.feed(*entry)
        if isinstance(new, list):
            out.extend(new)
        return new is not Verdict.GAP

    for index, entry in enumerate(log):
        if rng.random() < 0.4:
            continue  # the channel lost it
        for _ in range(rng.choice((1, 1, 2))):
            if not take(entry):  # the log has all up to now, and the reader asks from what it has
                for name, frames in log[: index + 1]:
                    if name >= order.last:
                        assert take((name, frames))
    for entry in log:
        if entry[0] >= order.last:
            assert take(entry)
    assert out == [frame for _, frames in log for frame in frames]
    assert order.ended


def test_a_gap_is_told_and_delivers_nothing() -> None:
    order = Order()
    assert order.feed(Name(5, 3), [Delta(0, [1], "a")]) is Verdict.GAP
    assert order.last == Name(0, 0)


def test_another_attempt_at_a_seen_place_is_another_text() -> None:
    order = Order()
    order.feed(Name(5, 2), [Take("w"), Delta(0, [1], "a")])
    with pytest.raises(LogLost):
        order.feed(Name(6, 2), [Delta(0, [9], "z")])


def test_an_attempt_changes_only_at_take_or_end() -> None:
    order = Order()
    order.feed(Name(5, 2), [Take("w"), Delta(0, [1], "a")])
    with pytest.raises(LogLost):
        order.feed(Name(6, 3), [Delta(0, [9], "z")])


def test_nothing_counts_after_the_end() -> None:
    order = Order()
    order.feed(Name(5, 1), [Take("w")])
    assert order.feed(Name(6, 2), [End({})]) == [End({})]
    assert order.feed(Name(7, 3), [Take("x")]) is Verdict.SEEN
