"""Failover of real models: what was seen stays, and what follows is what the model says.

A resumed text may differ from an undisturbed one where two tokens are as likely as each other. The promise is: the ids
logged before the kill are the beginning of the final ids, and each token behind them is the likeliest one, to within
rounding, for a model that reads prompt and completion anew.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared import cards, keys
from shared.frames import Delta, Frame
from tests.conftest import wait_for
from tests.exllamav2 import harness
from tests.faults import books
from tests.faults.told import Choice, of_answer, of_stream
from tests.stack import REAL, Stack, Stream, said
from tests.tiny_model import write_tiny_model
from workers.engines.scripted import CHAT_TEMPLATE

STORY = "Once upon a time, in a small village by the sea, there lived a girl who"
GREEDY = {"temperature": 0, "ignore_eos": True}
#: Longest pause where the supervisor has seen the death, and where a lease must run out, s.
SEEN, LEASED = 2.0, 12.0


@dataclass
class Served:
    """`rounding`: how far a greedy token may be from the likeliest one, nats; `beside`: one of several choices, whose memory
    lies mixed with the others' (docs/failover.md). `repeats`: equal requests give equal texts,
    but where two tokens are as likely as each other to some thousandths.
    `length`: of a text that lasts long enough to be hit in the middle, tokens. `prefill`: s that the model may take to
    read everything again, which comes on top of the pause."""

    stack: Stack
    model: str
    length: int
    rounding: float = 0.1
    beside: float = 0.1
    repeats: bool = True
    prefill: float = 0.5

    def ids(self, text: str) -> list[int]:
        fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_tokens_as_token_ids": True}
        return named(of_answer(self.stack.complete(text, model=self.model, **fields)).choices[0])


def named(choice: Choice) -> list[int]:
    """The ids of a choice's logprobs."""
    assert choice.logprobs is not None
    return [int(name.removeprefix("token_id:")) for name in choice.logprobs["tokens"]]


TWO = ("--workers", "2:2")


def carried(folder: Path) -> Iterator[Served]:
    with Stack(folder, ("llamacpp",), options=TWO, threads=1, lanes=8, context_length=1024) as stack:
        yield Served(stack, REAL, 60, beside=0.5, repeats=False)


def tiny(folder: Path) -> Iterator[Served]:
    model = write_tiny_model(folder / "tiny.gguf", chat_template=CHAT_TEMPLATE)
    options = ("--model", f"{model}=tiny", *TWO)
    with Stack(folder, ("llamacpp",), options=options, real="tiny", threads=1, lanes=8) as stack:
        yield Served(stack, "tiny", 1500)


def exllamav2(folder: Path) -> Iterator[Served]:
    if (why := harness.missing()) is not None:
        pytest.skip(why)
    from tests.exllamav2 import models

    options = ("--model", str(models.write_tiny_llama(folder / "tiny", vocab=500, fim=True)), *TWO)
    settings = {"lanes": 4, "context_length": 1024, "context_cells": 4096, "prefill_chunk": 256}
    with Stack(folder, ("exllamav2",), options=options, real="tiny", module="tests.exllamav2.cli", **settings) as stack:
        yield Served(stack, "tiny", 400, repeats=False, prefill=1.0)


