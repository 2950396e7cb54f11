"""Logprobs over HTTP: streamed and plain they are the lists that the contract says, whatever the tokens are.

(The scripted engine numbers the pieces of each script from 512 on; so all choices here are of one script. Choices of
different texts are in tests/unit/test_lane_and_builder.py.) The random texts and stop strings of test_streams_equal.py with logprobs, echo, several choices and token prompts; what
has to come out is worked out by tests/references.py.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest

from tests.contract.schemas import check_chunk, check_completion
from tests.integration.test_streams_equal import random_case
from tests.references import Expected, completion, kept
from tests.scores import LISTS, aligned, joined
from tests.stack import Stack

CASES = 64
BATCHES = 4
END = "<|257|>"


class Case(NamedTuple):
    """`best`: the logprobs asked for."""

    pieces: list[bytes]
    values: list[float]
    stops: list[str]
    limit: int | None
    echo: bool
    best: int
    n: int
    as_ids: bool

    @property
    def script(self) -> str:
        return json.dumps({"pieces": [{"hex": piece.hex()} for piece in self.pieces], "logprobs": self.values})

    @property
    def prompt(self) -> str | list[int]:
        return list(self.script.encode()) if self.as_ids else self.script

    @property
    def fields(self) -> dict[str, Any]:
        fields = {"n": self.n, "stop": self.stops, "max_tokens": self.limit, "echo": self.echo}
        return {**fields, "logprobs": self.best}


def scored_case(number: int) -> Case:
    dice = random.Random(f"scores equal {number}")
    base = random_case(10_000 + number)
    pieces = [piece for piece in base.pieces if piece]
    values = [-round(dice.uniform(0, 30), 3) for _ in range(len(pieces) + 1)]
    best, n = dice.choice([0, 1, 3]), dice.choice([1, 1, 2, 3])
    return Case(pieces, values, base.stops, base.limit, dice.random() < 0.5, best, n, dice.random() < 0.4)


def top(token: str, value: float, best: int) -> dict[str, float]:
    """The scripted engine's alternatives: ids 0, 1, 2 ... at -10, -11, -12 ...; of two with one string the higher."""
    ranked = sorted([(value, token), *((-10.0 - other, chr(other)) for other in range(best + 1))], reverse=True)[:best]
    found: dict[str, float] = {}
    for logprob, text in [*ranked, (value, token)]:
        found.setdefault(text, logprob)
    return found


def wanted(case: Case) -> tuple[Expected, str, dict[str, list[Any]]]:
    """(the end of each choice, its text, its lists)."""
    script, values = case.script, case.values
    want = completion(case.pieces, case.stops, case.limit)
    names, places = kept(case.pieces, END, want)
    lists: dict[str, list[Any]] = {
        "tokens": names,
        "token_logprobs": values[: len(names)],
        "top_logprobs": [top(token, value, case.best) for token, value in zip(names, values, strict=False)],
        "text_offset": [len(script) + place for place in places],
    }
    if not case.echo:
        return want, want.text, lists
    before: dict[str, list[Any]] = {
        "tokens": list(script),
        "token_logprobs": [None] + [-0.5] * (len(script) - 1),
        "top_logprobs": [None, *(top(token, -0.5, case.best) for token in script[1:])],
        "text_offset": list(range(len(script))),
    }
    return want, script + want.text, {key: before[key] + lists[key] for key in LISTS}


def test_the_cases_are_of_all_kinds() -> None:
    cases = [scored_case(number) for number in range(CASES)]
    ends = [wanted(case)[0] for case in cases]
    assert sum(end.stop_reason is not None for end in ends) > 15
    assert sum(end.finish == "length" for end in ends) > 5
    assert sum("\ufffd" in end.text for end in ends) > 10
    assert {case.echo for case in cases} == {case.as_ids for case in cases} == {True, False}


@pytest.mark.parametrize("batch", range(BATCHES))
def test_scores_are_those_of_the_contract_streamed_and_not(stack: Stack, batch: int) -> None:
    for number in range(batch, CASES, BATCHES):
        case = scored_case(number)
        plain = stack.complete(case.prompt, **case.fields)
        assert plain.status == 200, (number, plain)
        check_completion(plain.json)
        with stack.open(case.prompt, **case.fields) as stream:
            stream.read()
        for chunk in stream.data:
            check_chunk(chunk)
        assert stream.usage == plain.usage and stream.error is None
        want, text, lists = wanted(case)
        whole = text if case.echo else case.script + text
        begin = len(case.script) if case.echo else 0
        assert len(plain.json["choices"]) == case.n
        for index, choice in enumerate(plain.json["choices"]):
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, *want[1:3]), number
            assert choice["logprobs"] == lists, (number, case)
            aligned(choice["logprobs"], whole, entries=len(lists["tokens"]), best=case.best, scored_prompt=begin)
            mine = [piece for piece in stream.pieces if piece["index"] == index]
            assert "".join(piece["text"] for piece in mine) == text, (number, index)
            assert joined(mine, index) == lists, (number, case)
            assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == want[1:3]
        assert plain.usage["completion_tokens"] == want.completion_tokens * case.n
        assert plain.usage["prompt_tokens"] == len(case.script)


def test_scoring_alone(stack: Stack) -> None:
    """max_tokens 0: the prompt's lists and nothing behind them."""
    for number in range(0, CASES, 8):
        case = scored_case(number)._replace(echo=True)
        for prompt in (case.script, list(case.script.encode())):
            fields = {**case.fields, "max_tokens": 0}
            plain = stack.complete(prompt, **fields)
            with stack.open(prompt, **fields) as stream:
                stream.read()
            begin = len(case.script)
            for index, choice in enumerate(plain.json["choices"]):
                lists = {key: values[:begin] for key, values in wanted(case)[2].items()}
                assert (choice["text"], choice["finish_reason"]) == (case.script, "length")
                assert choice["logprobs"] == lists == joined(stream.pieces, index)
            assert plain.usage == stream.usage and plain.usage["completion_tokens"] == 0


def test_tokens_without_text(stack: Stack) -> None:
    """Hidden control tokens, among others. Where they begin is a matter of taste; all else holds."""
    for number in range(20):
        case = scored_case(number)
        pieces = [piece for filled in case.pieces for piece in (filled, b"")]
        case = case._replace(pieces=[b"", *pieces], values=[], limit=None)
        plain = stack.complete(case.prompt, **case.fields)
        with stack.open(case.prompt, **case.fields) as stream:
            stream.read()
        want = completion(case.pieces, case.stops, None)
        for index, choice in enumerate(plain.json["choices"]):
            assert choice["text"].removeprefix(case.script) == want.text
            assert joined(stream.pieces, index) == choice["logprobs"]
            whole = choice["text"] if case.echo else case.script + choice["text"]
            begin, entries = len(case.script) if case.echo else 0, len(choice["logprobs"]["tokens"])
            aligned(choice["logprobs"], whole, entries=entries, best=case.best, scored_prompt=begin)
            if want.stop_reason is None:
                assert entries == begin + want.completion_tokens
