"""Reasoning told from the rest: the same parts however the text is cut. FB-065, FB-066."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.reasoning import MAX_SPACE, Counter, Parts, Phase, Reasoning, Splitter
from shared.think_tags import closing, is_tag, opening, opening_in

BEGINS = Reasoning("<think>", "</think>")
OPENED = Reasoning("<think>", "</think>", opened=True)

#: Text -> its parts, where the model writes the opening tag itself, and where the prompt has ended with it.
SPLITS = [
    ("", ("", ""), ("", "")),
    ("just text", ("", "just text"), ("just text", "")),
    ("<think>why</think>so", ("why", "so"), ("why", "so")),
    ("\n<think>\nwhy\n\nand how\n</think>\n\nso </think> it is\n", ("why\n\nand how", "so </think> it is\n"), None),
    ("why</think>so", ("", "why</think>so"), ("why", "so")),
    ("\n why \n</think>\n\nso", ("", "\n why \n</think>\n\nso"), ("why", "so")),
    ("<think>never closed ", ("never closed", ""), ("never closed", "")),
    ("<think>half a tag </thin", ("half a tag </thin", ""), ("half a tag </thin", "")),
    ("<think></think>so", ("", "so"), ("", "so")),
    ("<think>\n\n</think>\n\n", ("", ""), ("", "")),
    (" <thi", ("", " <thi"), ("<thi", "")),
    ("<thin>k", ("", "<thin>k"), ("<thin>k", "")),
    ("a <think>b</think>", ("", "a <think>b</think>"), ("a <think>b", "")),
    ("<think>a<think>b</think>c", ("a<think>b", "c"), ("a<think>b", "c")),
    ("</think>so", ("", "</think>so"), ("", "so")),
    ("  two spaces", ("", "  two spaces"), ("two spaces", "")),
    (" " * (MAX_SPACE + 1) + "<think>a", ("", " " * (MAX_SPACE + 1) + "<think>a"), ("<think>a", "")),
]  # fmt: skip


def split(text: str, reasoning: Reasoning | None, cuts: list[int]) -> Parts:
    splitter = Splitter(reasoning)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [splitter.feed(text[begin:end]) for begin, end in pairwise(borders)]
    parts.append(splitter.flush())
    contents = [part.content for part in parts]
    first = next((place for place, content in enumerate(contents) if content), len(parts))
    assert not any(part.reasoning for part in parts[first + 1 :]), "what was content once stays the last"
    return Parts("".join(part.reasoning for part in parts), "".join(contents))


@pytest.mark.parametrize(("text", "begins", "opened"), SPLITS, ids=lambda value: ascii(value)[:30])
def test_the_parts_of_a_text(text: str, begins: tuple[str, str], opened: tuple[str, str] | None) -> None:
    for cuts in ([], list(range(len(text)))):
        assert split(text, BEGINS, cuts) == begins
        assert split(text, OPENED, cuts) == (opened or begins)
        assert split(text, None, cuts) == ("", text)


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/", "thi", "nk>", "</th", " ", "\n", "a", "é", "🌍"]), max_size=14
).map("".join)


@given(TEXTS, st.sampled_from([BEGINS, OPENED, None]), st.lists(st.integers(0, 60), max_size=12))
def test_it_is_the_same_however_the_text_is_cut(text: str, reasoning: Reasoning | None, cuts: list[int]) -> None:
    whole = split(text, reasoning, [])
    assert split(text, reasoning, cuts) == whole
    assert whole.reasoning == whole.reasoning.strip()
    if not whole.reasoning and reasoning is not OPENED and "<think>" not in text:
        assert whole.content == text


@pytest.mark.parametrize("tag", ["<think>", "<seed:think>", "[THINK]", "◁think▷", "<|think|>", "<|begin_of_thought|>"])
def test_every_family_has_its_pair(tag: str) -> None:
    assert opening(closing(tag)) == tag and is_tag(tag) and is_tag(closing(tag)) and closing(tag) != tag
    assert opening_in(f"... '{tag}' ...") == tag == opening_in(f"{{{{ content.split('{closing(tag)}') }}}}")
    reasoning = Reasoning(tag, closing(tag))
    for cuts in ([], list(range(60))):
        assert split(f"{tag}\nwhy\n{closing(tag)}\n\nso", reasoning, cuts) == ("why", "so")


def test_what_is_no_tag() -> None:
    assert not any(map(is_tag, ("<|im_end|>", "<s>", "<thinker>", "think", "<tool_call>", "")))
    assert opening_in("{{ messages }}") is None


def counted(tokens: list[str], reasoning: Reasoning) -> int:
    counter = Counter(reasoning)
    for token in tokens:
        counter.feed(token)
    return counter.count


@pytest.mark.parametrize(
    ("tokens", "begins", "opened"),
    [
        (["<think>", "a", "b", "</think>", "c"], 4, 4),
        (["<thi", "nk>a", "</th", "ink>c", "d"], 4, 4),
        (["\n", "<think>", "a", "</think>", "c"], 4, 4),
        (["<think>a</think>b", "c"], 1, 1),
        (["a", "</think>", "b"], 0, 2),
        (["a", "b"], 0, 2),
        (["<", "b>", "c"], 0, 3),
        (["<think>", "", "a"], 3, 3),
        ([], 0, 0),
    ],
)
def test_tokens_of_reasoning_are_counted_up_to_the_closing_tag(tokens: list[str], begins: int, opened: int) -> None:
    assert (counted(tokens, BEGINS), counted(tokens, OPENED)) == (begins, opened)


def test_white_space_without_end_takes_no_time() -> None:
    splitter = Splitter(OPENED)
    for _ in range(200_000):
        assert splitter.feed("\n") == ("", "")
    assert splitter.phase is Phase.INSIDE and splitter.flush() == ("", "")
