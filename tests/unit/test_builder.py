"""The builder: whatever the frames and however they are cut, the stream says what the response object says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.relay.builder import Event
from api.relay.completion_builder import CompletionBuilder
from api.schemas.stream_options import StreamOptions
from shared.errors import WorkerLost
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start, Take
from shared.jobs import Job
from tests.unit.completion_frames import Entry, a_job, entries, requests, told, usage


def build(job: Job, options: StreamOptions | None = None) -> CompletionBuilder:
    return CompletionBuilder(job, fingerprint="fp", options=options)


def run(builder: CompletionBuilder, cut: list[Entry]) -> list[Event]:
    return [event for last, frames in cut for event in builder.feed(last, frames)]


def data(events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events]


def stream(frames: list[Frame], options: StreamOptions | None = None, **job: Any) -> list[dict[str, Any]]:
    """Chunks of a live stream, one frame an entry."""
    return data(run(build(a_job(**job), options), entries(frames, list(range(len(frames))))))


def texts(chunks: list[dict[str, Any]], choices: int) -> list[str]:
    joined = [""] * choices
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            joined[choice["index"]] += choice["text"]
    return joined


@given(requests(), st.lists(st.integers(0, 30)), st.sampled_from([None, True, False]), st.booleans())
def test_stream_and_response_agree(
    request: tuple[Job, list[Frame], list[str]], cuts: list[int], include: bool | None, continuous: bool
) -> None:
    """Promise 1: the stream's text is what the non-streamed call returns; FB-030: so is its usage."""
    job, frames, want = request
    builder = build(job, StreamOptions(include, continuous))
    events = run(builder, entries(frames, cuts))
    chunks, whole = data(events), builder.response()
    assert builder.ended and builder.error is None
    assert texts(chunks, len(want)) == want == [choice["text"] for choice in whole["choices"]]
    finishes = {c["index"]: c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert len([1 for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]) == len(want)
    for choice in whole["choices"]:
        finish = finishes[choice["index"]]
        assert finish["text"] == ""
        assert (finish["finish_reason"], finish["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert whole["usage"] == frames[-1].usage  # type: ignore[union-attr]
    carried = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    if include is not False or continuous:
        assert carried[-1] == whole["usage"]
    if include is False and not continuous:
        assert not carried
    assert len({event.id for event in events}) == len(events)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


@given(requests(), st.lists(st.integers(0, 30)), st.integers(0, 40))
def test_a_replay_goes_on_behind_any_cursor(
    request: tuple[Job, list[Frame], list[str]], cuts: list[int], seen: int
) -> None:
    """What was seen up to an event and a replay of the log, cut at that event's frame, are the text once."""
    job, frames, want = request
    live = run(build(job), entries(frames, cuts))
    seen = min(seen, len(live) - 1)
    cursor, _, k = live[seen].id.partition(".")
    border = Name.parse(cursor).s
    again = build(job)
    replayed = run(again, entries(frames, [border])) if border < len(frames) else run(again, entries(frames, cuts))
    if border < len(frames):
        before = build(job)
        skipped = run(before, [(Name(5, border), frames[:border])])
        same_frame = [event for event in skipped if event.id.partition(".")[0] == cursor]
        rest = same_frame[int(k or 0) + 1 :] + replayed[len(skipped) :]
        assert texts(data(live[: seen + 1] + rest), len(want)) == want


def test_a_plain_stream() -> None:
    events = run(build(a_job()), entries(told("Hel", "lo", ""), list(range(8))))
    chunks = data(events)
    assert [event.id for event in events] == ["5-3", "5-4", "6-8"]
    first = {"text": "Hel", "index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
    assert chunks[0] == {
        "id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "system_fingerprint": "fp",
        "choices": [first],
    }  # fmt: skip
    assert chunks[-1]["choices"][0] == {**first, "text": "", "finish_reason": "stop"}
    assert chunks[-1]["usage"] == {**usage(3, 4), "prompt_tokens_details": {"cached_tokens": 0}}


def test_usage_forms() -> None:
    """FB-029 as the contract has it."""
    frames = told("a", "b")
    plain = stream(frames)
    assert [chunk.get("usage", "-") for chunk in plain[:-1]] == ["-", "-"] and plain[-1]["usage"]["total_tokens"] == 6
    extra = stream(frames, StreamOptions(True))
    assert all(chunk["usage"] is None for chunk in extra[:-1])
    assert extra[-1]["choices"] == [] and extra[-1]["usage"] == plain[-1]["usage"]
    assert not any("usage" in chunk for chunk in stream(frames, StreamOptions(False)))
    running = stream(frames, StreamOptions(True, True))
    assert [chunk["usage"]["completion_tokens"] for chunk in running] == [1, 2, 3, 3]
    assert [chunk["usage"]["prompt_tokens"] for chunk in running] == [3] * 4


def test_second_events_of_a_frame_are_numbered() -> None:
    builder = build(a_job(n=2, echo=True), StreamOptions(True))
    frames: list[Frame] = [
        Take("w"),
        Start(1),
        Delta(0, [1], "x"),
        Finish(0, "stop"),
        Finish(1, "length"),
        End(usage(1, 1)),
    ]
    events = run(builder, entries(frames, [2, 4]))
    assert [event.id for event in events] == ["5-2", "5-2.1", "5-3", "5-4", "6-6", "6-6.1"]


def test_echo_comes_first_and_once() -> None:
    """FB-035: nothing is trimmed; prompt and text can be sent back as a new prompt."""
    chunks = stream(told("\n\n Paris"), prompt="  P\n", echo=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["  P\n", "\n\n Paris", ""]


def test_echo_of_token_prompts_comes_decoded() -> None:
    job = Job(id="cmpl-1", model="m", prompts=[[1, 2]], seed=1, created=7, echo=True)
    builder = CompletionBuilder(job, fingerprint="fp")
    frames: list[Frame] = [
        Take("w"),
        Start(2, echo=["<s>a"]),
        Delta(0, [5], "b"),
        Finish(0, "length"),
        End(usage(2, 1)),
    ]
    run(builder, entries(frames, []))
    assert builder.response()["choices"][0]["text"] == "<s>ab"


def test_neighbours_are_joined_under_the_last_ones_name() -> None:
    events = run(build(a_job()), entries(told("a", "b", "c"), []))
    assert [event.id for event in events] == ["5-6", "6-8"] and texts(data(events), 1) == ["abc"]


@pytest.mark.parametrize("place", range(1, 7))
def test_an_error_is_the_only_end(place: int) -> None:
    """FB-004: no finish_reason is invented, also when all choices had finished and only `end` was missing."""
    error = WorkerLost("gone")
    builder = build(a_job())
    frames: list[Frame] = [*told("a", "b")[:place], Error(error.to_object(), 503, True)]
    chunks = data(run(builder, entries(frames, [1, 2])))
    assert builder.ended and builder.error is not None and builder.error.status == 503
    assert chunks[-1] == {"error": error.to_object()}
    assert not any(c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"])
    assert builder.response()["usage"] is None


def test_an_end_before_the_finish_is_an_error() -> None:
    chunks = stream([Take("w"), Start(1), Delta(0, [1], "a"), End(usage(1, 1))])
    assert chunks[-1]["error"]["code"] == "internal_error"


def test_text_is_utf8_and_survives_any_line_splitter() -> None:
    """FB-003: whole characters, nothing escaped to surrogate halves."""
    text = '🌍你"\\\r\n\u2028\u2029\x85\x1e\x0b\x00é'
    events = run(build(a_job()), entries(told(text), []))
    raw = events[0].data
    assert "🌍你".encode() in raw and b"\\ud83c" not in raw
    assert len(raw.decode().splitlines()) == 1
    assert json.loads(raw)["choices"][0]["text"] == text


def test_usage_left_out_by_the_worker_is_counted() -> None:
    """FB-030: tokens, not chunks."""
    frames: list[Frame] = [
        Take("w"),
        Start(4, 2),
        Delta(0, [1, 2]),
        Delta(0, [3, 4, 5], "🌍"),
        Finish(0, "length"),
        End({}),
    ]
    assert stream(frames)[-1]["usage"] == {**usage(4, 5), "prompt_tokens_details": {"cached_tokens": 2}}


def test_what_a_request_has_used_so_far() -> None:
    """0 while it waits, unknown until its worker has read the prompt, then what the frames say."""
    builder, seen = build(a_job()), []
    frames = told("a", "b", prompt_tokens=3)
    for entry in [None, *entries(frames, list(range(len(frames))))]:
        if entry is not None:
            builder.feed(*entry)
        seen.append(builder.tokens_used)
    assert seen == [0, None, 3, 4, 5, 6, 6, 6]


@given(requests(), st.lists(st.integers(0, 30)), st.integers(0, 30), st.booleans())
def test_a_stream_is_the_same_without_the_whole_and_keeps_nothing(
    request: tuple[Job, list[Frame], list[str]], cuts: list[int], kept: int, continuous: bool
) -> None:
    job, frames, _ = request
    options = StreamOptions(None, continuous)
    cut = entries(frames, cuts)
    whole, builder = build(job, options), build(job, options)
    events = run(builder, cut[:kept])
    builder.only_streams()
    assert [*events, *run(builder, cut[kept:])] == run(whole, cut)
    assert builder.usage_so_far() == whole.usage_so_far()
    for choice in builder.response()["choices"]:
        assert choice["text"] == "" and (choice["logprobs"] is None or not choice["logprobs"]["tokens"])
