"""Prompts of fill-in-the-middle: the ids that each family was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import cards
from shared.cards import Fim, ModelCard
from workers.generation.fim import known_tokens, prompt_ids, suffix_ids


def card(fim: Fim | None, bos: int | None, *, add_bos: bool) -> ModelCard:
    return ModelCard(
        id="m",
        engine="x",
        context=99,
        vocab_size=200_000,
        lanes=1,
        fingerprint="f",
        fim=fim,
        bos_id=bos,
        add_bos=add_bos,
    )


#: name: (special tokens of the vocabulary, BOS, whether the tokenizer adds it, the prompt for before 7 8, after 9).
FAMILIES = {
    "Qwen2.5-Coder": (
        {"<|endoftext|>": 151643, "<|fim_prefix|>": 151659, "<|fim_middle|>": 151660, "<|fim_suffix|>": 151661},
        *(151643, False, [151659, 7, 8, 151661, 9, 151660]),
    ),
    "StarCoder2": (
        {"<|endoftext|>": 0, "<fim_prefix>": 1, "<fim_middle>": 2, "<fim_suffix>": 3, "<fim_pad>": 4},
        *(0, False, [1, 7, 8, 3, 9, 2]),
    ),
    "CodeLlama": (
        {"<s>": 1, "▁<PRE>": 32007, "▁<SUF>": 32008, "▁<MID>": 32009, "▁<EOT>": 32010},
        *(1, True, [1, 32007, 7, 8, 32008, 9, 32009]),
    ),
    "DeepSeek-Coder": (
        {"<｜fim▁hole｜>": 32015, "<｜fim▁begin｜>": 32016, "<｜fim▁end｜>": 32017, "<｜begin▁of▁sentence｜>": 32013},
        *(32013, True, [32013, 32016, 7, 8, 32015, 9, 32017]),
    ),
    "Codestral": (
        {"<s>": 1, "[PREFIX]": 12, "[MIDDLE]": 13, "[SUFFIX]": 14},
        *(1, True, [1, 14, 9, 12, 7, 8]),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gets_its_own_order(family: str) -> None:
    vocabulary, bos, adds, expected = FAMILIES[family]
    fim = known_tokens({"a": 7, "b": 8, "c": 9, **vocabulary})
    model = card(fim, bos, add_bos=adds)
    assert prompt_ids(model, [7, 8], [9], add_bos=True) == expected
    assert cards.decode(cards.encode(model)) == model
    without = expected[1:] if adds else expected
    assert prompt_ids(model, [7, 8], [9], add_bos=False) == without
    with_bos = [bos, *without]
    assert prompt_ids(model, [bos, 7, 8], [9], add_bos=False) == with_bos, "its own BOS comes first"
    assert prompt_ids(model, [bos, 7, 8], [bos, 9], add_bos=adds) == with_bos


def test_one_side_may_be_empty() -> None:
    model = card(Fim(1, 2, 3), None, add_bos=False)
    assert prompt_ids(model, [], [9], add_bos=True) == [1, 2, 9, 3]
    assert prompt_ids(card(Fim(1, 2, 3, "spm"), None, add_bos=False), [7], [9], add_bos=True) == [2, 9, 1, 7, 3]


def test_other_vocabularies_have_none() -> None:
    assert known_tokens({"a": 1, "<|fim_prefix|>": 2, "<|fim_suffix|>": 3}) is None
    assert known_tokens({}) is None


@given(
    st.lists(st.integers(0, 6), max_size=6), st.lists(st.integers(0, 6), max_size=6), st.booleans(), st.booleans(),
    st.sampled_from(("psm", "spm")),
)  # fmt: skip
def test_one_bos_at_most_and_only_first(
    before: list[int], after: list[int], adds: bool, asked: bool, mode: str
) -> None:
    model = card(Fim(101, 102, 103, mode), 0, add_bos=adds)  # type: ignore[arg-type]
    ids = prompt_ids(model, before, after, add_bos=asked)
    assert 0 not in ids[1:]
    assert (ids[0] == 0) == ((adds and asked) or before[:1] == [0])
    assert [token for token in ids if token > 100] == ([101, 102, 103] if mode == "psm" else [102, 101, 103])


class SpacePutting:
    """Byte tokens, and a space before every text, as SentencePiece has it."""

    def __init__(self, space: bool) -> None:
        self._space = space

    def tokenize(self, text: str) -> list[int]:
        return list((" " + text if self._space and text else text).encode())

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


@pytest.mark.parametrize("text", ["x = 1", " x", "\n", "\n\n x", "é", ""])
@pytest.mark.parametrize("space", [True, False])
def test_the_suffix_is_as_it_was_sent(text: str, space: bool) -> None:
    tokenizer = SpacePutting(space)
    assert suffix_ids(text, tokenizer.tokenize, tokenizer.detokenize) == list(text.encode())
