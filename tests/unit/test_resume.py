"""Coming back to a stream: cut anywhere, resumed from any event, it is the same stream. And what is kept of it when its
log is gone makes the same object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.headers import read_grace, read_key
from api.relay.builder import Event
from api.relay.completion_builder import CompletionBuilder
from api.relay.cursor import BEGIN, Behind, Cursor
from api.relay.view import View
from api.schemas.stream_options import StreamOptions
from shared import results
from shared.errors import InvalidRequest, LogLost
from shared.frames import Delta, End, Error, Finish, Frame, Name, Prompt, Start, Take, decode_entry, encode_entry
from shared.jobs import Job
from tests.unit.completion_frames import a_job, entries, requests, told, usage

OPTIONS = [StreamOptions(), StreamOptions(True), StreamOptions(False), StreamOptions(None, True)]


@st.composite
def scored_requests(draw: st.DrawFn) -> tuple[Job, list[Frame]]:
    """(job, frames) of a request with logprobs, maybe with echo; text may be held back."""
    n, echo = draw(st.integers(1, 3)), draw(st.booleans())
    job = Job(
        id="cmpl-1", model="m", prompts=["ab"], seed=1, created=7, n=n, best_of=n, logprobs=1, echo=echo
    )  # fmt: skip
    told_ids: set[int] = set()

    def news(*ids: int) -> dict[int, str]:
        new = {token: f"t{token}".encode().hex() for token in ids if token not in told_ids}
        told_ids.update(new)
        return new

    frames: list[Frame] = [Take("w"), Start(2)]
    if echo:
        frames.append(Prompt(0, [1], [None], [0], news(1)))
        frames.append(Prompt(1, [2], [(-0.5, [(2, -0.5), (3, -1.0)])], [1], news(2, 3)))
    counts, lengths, held = [0] * n, [0] * n, [""] * n
    alive = list(range(n))
    while alive:
        i = draw(st.sampled_from(alive))
        if draw(st.integers(0, 9)) == 0:
            frames.append(Take("w2"))
        ids = draw(st.lists(st.integers(4, 9), min_size=1, max_size=3))
        offsets = [lengths[i] + len(held[i]) + place for place in range(len(ids))]
        counts[i] += len(ids)
        held[i] += "x" * len(ids)
        last = draw(st.integers(0, 2)) == 0
        text = held[i] if last or draw(st.booleans()) else ""
        lengths[i], held[i] = lengths[i] + len(text), held[i][len(text) :]
        lp = [(-0.25, [(token, -0.25), (token + 1, -2.0)]) for token in ids]
        near = {token + more for token in ids for more in (0, 1)}
        frames.append(Delta(i, ids, text, None if text else lengths[i], lp, offsets, news(*sorted(near))))
        if last:
            frames.append(Finish(i, "stop"))
            alive.remove(i)
    frames.append(End(usage(2, sum(counts))))
    return job, frames


#: (job, frames) of any kind.
any_request = st.one_of(requests().map(lambda made: made[:2]), scored_requests())


def a_builder(job: Job, options: StreamOptions = OPTIONS[0]) -> CompletionBuilder:
    return View.of("f", options, tokens_as_ids=False).builder(job)


def what_is_said(events: list[Event]) -> dict[str, Any]:
    """What a client has of a stream at its end, however it was cut into chunks."""
    said: dict[str, Any] = {"usage": [], "errors": []}
    for event in events:
        chunk = json.loads(event.data)
        said["errors"] += [chunk["error"]] if "error" in chunk else []
        if chunk.get("choices") == []:
            said["usage"].append(chunk["usage"])
        for choice in chunk.get("choices", ()):
            of_choice = said.setdefault(choice["index"], {"text": "", "finish": [], "tokens": [], "offsets": []})
            of_choice["text"] += choice["text"]
            of_choice["finish"] += [(choice["finish_reason"], chunk.get("usage"))] if choice["finish_reason"] else []
            of_choice["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
            of_choice["offsets"] += (choice["logprobs"] or {}).get("text_offset", [])
    return said


def position(event: Event) -> tuple[int, int]:
    number, _, k = event.id.partition("-")[2].partition(".")
    return int(number), int(k or 0)


cuts = st.lists(st.integers(0, 60), max_size=20)


@given(any_request, cuts, cuts, st.sampled_from(OPTIONS))
def test_a_stream_resumed_from_any_event_is_the_whole_stream(
    request_: tuple[Job, list[Frame]], live_cuts: list[int], replay_cuts: list[int], options: StreamOptions
) -> None:
    job, frames = request_
    live = a_builder(job, options)
    seen = [event for entry in entries(frames, live_cuts) for event in live.feed(*entry)]
    assert [position(event) for event in seen] == sorted({position(event) for event in seen})
    for count, event in enumerate(seen, 1):
        behind = Behind(a_builder(job, options), Cursor.parse(event.id, "Last-Event-ID"))
        rest = [event for entry in entries(frames, replay_cuts) for event in behind.feed(*entry)[0]]
        assert behind.reached
        assert what_is_said(seen[:count] + rest) == what_is_said(seen)
        assert bool(rest) == (count < len(seen)), "nothing behind the last event, and only there"
        assert all(position(later) > position(event) for later in rest)


@given(any_request, cuts)
def test_a_bare_number_is_all_events_of_its_frame(request_: tuple[Job, list[Frame]], replay_cuts: list[int]) -> None:
    job, frames = request_
    builder = a_builder(job, StreamOptions(True))
    seen = [event for entry in entries(frames, []) for event in builder.feed(*entry)]
    for number in {position(event)[0] for event in seen}:
        behind = Behind(a_builder(job, StreamOptions(True)), Cursor.parse(str(number), "starting_after", bare=True))
        rest = [event for entry in entries(frames, replay_cuts) for event in behind.feed(*entry)[0]]
        before = [event for event in seen if position(event)[0] <= number]
        assert what_is_said(before + rest) == what_is_said(seen)


@given(any_request)
def test_folded_frames_make_the_same_object_and_stream(request_: tuple[Job, list[Frame]]) -> None:
    job, frames = request_
    whole, folded = a_builder(job), a_builder(job)
    events = [event for entry in entries(frames, []) for event in whole.feed(*entry)]
    kept = results.fold(decode_entry(encode_entry(frames)))
    assert len(kept) <= len(frames)
    again = folded.feed(Name(1, len(kept)), kept)
    assert folded.response() == whole.response()
    assert what_is_said(again) == what_is_said(events)


@given(any_request, st.integers(0, 60))
def test_a_request_that_failed_keeps_what_it_had_said(request_: tuple[Job, list[Frame]], cut: int) -> None:
    job, frames = request_
    broken = [*frames[: min(cut, len(frames) - 1)], Error({"message": "m", "code": "cancelled"}, 409)]
    whole, folded = a_builder(job), a_builder(job)
    whole.feed(Name(1, len(broken)), broken)
    kept = results.fold(broken)
    folded.feed(Name(1, len(kept)), kept)
    assert folded.response()["choices"] == whole.response()["choices"]
    sampled = sum(len(frame.t) for frame in broken if isinstance(frame, Delta))
    assert folded.usage_so_far()["completion_tokens"] == sampled == whole.usage_so_far()["completion_tokens"]


def test_a_result_has_texts_and_usage_in_plain_words() -> None:
    assert results.value(results.fold(told("a", "b")))["choices"] == [
        {"index": 0, "text": "ab", "finish_reason": "stop"}
    ]
    assert results.value(results.fold(told("a", "b")))["usage"] == usage(3, 3)
    assert results.value(results.fold([]))["choices"] == []


@pytest.mark.parametrize("raw", [[], [(b"1-1", {})], [(b"1-1", {b"return_value": b"!"})], [(b"1-1", {b"return_value": b"e30="})]])  # fmt: skip
def test_what_is_no_result_of_ours_reads_as_none(raw: list[Any]) -> None:
    assert results.read(raw) == []


def test_a_cursor_of_another_run_is_noticed() -> None:
    frames = told("a", "b", "c")
    [seen] = a_builder(a_job()).feed(Name(5, 3), frames[:3])
    assert seen.id == "5-3"
    behind = Behind(a_builder(a_job()), Cursor.parse("4-3", "Last-Event-ID"))
    with pytest.raises(LogLost):
        behind.feed(Name(5, 4), frames[:4])
    bare = Behind(a_builder(a_job()), Cursor.parse("3", "starting_after", bare=True))
    assert [event.id for event in bare.feed(Name(5, 4), frames[:4])[0]] == ["5-4"]


def test_a_cursor_beyond_the_frames_is_not_reached() -> None:
    behind = Behind(a_builder(a_job()), Cursor.parse("5-9", "Last-Event-ID"))
    assert behind.feed(Name(5, 4), told("a", "b", "c")[:4]) == ([], []) and not behind.reached


@given(st.one_of(st.text(), st.from_regex(r"[0-9.-]{0,40}", fullmatch=True)), st.booleans())
def test_any_text_is_a_cursor_or_refused(text: str, bare: bool) -> None:
    try:
        cursor = Cursor.parse(text, "Last-Event-ID", bare=bare)
    except InvalidRequest as error:
        assert error.param == "Last-Event-ID"
        return
    assert text.isascii() and cursor.s >= 0
    assert cursor.a is not None or (bare and text.isdigit())
    behind = Behind(a_builder(a_job()), cursor)
    frames = told("a", "b")
    try:
        for entry in entries(frames, [1, 2, 3]):
            behind.feed(*entry)
    except LogLost:
        assert cursor.a not in (None, 5, 6) or cursor.s <= len(frames)


@pytest.mark.parametrize(
    "text", ["", "5", "-", "5-", "-5", "a-1", "5-1.", "5-1.x", "5-1.1.1", " 5-1", "5-1\n", "٥-1", "5-1" * 20]
)
def test_malformed_cursors(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Cursor.parse(text, "Last-Event-ID")


def test_from_the_beginning() -> None:
    behind = Behind(a_builder(a_job()), BEGIN)
    assert behind.reached
    assert [event.id for event in behind.feed(Name(5, 4), told("a", "b")[:4])[0]] == ["5-4"]


# -- headers

KEYED = {"prompt": "x", "n": 1, "stop": ["a"], "logit_bias": {"1": 2, "3": 4}}


def test_a_body_is_the_same_in_any_order_and_with_nulls() -> None:
    other = {"logit_bias": {"3": 4, "1": 2}, "stop": ["a"], "n": 1, "prompt": "x", "user": None}
    assert read_key("k", KEYED, "completion") == read_key("k", other, "completion")


@pytest.mark.parametrize("change", [{"prompt": "y"}, {"n": 2}, {"stream": False}, {"stop": ["b"]}, {"unknown": 1}])
def test_another_body_is_another(change: dict[str, Any]) -> None:
    assert read_key("k", KEYED, "completion") != read_key("k", {**KEYED, **change}, "completion")


@pytest.mark.parametrize("key", ["", " ", "a b", "ä", "x" * 256, "a\nb"])
def test_keys_that_are_none(key: str) -> None:
    with pytest.raises(InvalidRequest):
        read_key(key, {}, "completion")


def test_a_grace_is_a_number_of_seconds() -> None:
    assert [read_grace(value) for value in (None, "0", "30", "600")] == [None, 0, 30, 600]
    for wrong in ("", "-1", "1.5", "601", "x", " 1", "٣"):
        with pytest.raises(InvalidRequest):
            read_grace(wrong)
