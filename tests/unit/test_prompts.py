"""From prompts to ids: what the server adds, what it hides, and what fits."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.frames import Name, Prompt, Start
from shared.jobs import Job
from shared.prompts import Ids, check_limit, prompt_ids, room_for
from shared.tokenizer import JsonTokenizer
from workers.engines.base import EngineRequest, PromptLogprobs, Started
from workers.engines.scripted_tokenizer import tokenizer_json
from workers.lane import Lane, PromptIds

PLAIN = JsonTokenizer(tokenizer_json(), None)
WITH_BOS = JsonTokenizer(tokenizer_json(), 256)
TAIL = "<|300|>\n\n<|301|>"


def job(prompt: str | list[int], **fields: Any) -> Job:
    return Job(id="j", model="m", prompts=[prompt], seed=1, created=0, **fields)


def ids(prompt: str | list[int], tokenizer: JsonTokenizer = PLAIN, **fields: Any) -> Ids:
    return prompt_ids(
        prompt,
        job(prompt, **fields),
        bos_id=256 if tokenizer is WITH_BOS else None,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
    )


def test_a_bos_comes_once() -> None:
    """FB-034"""
    assert ids("hi") == Ids([104, 105])
    assert ids("hi", WITH_BOS) == Ids([256, 104, 105], added=1)
    assert ids("<|256|>hi", WITH_BOS) == Ids([256, 104, 105], added=0)
    assert ids("hi", WITH_BOS, add_special=False) == Ids([104, 105])
    assert ids("", WITH_BOS) == ids("", WITH_BOS, add_special=False) == Ids([256], added=1)
    assert ids("<|256|>", WITH_BOS, parse_special=False).all == [256, *b"<|256|>"]
    assert ids([104, 105], WITH_BOS) == Ids([104, 105])


def test_a_tail_comes_behind_and_is_hidden() -> None:
    end = [300, 10, 10, 301]
    assert ids("hi", tail=TAIL) == Ids([104, 105, *end], hidden=4)
    assert ids([104, 105], tail=TAIL) == Ids([104, 105, *end], hidden=4)
    assert ids("hi", WITH_BOS, tail=TAIL) == Ids([256, 104, 105, *end], 1, 4)
    assert ids("", WITH_BOS, tail=TAIL) == Ids([256, *end], 1, 4)
    assert ids(f"hi{TAIL}", tail=TAIL) == ids([104, 105, *end], tail=TAIL) == Ids([104, 105, *end])


def test_special_tokens_of_a_tail_are_parsed_whatever_the_prompts_are() -> None:
    assert ids("<|300|>", tail=TAIL, parse_special=False) == Ids([*b"<|300|>", 300, 10, 10, 301], hidden=4)


def test_a_prompt_that_has_opened_the_block_gets_it_closed() -> None:
    tail = "<think>\n\n</think>"
    assert ids("x<think>\n", tail=tail) == Ids(list(b"x<think>\n\n</think>"), hidden=9)
    assert ids(list(b"x<think>\n"), tail=tail) == Ids(list(b"x<think>\n\n</think>"), hidden=9)


def test_a_token_across_the_border_is_the_tails() -> None:
    """Where prompt and tail make one token, the ids are those of the whole text."""

    def encode(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [100 if pair == "\n\n" else ord(pair[0]) for pair in _pairs(text)]

    made = prompt_ids("a\n", job("a\n", tail="\nb"), bos_id=None, encode=encode, decode=lambda tokens: "")
    assert made == Ids([97, 100, 98], hidden=2)


def _pairs(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text):
        step = 2 if text[at : at + 2] == "\n\n" else 1
        found.append(text[at : at + step])
        at += step
    return found


def test_without_a_tail_every_prompt_is_its_own_text() -> None:
    """Byte for byte, whatever is in it."""
    chosen = random.Random(5)
    for _ in range(300):
        text = "".join(
            chosen.choice("a <|>think\n\x00é🌍/<think></think><|im_end|> ") for _ in range(chosen.randint(1, 40))
        )
        made = ids(text)
        assert PLAIN.decode(made.all) == text and (made.added, made.hidden) == (0, 0)
        tokens = [chosen.randrange(65_536) for _ in range(chosen.randint(1, 20))]
        assert ids(tokens) == Ids(tokens)


def test_room() -> None:
    assert room_for(job("x"), 90, 100) == 10
    assert room_for(job("x", max_tokens=5), 90, 100) == 5
    assert room_for(job("x", max_tokens=50, fit_max_tokens=True), 90, 100) == 10
    assert room_for(job("x", max_tokens=0), 100, 100) == 0
    for tokens, fields, param in (
        (100, {}, "prompt"),
        (101, {"max_tokens": 0}, "prompt"),
        (90, {"max_tokens": 11}, "max_tokens"),
        (90, {"max_tokens": 11, "limit_field": "max_completion_tokens"}, "max_completion_tokens"),
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            room_for(job("x", **fields), tokens, 100)
        assert caught.value.param == param and "100" in caught.value.message and str(tokens) in caught.value.message
    with pytest.raises(InvalidRequest):
        room_for(job(""), 0, 100)


def test_a_limit_that_fits_behind_no_prompt() -> None:
    """FB-027: refused with or without the prompt's length."""
    with pytest.raises(ContextLengthExceeded) as caught:
        check_limit(job("x", max_tokens=100), 100)
    assert caught.value.param == "max_tokens" and caught.value.message.count("100") == 2
    with pytest.raises(ContextLengthExceeded, match="max_completion_tokens asks for 100") as caught:
        check_limit(job("x", max_tokens=100, limit_field="max_completion_tokens"), 100)
    assert caught.value.param == "max_completion_tokens"
    for fits in ({"max_tokens": 99}, {"max_tokens": 100, "fit_max_tokens": True}, {}):
        check_limit(job("x", **fits), 100)


