"""What of a request with a constraint its client gets to see, however the frames are cut, and from wherever it comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.known_jobs import KnownJob
from api.relay.builder import Event
from api.relay.completion_builder import CompletionBuilder
from api.relay.cursor import BEGIN, Behind, Cursor
from api.relay.inspection import Inspector
from api.relay.job_object import job_object
from api.relay.view import View
from shared import results
from shared.errors import Cancelled
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start, Take
from shared.jobs import Job
from shared.reasoning import Reasoning
from shared.structured import Constraint, of_choices
from tests.unit.completion_frames import Entry, a_job, entries, requests, told, usage

LIVE = of_choices(["yes"])
WHOLE = msgspec.structs.replace(LIVE, whole=True)


def constrained(constraint: Constraint, **more: Any) -> Job:
    return msgspec.structs.replace(a_job(**more), constraint=constraint)


@dataclass
class Check:
    """Counts what it is asked; texts that are `right` are."""

    right: tuple[str, ...] = ("yes",)
    asked: list[str] = field(default_factory=list)

    def __call__(self, constraint: Constraint, text: str) -> bool:
        self.asked.append(text)
        return text in self.right


@dataclass
class Client:
    """`events`: what it was sent; `after` so many entries."""

    job: Job
    check: Check
    cursor: Cursor = BEGIN
    events: list[Event] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def read(self, told: list[Entry]) -> Client:
        builder = CompletionBuilder(self.job, fingerprint="f")
        inspector, behind = Inspector(self.job, self.check), Behind(builder, self.cursor)
        for number, (last, frames) in enumerate(told):
            for passed in inspector.feed(last, frames):
                if passed.silent:
                    builder.feed(passed.last, passed.frames)
                    continue
                made, _ = behind.feed(passed.last, passed.frames)
                self.events += made
                self.times += [number] * len(made)
            if builder.ended:
                break
        self.builder = builder
        return self

    @property
    def data(self) -> list[dict[str, Any]]:
        return [json.loads(event.data) for event in self.events]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for chunk in self.data for choice in chunk.get("choices", ()))

    @property
    def finishes(self) -> list[str]:
        return [c["finish_reason"] for chunk in self.data for c in chunk.get("choices", ()) if c["finish_reason"]]

    @property
    def error(self) -> str | None:
        return next((chunk["error"]["code"] for chunk in self.data if "error" in chunk), None)


def one_by_one(frames: list[Frame]) -> list[Entry]:
    return entries(frames, list(range(len(frames))))


def test_what_masks_guarantee_passes_as_it_comes() -> None:
    check = Check()
    client = Client(constrained(LIVE), check).read(one_by_one(told("y", "e", "s")))
    assert (client.text, client.finishes, client.error) == ("yes", ["stop"], None)
    assert client.times[:3] == [2, 3, 4], "each delta is out with its entry"
    assert check.asked == ["yes"]


def test_what_they_do_not_comes_whole_at_the_end() -> None:
    frames = told("y", "e", "s")
    client = Client(constrained(WHOLE), check := Check()).read(one_by_one(frames))
    assert (client.text, client.finishes, client.error) == ("yes", ["stop"], None)
    assert set(client.times) == {len(frames) - 1} and check.asked == ["yes"]
    assert [event.id for event in client.events] == [
        event.id for event in Client(constrained(LIVE), Check()).read(one_by_one(frames)).events
    ], "the events are those of a stream that was not held"


def test_a_text_that_is_wrong_has_no_finish() -> None:
    client = Client(constrained(LIVE), Check()).read(one_by_one(told("n", "o")))
    assert (client.text, client.finishes, client.error) == ("no", [], "structured_output_failed")
    assert client.builder.error is not None and client.builder.error.status == 502


def test_where_it_was_held_nothing_of_it_is_seen() -> None:
    for echo in (False, True):
        client = Client(constrained(WHOLE, echo=echo), Check()).read(one_by_one(told("n", "o")))
        assert (client.text, client.finishes, client.error) == ("", [], "structured_output_failed")
        assert len(client.events) == 1 and client.builder.usage_so_far() == usage(3, 3) | {
            "prompt_tokens_details": {"cached_tokens": 0}
        }


@pytest.mark.parametrize("constraint", [LIVE, WHOLE])
def test_a_text_that_was_cut_off_is_what_it_is(constraint: Constraint) -> None:
    client = Client(constrained(constraint), check := Check()).read(one_by_one(told("y", reason="length")))
    assert (client.text, client.finishes, client.error) == ("y", ["length"], None) and not check.asked


def test_an_error_of_the_worker_passes_and_held_text_does_not() -> None:
    frames: list[Frame] = [*told("y", "e")[:-2], Error.of(Cancelled("x"))]
    client = Client(constrained(WHOLE), Check()).read(one_by_one(frames))
    assert (client.text, client.error) == ("", "cancelled")
    client = Client(constrained(LIVE), Check()).read(one_by_one(frames))
    assert (client.text, client.error) == ("ye", "cancelled")


def test_the_start_is_seen_at_once() -> None:
    """So that a stream's status goes out, and its place in the queue is no longer told."""
    inspector = Inspector(constrained(WHOLE), Check())
    passed = inspector.feed(Name(5, 3), [Take("w"), Start(1), Delta(0, [1], "y")])
    assert [(entry.last, [type(frame) for frame in entry.frames]) for entry in passed] == [(Name(5, 2), [Take, Start])]


