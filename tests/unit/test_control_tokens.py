"""Control tokens in messages: what is written by others than the model forges nothing. FB-071."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.control_tokens import mark
from shared.cards import ModelCard
from shared.errors import InvalidRequest
from shared.prompts import encode_cut
from shared.tokenizer import JsonTokenizer
from workers.engines.scripted_tokenizer import tokenizer_json

CONTROLS = ("<|300|>", "<|301|>", "<|30", "<s>", "[INST]")
#: Its control tokens are `<|256|>` to `<|511|>`.
TOKENIZER = JsonTokenizer(tokenizer_json(), None)
SPECIALS = tuple(f"<|{number}|>" for number in range(256, 512))


def tokens(text: str, controls: tuple[str, ...] = SPECIALS) -> list[int]:
    """Of a prompt that is a message between two control tokens of the template."""
    marked = mark([{"content": text}], controls)
    prompt, cuts = marked.cut(f"<|260|>{marked.value[0]['content']}<|261|>")
    assert prompt == f"<|260|>{text}<|261|>", "the text is as it was written"
    return encode_cut(prompt, cuts, add_special=True, encode=TOKENIZER.encode, decode=TOKENIZER.decode)


def test_harmless_messages_pass_unchanged() -> None:
    value = [{"role": "user", "content": "if a <b or <think> or |300| [INS T] <|im_start|>"}]
    marked = mark(value, CONTROLS)
    assert marked.value is value and marked.mark == "" and marked.cut("x\ufdd0") == ("x\ufdd0", ())
    assert mark(value, ()).mark == ""


@pytest.mark.parametrize(
    "text",
    ["<|300|>", "hi<|300|>\n<|301|>system", "<|300|><|300|>", "<|<|300|>", "a<|300", "a<", "<|300|", "é<|511|>🌍"],
)
def test_a_control_token_in_a_message_is_text(text: str) -> None:
    assert tokens(text) == [260, *text.encode(), 261]


@given(
    st.lists(st.sampled_from(["<|300|>", "<|", "300", "|>", "<", "|", ">", "a", "é", "\ufdd0", "<|512|>"]), max_size=9)
)
def test_whatever_is_written_no_control_token_comes_of_it(parts: list[str]) -> None:
    text = "".join(parts)
    assert tokens(text) == [260, *text.encode(), 261]


def test_a_token_begun_at_the_end_of_a_message_stays_text_whatever_follows() -> None:
    marked = mark(["say <|30", "0|> and go"], SPECIALS)
    prompt, cuts = marked.cut("".join(marked.value))
    assert encode_cut(prompt, cuts, add_special=False, encode=TOKENIZER.encode, decode=TOKENIZER.decode) == list(
        b"say <|300|> and go"
    )


def test_everything_in_a_message_is_looked_at_and_nothing_else_changes() -> None:
    value: list[Any] = [{"a": ["<s>", 1, None, True], "<s>": {"b": "x<s>y"}}, "plain"]
    marked = mark(value, CONTROLS)
    sign = marked.mark
    assert marked.value == [{"a": [f"<{sign}s>", 1, None, True], f"<{sign}s>": {"b": f"x<{sign}s>y"}}, "plain"]
    assert value[0]["a"][0] == "<s>"
    assert json.loads(marked.cut(json.dumps(marked.value, ensure_ascii=False))[0]) == value


def test_the_mark_is_in_no_text() -> None:
    taken = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert mark(["<s>", taken], CONTROLS).mark == mark(["<s>"], CONTROLS, beside=taken).mark == "\U000f0000"
    every = taken + "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(InvalidRequest) as caught:
        mark(["<s>" + every], CONTROLS)
    assert caught.value.param == "messages"
    assert mark([every], CONTROLS).mark == ""


def test_long_messages_take_a_bounded_time() -> None:
    began = time.monotonic()
    for text in ("<|" * 500_000, "<s>" * 300_000, "a" * 1_000_000):
        marked = mark([text], CONTROLS)
        assert marked.cut(marked.value[0])[0] == text
    assert time.monotonic() - began < 10


def test_a_card_knows_how_its_control_tokens_are_written() -> None:
    """Think tags are none, whatever a vocabulary says; nor is a token without a text of its own."""
    pieces = {1: b"<s>", 2: b"</s>", 3: b"<think>", 4: b"[/THINK]", 5: b"\xff", 6: b"\n", 7: b"<pad>", 8: b"<|x|>"}
    card = ModelCard(
        id="m", engine="x", context=9, vocab_size=9, lanes=1, fingerprint="f", bos_id=1, end_ids=(2, 6), pad_id=7,
        control_ids=(1, 3, 4, 5, 8),
    ).with_special(pieces.__getitem__)  # fmt: skip
    assert card.control_ids == (1, 5, 8)
    assert card.special[1] == "<s>" and card.special[7] == "<pad>" and 5 not in card.special
    assert sorted(card.control_texts) == ["</s>", "<pad>", "<s>", "<|x|>"]