def test_hidden_tokens_count_and_have_no_logprobs() -> None:
    asked = job("hi", tail=TAIL, echo=True, logprobs=0, max_tokens=1)
    made = ids("hi", WITH_BOS, tail=TAIL)
    lane = Lane(asked, Name(1, 1), [PromptIds(made.all, 1, made.added, "hi", hidden=made.hidden)], pieces=_pieces)
    [request] = lane.requests()
    assert request.prompt == [256, 104, 105, 300, 10, 10, 301]
    lane.on_event(0, Started(request.id))
    lane.on_event(0, PromptLogprobs(request.id, 0, [None, *[(-1.0, [(t, -1.0)]) for t in request.prompt[1:4]]]))
    lane.on_event(0, PromptLogprobs(request.id, 4, [(-1.0, [(t, -1.0)]) for t in request.prompt[4:]]))
    start, *prompts = [frame for frames in lane.outbox for frame in frames]
    assert isinstance(start, Start) and start.prompt_tokens == 7 and start.echo is None
    assert [token for frame in prompts if isinstance(frame, Prompt) for token in frame.t] == [104, 105]


def _pieces(request: EngineRequest, tokens: Any) -> list[bytes]:
    return [PLAIN.decode([token]).encode() for token in tokens]


def test_a_token_of_prompt_and_tail_is_parted_where_the_prompts_logprobs_are_shown() -> None:
    """It could not be shown for the prompt's end and hidden for the tail's beginning."""

    def encode(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [1000 if part == "\n\n" else ord(part) for part in re.findall(r"\n\n|.|\n", text)]

    def both(**fields: Any) -> Ids:
        return prompt_ids("a\n", job("a\n", tail="\n<", **fields), bos_id=None, encode=encode, decode=str)

    assert both() == Ids([97, 1000, 60], hidden=2)
    assert both(echo=True, logprobs=0) == Ids([97, 10, 10, 60], hidden=2)
