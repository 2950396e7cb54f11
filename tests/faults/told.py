"""What a client was told of one request, in one shape for streams and plain answers, so that two runs can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.contract.schemas import check_chunk, check_completion
from tests.scores import LISTS
from tests.stack import Answer, Stream, calls_of, event_name, reasoning_of, text_of


@dataclass(frozen=True)
class Choice:
    """`logprobs`: the lists, joined; None where none were asked for. `reasoning`, `calls` (name and arguments): of a chat."""

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: dict[str, list[Any]] | None
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Told:
    choices: dict[int, Choice]
    usage: dict[str, Any]


def of_answer(answer: Answer) -> Told:
    """Fails for anything but a good answer."""
    assert answer.status == 200, answer
    check_completion(answer.json)
    choices = {
        choice["index"]: Choice(
            text_of(choice),
            choice["finish_reason"],
            choice["stop_reason"],
            _joined([choice["logprobs"]]),
            reasoning_of(choice),
            calls_of([choice]),
        )
        for choice in answer.json["choices"]
    }
    return Told(choices, answer.usage)


def of_stream(stream: Stream) -> Told:
    """Fails for a stream that did not end well, once, with all its events in order and each choice finished once."""
    assert stream.status == 200 and stream.answer is None, stream
    assert stream.ended and stream.error is None, stream
    assert stream.done == 1 and stream.raw.endswith(b"data: [DONE]\n\n") and b"HTTP/1" not in stream.raw, stream
    for chunk in stream.data:
        check_chunk(chunk)
    names = [event_name(event_id or "none") for event_id in stream.ids]
    assert names == sorted(set(names)), stream.ids
    choices: dict[int, Choice] = {}
    for index in sorted({piece["index"] for piece in stream.pieces}):
        own = [piece for piece in stream.pieces if piece["index"] == index]
        assert [bool(piece["finish_reason"]) for piece in own] == [False] * (len(own) - 1) + [True], own
        if "delta" in own[0]:
            assert [index for index, piece in enumerate(own) if "role" in piece["delta"]] == [0], own
        choices[index] = Choice(
            "".join(map(text_of, own)),
            own[-1]["finish_reason"],
            own[-1]["stop_reason"],
            _joined([piece["logprobs"] for piece in own]),
            "".join(map(reasoning_of, own)),
            calls_of(own),
        )
    assert stream.usage is not None
    return Told(choices, stream.usage)


def _joined(scores: list[dict[str, Any] | None]) -> dict[str, list[Any]] | None:
    """The lists of all pieces, or None where there are none."""
    there = [score for score in scores if score is not None]
    names = ("content",) if there and "content" in there[0] else LISTS
    return {name: [entry for score in there for entry in score[name]] for name in names} if there else None