@pytest.fixture(
    scope="module", params=[tiny, *(pytest.param(make, marks=pytest.mark.slow) for make in (carried, exllamav2))]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    make: Callable[[Path], Iterator[Served]] = request.param
    yield from make(tmp_path_factory.mktemp(make.__name__))


def two_workers(served: Served) -> bool:
    with served.stack.store() as store:
        return len(pids := served.stack.workers()) == 2 and all(books.worker_of(store, pid) for pid in pids)


def cut_short(served: Served, tokens: int, number: int, prompt: Any, **fields: Any) -> tuple[Stream, float]:
    """A stream whose worker gets signal `number` when so many tokens are logged, and its longest pause, s."""
    for _ in range(4):  # a small model may be done before the signal is there
        stream, parts = _cut_short(served, tokens, number, prompt, **fields)
        if len(parts) == 2:
            break
    assert len(parts) == 2, "the signal has not hit it in the middle"
    for choice in of_stream(stream).choices:
        before, behind = (books.ids(part, choice) for part in parts)
        assert len(before) >= 1 and len(before) + len(behind) == of_stream(stream).usage["completion_tokens"] / len(
            of_stream(stream).choices
        )
    return stream, max(later - earlier for earlier, later in pairwise(stream.times))


def _cut_short(
    served: Served, tokens: int, number: int, prompt: Any, **fields: Any
) -> tuple[Stream, list[list[Frame]]]:
    wait_for(lambda: two_workers(served), 90)
    with served.stack.store() as store:
        with served.stack.open(prompt, model=served.model, **fields) as stream:
            wait_for(lambda: len(books.ids(books.logged(store, stream.id))) >= tokens, 30, every=0.002)
            worker = books.owner(store, stream.id)
            os.kill(worker, number)
            before = books.logged(store, stream.id)
            try:
                stream.read(timeout=60)
            finally:
                if number == signal.SIGSTOP:
                    os.kill(worker, signal.SIGCONT)
        told = books.logged(store, stream.id)
        assert told[: len(before)] == before, "what was logged before the signal stays"
    return stream, books.attempts(told)


def logged_ids(served: Served, stream: Stream, choice: int = 0) -> tuple[list[int], int]:
    """A choice's ids, and how many of them are from before the join."""
    with served.stack.store() as store:
        told = books.logged(store, stream.id)
    return books.ids(told, choice), len(books.ids(books.attempts(told)[0], choice))


def far_from_the_likeliest(served: Served, prompt: list[int], ids: list[int], begin: int) -> float:
    """Nats, the worst of `ids` from `begin` on, when prompt and ids are scored anew. End tokens were out of the question."""
    fields = {"echo": True, "logprobs": 3, "max_tokens": 0, "return_tokens_as_token_ids": True}
    answer = served.stack.complete([*prompt, *ids], model=served.model, **fields)
    scores = of_answer(answer).choices[0].logprobs
    assert scores is not None
    assert named(of_answer(answer).choices[0])[-len(ids) :] == ids
    behind = range(len(scores["tokens"]) - len(ids) + begin, len(scores["tokens"]))
    with served.stack.store() as store:
        ends = {f"token_id:{end}" for end in cards.decode(store.hget(keys.card(served.model), "card")).end_ids}
    best = [max(logprob for name, logprob in scores["top_logprobs"][i].items() if name not in ends) for i in behind]
    return max(top - scores["token_logprobs"][i] for top, i in zip(best, behind, strict=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_greedy_texts_go_on_with_the_likeliest_token(served: Served, number: int) -> None:
    prompt = served.ids(STORY)
    stream, pause = cut_short(served, 12, number, prompt, max_tokens=served.length, **GREEDY)
    ids, joined = logged_ids(served, stream)
    assert len(ids) == of_stream(stream).usage["completion_tokens"] == served.length
    assert far_from_the_likeliest(served, prompt, ids, joined) <= served.rounding
    assert pause <= (SEEN if number == signal.SIGKILL else LEASED) + served.prefill


@pytest.mark.slow
def test_several_choices_with_logprobs_go_on(served: Served) -> None:
    prompt = served.ids(STORY)
    fields = {
        "max_tokens": served.length,
        "n": 2,
        "logprobs": 2,
        "echo": True,
        "return_tokens_as_token_ids": True,
        **GREEDY,
    }
    stream, _ = cut_short(served, 8, signal.SIGKILL, prompt, **fields)
    for index, choice in of_stream(stream).choices.items():
        ids, joined = logged_ids(served, stream, index)
        assert choice.logprobs is not None
        assert named(choice) == [*prompt, *ids]
        assert far_from_the_likeliest(served, prompt, ids, joined) <= served.beside
        behind = range(len(prompt) + joined, len(prompt) + len(ids))
        tops, own = choice.logprobs["top_logprobs"], choice.logprobs["token_logprobs"]
        assert all(own[place] in sorted(tops[place].values())[-2:] for place in behind), (
            "the likeliest, or next to an end"
        )


def numbers_of(count: int) -> dict[str, Any]:
    """The schema of an object with so many numbers."""
    items = {"type": "integer", "minimum": 0, "maximum": 999}
    numbers = {"type": "array", "items": items, "minItems": count, "maxItems": count}
    return {"type": "object", "properties": {"all": numbers}, "required": ["all"]}


def test_a_json_schema_half_satisfied_at_the_kill(served: Served) -> None:
    """The ids that were logged lead the next worker's grammar to where the first one's was."""
    count = max(20, served.length // 12)
    schema = {**numbers_of(count), "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    fields = {"temperature": 0.8, "seed": 1, "response_format": asked}
    stream, _ = cut_short(served, 12, signal.SIGKILL, STORY, **fields)
    [choice] = of_stream(stream).choices.values()
    value = json.loads(choice.text)
    assert list(value) == ["all"] and len(value["all"]) == count and set(value["all"]) <= set(range(1000))
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "note"}}], ids=["any", "named"]
)
def test_a_forced_call_half_streamed_at_the_kill(served: Served, choice: Any) -> None:
    """The client has its name and some of its arguments; the rest follows, and the arguments are one JSON object."""
    count = max(20, served.length // 12)
    parameters = {**numbers_of(count), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.8, "seed": 1}
    head = len(served.ids('<tool_call>\n{"name": "note", "arguments": {"all": [1, 2,'))
    stream, _ = cut_short(served, head, signal.SIGKILL, said(STORY), **fields)
    [told] = of_stream(stream).choices.values()
    [(name, arguments)] = told.calls
    value = json.loads(arguments)
    assert name == "note" and list(value) == ["all"] and len(value["all"]) == count
    assert set(value["all"]) <= set(range(1000)) and told.finish_reason == "tool_calls" and not told.text


@pytest.mark.parametrize("more", [{}, {"suffix": " and so it ended."}], ids=["plain", "gap"])
def test_a_seeded_text_goes_on_with_the_same_random_numbers(served: Served, more: dict[str, Any]) -> None:
    if more and served.stack.complete("x", model=served.model, max_tokens=1, **more).status == 400:
        pytest.skip("the model cannot fill a gap")
    fields = {"max_tokens": served.length, "temperature": 0.8, "ignore_eos": True, **more}
    for seed in range(3):  # rounding makes another text of one or the other
        undisturbed = served.stack.complete(
            STORY, model=served.model, seed=seed, logprobs=0, return_tokens_as_token_ids=True, **fields
        )
        stream, _ = cut_short(served, 12, signal.SIGKILL, STORY, seed=seed, **fields)
        ids, joined = logged_ids(served, stream)
        assert len(ids) == served.length
        if not served.repeats or ids[: joined + 8] == named(of_answer(undisturbed).choices[0])[: joined + 8]:
            return
    pytest.fail("three times other tokens than undisturbed")


def test_a_stop_string_half_matched_at_the_kill(served: Served) -> None:
    """It is long, so that the worker dies in it."""
    if not served.repeats:
        pytest.skip("nobody knows the text beforehand")
    fields = {"max_tokens": served.length, **GREEDY}
    for number in range(3):  # rounding makes another text of one or the other
        prompt = f"{number}. {STORY}"
        text = served.stack.complete(prompt, model=served.model, **fields).text
        begin = len(text) // 3
        length = min(200, begin)  # characters
        stop = text[begin : begin + length]
        undisturbed = of_answer(served.stack.complete(prompt, model=served.model, stop=[stop], **fields))
        if text.find(stop) != begin or undisturbed.choices[0].text != text[:begin]:
            continue
        assert undisturbed.choices[0].finish_reason == "stop"
        tokens = int(undisturbed.usage["completion_tokens"] * (begin + 5) / (begin + length))
        stream, _ = cut_short(served, tokens, signal.SIGKILL, prompt, stop=[stop], **fields)
        with served.stack.store() as store:
            before = books.attempts(books.logged(store, stream.id))[0]
        held = isinstance(before[-1], Delta) and before[-1].n is not None
        if held and of_stream(stream).choices == undisturbed.choices:
            return
    pytest.fail("three times not the text that it was to be")