def test_fb058_reasoning_is_no_part_of_what_is_looked_at() -> None:
    job = msgspec.structs.replace(constrained(LIVE), reasoning=Reasoning("<think>", "</think>"))
    client = Client(job, check := Check()).read(one_by_one(told("<th", "ink>no</think>", "\n\nyes")))
    assert check.asked == ["yes"] and client.finishes == ["stop"]
    client = Client(job, check := Check()).read(one_by_one(told("<think>", "yes")))
    assert check.asked == [""] and client.error == "structured_output_failed"


def test_of_several_choices_each_is_looked_at() -> None:
    frames: list[Frame] = [
        Take("w"), Start(1), Delta(1, [1], "yes"), Finish(1, "stop"), Delta(0, [1, 2], "ye"), Delta(0, [3], "x"),
        Finish(0, "stop"), End(usage(1, 4)),
    ]  # fmt: skip
    client = Client(constrained(LIVE, n=2), check := Check()).read(one_by_one(frames))
    assert check.asked == ["yes", "yex"]
    assert (client.finishes, client.error) == (["stop"], "structured_output_failed")
    client = Client(constrained(WHOLE, n=2), Check()).read(one_by_one(frames))
    assert (client.text, client.finishes, client.error) == ("", [], "structured_output_failed")


def test_of_several_candidates_those_that_are_kept() -> None:
    job = msgspec.structs.replace(constrained(LIVE), n=1, best_of=2)
    frames: list[Frame] = [
        Take("w"), Start(1), Delta(0, [1], "no"), Finish(0, "stop"), Delta(1, [1], "yes"), Finish(1, "stop"),
        End(usage(1, 2), pick=[1]),
    ]  # fmt: skip
    client = Client(job, check := Check()).read(one_by_one(frames))
    assert client.builder.response()["choices"][0]["text"] == "yes" and check.asked == ["yes"]


@given(made=requests(), data=st.data(), whole=st.booleans(), right=st.booleans())
def test_however_it_is_cut_and_wherever_it_is_resumed(
    made: tuple[Job, list[Frame], list[str]], data: st.DataObject, whole: bool, right: bool
) -> None:
    job, frames, texts = made
    job = msgspec.structs.replace(job, constraint=WHOLE if whole else LIVE)
    check = Check(tuple(texts) if right else tuple(texts[1:]))
    cuts = data.draw(st.lists(st.integers(0, len(frames))))
    cut = entries(frames, cuts)
    client = Client(job, check).read(cut)
    straight = Client(job, check).read(one_by_one(frames))
    assert (client.text, client.finishes, client.error) == (straight.text, straight.finishes, straight.error)
    assert client.builder.response() == straight.builder.response()
    if not client.events:
        return
    seen = data.draw(st.integers(0, len(client.events) - 1))
    cursor = Cursor.parse(client.events[seen].id, "cursor")
    resumed = Client(job, check, cursor).read(entries(frames, data.draw(st.lists(st.integers(0, len(frames))))))
    before = Client(job, check)
    before.events = client.events[: seen + 1]
    assert before.text + resumed.text == client.text
    assert before.finishes + resumed.finishes == client.finishes


def known(job: Job, status: Any, end: End | Error) -> KnownJob:
    return KnownJob(
        job=job, view=View("f"), status=status, ended=True, end=end, logged=True, home="", grace_s=0, background=False
    )  # fmt: skip


def described(job: Job, frames: list[Frame], status: Any = "completed") -> dict[str, Any]:
    folded = results.fold(frames)
    end = frames[-1]
    assert isinstance(end, End | Error)
    return job_object(known(job, status, end), (Name(1, len(folded)), folded), None, Check())


@pytest.mark.parametrize("constraint", [LIVE, WHOLE])
def test_the_request_by_its_id_says_the_same(constraint: Constraint) -> None:
    shown = described(constrained(constraint), told("ye", "s"))
    assert shown["status"] == "completed" and shown["choices"][0]["text"] == "yes" and shown["error"] is None
    shown = described(constrained(constraint), told("n", "o"))
    assert shown["status"] == "failed" and shown["choices"] == []
    assert shown["error"]["code"] == "structured_output_failed" and shown["usage"]["completion_tokens"] == 3


def test_a_text_that_nobody_has_looked_at_is_not_shown() -> None:
    frames: list[Frame] = [*told("y", "e")[:-3], Error.of(Cancelled("x"))]
    assert described(constrained(WHOLE), frames, "cancelled")["choices"] == []
    assert described(constrained(LIVE), frames, "cancelled")["choices"][0]["text"] == "ye"
