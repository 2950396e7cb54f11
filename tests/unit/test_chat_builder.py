"""The builder of chats: whatever the frames and however they are cut, the deltas say what the message says; and the frames
of a lane, whose reasoning is counted."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.relay.builder import Builder, Event
from api.relay.chat_builder import ChatBuilder, ReasoningField
from api.relay.cursor import Behind, Cursor
from api.relay.tool_calls import CallParser, call_id
from api.relay.view import View
from api.schemas.stream_options import StreamOptions
from shared import results
from shared.errors import WorkerLost
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start, Take, decode_entry, encode_entry
from shared.jobs import Job
from shared.reasoning import Reasoning, Splitter
from shared.tool_calls import Tools
from tests.contract.schemas import check_chunk, check_completion
from tests.unit.completion_frames import entries, usage
from workers.engines.base import EngineRequest, Finished, Started, Token
from workers.lane import Lane, PromptIds
from workers.past import Past

TAGS = Reasoning("<think>", "</think>")
TOKENS = ["<think>", "</think>", "<thi", "nk>", "</th", "ink>", "why ", "\n", "so", "é", " "]
#: Of calls, whole and broken.
CALLING = [
    *TOKENS,
    "<tool_call>",
    '{"name": "f", "arguments": {',
    '"a": "}',
    '"',
    "}",
    "}</tool",
    "_call>",
    '{"name"',
    "{}",
]
TOOLS = Tools("hermes", ("f",))
END = 0


def a_job(n: int = 1, reasoning: Reasoning | None = TAGS, **fields: Any) -> Job:
    return Job(
        id="chatcmpl-1", model="m", prompts=["p"], seed=1, created=7, kind="chat", n=n, best_of=n, reasoning=reasoning,
        **fields,
    )  # fmt: skip


def build(job: Job, options: StreamOptions | None = None, field: ReasoningField = "reasoning_content") -> Builder:
    return View.of("fp", options or StreamOptions(), tokens_as_ids=False, reasoning_field=field).builder(job)


def run(builder: Builder, cut: list[tuple[Name, list[Frame]]]) -> list[Event]:
    return [event for last, frames in cut for event in builder.feed(last, frames)]


def data(events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events]


def frames_of(job: Job, texts: list[list[str]], order: list[int], limit: int | None = None) -> list[Frame]:
    """What a lane says of choices that sample such tokens, in turns of `order`."""
    vocabulary = ["</end>", *dict.fromkeys(token for text in texts for token in text)]
    prompts = [PromptIds([1, 2], limit or 1000)]

    def pieces(request: EngineRequest, ids: Any) -> list[bytes]:
        return [vocabulary[token].encode() for token in ids]

    lane = Lane(job, Name(5, 1), prompts, end_ids=(END,), pieces=pieces)
    left = {index: [*map(vocabulary.index, text), END] for index, text in enumerate(texts)}
    for index in range(len(texts)):
        lane.on_event(index, Started(f"x/{index}", 1))
    turns = iter(order)
    while left:
        index = sorted(left)[next(turns, 0) % len(left)]
        token = left[index].pop(0)
        logprob = None if job.logprobs is None else (-1.0, [(token, -1.0), (END, -9.0)])
        done = lane.on_event(index, Token(f"x/{index}", token, vocabulary[token].encode(), logprob, token == END))
        if done or not left[index]:
            lane.on_event(index, Finished(f"x/{index}", "stop"))
            del left[index]
        if next(turns, 0) % 2:
            lane.flush()
    lane.flush()
    assert lane.terminal is not None
    said: list[Frame] = [Take("w"), *(frame for entry in lane.outbox for frame in entry), lane.terminal]
    return decode_entry(encode_entry(said))


@st.composite
def chats(draw: st.DrawFn) -> tuple[Job, list[Frame], list[list[str]]]:
    n = draw(st.integers(1, 3))
    reasoning = draw(st.sampled_from([TAGS, Reasoning("<think>", "</think>", opened=True), None]))
    tools = draw(st.sampled_from([None, TOOLS]))
    texts = [draw(st.lists(st.sampled_from(CALLING if tools else TOKENS), max_size=9)) for _ in range(n)]
    job = a_job(
        n,
        reasoning,
        tools=tools,
        logprobs=draw(st.sampled_from([None, 0, 1])),
        stop=draw(st.sampled_from([[], ["hy s"]])),
    )
    return job, frames_of(job, texts, draw(st.lists(st.integers(0, 5), max_size=40))), texts


def told(chunks: list[dict[str, Any]], name: str, choices: int) -> list[str]:
    joined = [""] * choices
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            joined[choice["index"]] += choice["delta"].get(name, "")
    return joined


def called(chunks: list[dict[str, Any]], choices: int) -> list[list[dict[str, Any]]]:
    """The calls of each choice, put together as clients do it."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(choices)]
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", [])):
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(found[choice["index"]])
                found[choice["index"]].append({key: call[key] for key in ("id", "type", "function")})
            else:
                found[choice["index"]][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return found


def scored(chunks: list[dict[str, Any]], choices: int) -> list[list[str]]:
    """The tokens of the logprobs of each choice."""
    found: list[list[str]] = [[] for _ in range(choices)]
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", []) if choice["logprobs"]):
        found[choice["index"]] += [entry["token"] for entry in choice["logprobs"]["content"]]
    return found


@given(chats(), st.lists(st.integers(0, 30)), st.sampled_from([None, True, False]), st.booleans())
def test_stream_and_response_agree(
    chat: tuple[Job, list[Frame], list[list[str]]], cuts: list[int], include: bool | None, running: bool
) -> None:
    job, frames, texts = chat
    builder = build(job, StreamOptions(include, running))
    events = run(builder, entries(frames, cuts))
    chunks, whole = data(events), builder.response()
    for chunk in chunks:
        check_chunk(chunk)
    check_completion(whole)
    messages = [choice["message"] for choice in whole["choices"]]
    assert told(chunks, "content", job.n) == [message["content"] or "" for message in messages]
    assert called(chunks, job.n) == [message.get("tool_calls", []) for message in messages]
    reasons = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert [reasons[index] for index in range(job.n)] == [choice["finish_reason"] for choice in whole["choices"]]
    reasoned = [message.get("reasoning_content") or "" for message in messages]
    assert told(chunks, "reasoning_content", job.n) == reasoned
    assert all(("reasoning_content" in message) is (job.reasoning is not None) for message in messages)
    for index in range(job.n):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""} and not any(
            "role" in c["delta"] for c in own[1:]
        )
        scores = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        kept = whole["choices"][index]["logprobs"]
        assert scores == ([] if kept is None else kept["content"])
        if not job.stop and job.logprobs is not None:
            assert [entry["token"] for entry in scores] == [*texts[index], "</end>"]
            assert [len(entry["top_logprobs"]) for entry in scores] == [job.logprobs] * len(scores)
        if not job.stop:
            splitter = Splitter(job.reasoning)
            parts = [splitter.feed("".join(texts[index])), splitter.flush()]
            text = "".join(part.content for part in parts)
            if job.tools is not None:
                parser = CallParser(job.tools)
                found = [parser.feed(text), parser.flush()]
                text = "".join(part.content for part in found)
                assert len(messages[index].get("tool_calls", [])) == parser.calls
            assert (messages[index]["content"] or "") == text
    carried = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert (include is False and not running) or carried[-1] == whole["usage"]
    assert [event.id for event in events] == list(dict.fromkeys(event.id for event in events))


@given(chats(), st.lists(st.integers(0, 30)), st.data())
def test_a_stream_resumed_from_any_event_is_the_whole_stream(
    chat: tuple[Job, list[Frame], list[list[str]]], cuts: list[int], data_: st.DataObject
) -> None:
    """Also where the cursor lies inside a tag, or behind text that waited."""
    job, frames, _ = chat
    live = run(build(job), entries(frames, cuts))
    seen = data_.draw(st.integers(0, len(live) - 1))
    behind = Behind(build(job), Cursor.parse(live[seen].id, "Last-Event-ID"))
    rest = [
        event
        for last, part in entries(frames, data_.draw(st.lists(st.integers(0, 30))))
        for event in behind.feed(last, part)[0]
    ]
    both, whole = data([*live[: seen + 1], *rest]), data(live)
    for name in ("role", "content", "reasoning_content"):
        assert told(both, name, job.n) == told(whole, name, job.n)
    assert called(both, job.n) == called(whole, job.n)
    assert scored(both, job.n) == scored(whole, job.n)
    assert both[-1] == whole[-1]


@given(chats())
def test_folded_frames_make_the_same_object(chat: tuple[Job, list[Frame], list[list[str]]]) -> None:
    """What is left of a request when its log is gone, its reasoning tokens too."""
    job, frames, _ = chat
    whole, folded = build(job), build(job)
    run(whole, entries(frames, []))
    kept = results.fold(frames)
    folded.feed(Name(1, len(kept)), kept)
    assert folded.response() == whole.response()
    broken = [*frames[:-1], Error(WorkerLost("x").to_object(), 503)]
    kept = results.fold(broken)
    failed, again = build(job), build(job)
    failed.feed(Name(1, len(broken)), broken)
    again.feed(Name(1, len(kept)), kept)
    assert again.usage_so_far() == failed.usage_so_far()


@given(chats(), st.integers(1, 30))
def test_another_worker_counts_on(chat: tuple[Job, list[Frame], list[list[str]]], cut: int) -> None:
    """The frames logged before a failover and those behind it say together what one worker would have said."""
    job, frames, texts = chat
    whole = build(job)
    run(whole, entries(frames, []))
    logged = frames[: min(cut, len(frames) - 1)]
    vocabulary = ["</end>", *dict.fromkeys(token for text in texts for token in text)]
    past = Past.of(logged, choices=job.choices, prompts=1)
    lane = Lane(
        job, Name(9, len(logged) + 1), [PromptIds([1, 2], 1000)], end_ids=(END,), past=past,
        pieces=lambda request, ids: [vocabulary[token].encode() for token in ids],
    )  # fmt: skip
    for request in lane.requests():
        index = int(request.id.rpartition("/")[2])
        lane.on_event(index, Started(request.id, 1))
        ids = [*map(vocabulary.index, texts[index]), END]
        for token in ids[len(request.generated) :]:
            logprob = None if job.logprobs is None else (-1.0, [(token, -1.0), (END, -9.0)])
            if lane.on_event(index, Token(request.id, token, vocabulary[token].encode(), logprob, token == END)):
                break
        lane.on_event(index, Finished(request.id, "stop"))
        lane.flush()
    assert lane.terminal is not None
    both = [*logged, Take("w2"), *(frame for entry in lane.outbox for frame in entry), lane.terminal]
    builder = build(job)
    builder.feed(Name(9, len(both)), both)
    assert builder.response() == whole.response()


CALL = ["<tool_call>\n", '{"name": "f", "arguments": {', '"a": "Pa', 'ris"', "}", "}\n</tool_call>"]


def test_a_call_as_it_comes() -> None:
    chunks = data(a_stream("Well. ", *CALL, tools=TOOLS))
    name = {
        "index": 0, "id": call_id("chatcmpl-1", 0, 0), "type": "function", "function": {"name": "f", "arguments": "{"},
    }  # fmt: skip
    pieces = ['"a": "Pa', 'ris"', "}"]
    more = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    assert deltas == [{"content": "Well."}, {"tool_calls": [name]}, *more, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_several_choices_have_ids_of_their_own() -> None:
    text = "".join(CALL)
    frames: list[Frame] = [
        Take("w"), Start(3), Delta(1, [5], text * 2), Delta(0, [5], text), Finish(0, "stop"), Finish(1, "length"),
        End(usage(3, 2)),
    ]  # fmt: skip
    builder = build(a_job(2, None, tools=TOOLS))
    run(builder, entries(frames, []))
    choices = builder.response()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "length"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert ids == [call_id("chatcmpl-1", 0, 0), call_id("chatcmpl-1", 1, 0), call_id("chatcmpl-1", 1, 1)]


def test_a_call_that_breaks_off_is_not_called_whole() -> None:
    for reason in ("stop", "length"):
        frames: list[Frame] = [
            Take("w"), Start(3), Delta(0, [5], "".join(CALL[:3])), Finish(0, reason), End(usage(3, 2)),
        ]  # fmt: skip
        builder = build(a_job(reasoning=None, tools=TOOLS))
        run(builder, entries(frames, []))
        [choice] = builder.response()["choices"]
        assert choice["finish_reason"] == reason
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "Pa'


def a_stream(*texts: str, options: StreamOptions | None = None, **fields: Any) -> list[Event]:
    frames: list[Frame] = [
        Take("w"),
        Start(3),
        *(Delta(0, [5], text) for text in texts),
        Finish(0, "stop"),
        End(usage(3, len(texts))),
    ]
    return run(build(a_job(**fields), options), entries(frames, list(range(len(frames)))))


def test_a_plain_stream() -> None:
    events = a_stream("Hel", "lo", reasoning=None)
    assert [event.id for event in events] == ["5-2", "5-3", "5-4", "6-6"]
    chunks = data(events)
    assert chunks[0] == {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "system_fingerprint": "fp",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
             "stop_reason": None}
        ],
    }  # fmt: skip
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [{"content": "Hel"}, {"content": "lo"}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_role_and_finish_and_usage_are_numbered_within_their_frames() -> None:
    frames: list[Frame] = [
        Take("w"), Start(1), Delta(0, [1], "<thi"), Finish(0, "length"), Finish(1, "stop"), End(usage(1, 1)),
    ]  # fmt: skip
    events = run(build(a_job(2), StreamOptions(True)), entries(frames, [2, 4]))
    assert [event.id for event in events] == ["5-2", "5-2.1", "5-4", "5-4.1", "6-6", "6-6.1"]
    assert data(events)[2]["choices"][0]["delta"] == {"content": "<thi"}, "what was held comes before the finish"


def test_tags_cut_over_deltas() -> None:
    """FB-066: neither they nor a part of them is ever sent; one chunk may have the end of one and the beginning of the
    other."""
    chunks = data(a_stream("<th", "ink>be", "cause</", "think>so", " it", " is"))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]] == [
        {"reasoning_content": "be"}, {"reasoning_content": "cause"}, {"content": "so"}, {"content": " it"},
        {"content": " is"},
    ]  # fmt: skip
    [both] = data(a_stream("<think>why</think>so"))[1:-1]
    assert both["choices"][0]["delta"] == {"reasoning_content": "why", "content": "so"}


@pytest.mark.parametrize(
    ("field", "names"),
    [("reasoning_content", {"reasoning_content"}), ("reasoning", {"reasoning"}), ("both", {"reasoning", "reasoning_content"})],
)  # fmt: skip
def test_what_the_reasoning_is_called(field: ReasoningField, names: set[str]) -> None:
    frames: list[Frame] = [Take("w"), Start(1), Delta(0, [1], "<think>a</think>b"), Finish(0, "stop"), End(usage(1, 1))]
    builder = build(a_job(), field=field)
    chunks = data(run(builder, entries(frames, [])))
    assert chunks[1]["choices"][0]["delta"].keys() == {"content", *names}
    message = builder.response()["choices"][0]["message"]
    assert message.keys() == {"role", "content", "refusal", *names}
    assert {message[name] for name in names} == {"a"} and message["content"] == "b"


def test_the_view_is_kept_with_the_job() -> None:
    view = View.of("fp", StreamOptions(True), tokens_as_ids=True, reasoning_field="both")
    assert View.read(view.encode(), "other") == view
    assert isinstance(View.read(b"", "fp").builder(a_job()), ChatBuilder)


def test_logprobs_have_the_bytes_of_their_tokens() -> None:
    frames: list[Frame] = [
        Take("w"),
        Start(1),
        Delta(0, [1], "", 0, [(-0.5, [(1, -0.5), (2, -3.0)])], [0], {1: "f09f", 2: "61"}),
        Delta(0, [3], "🌍", None, [(-9999.0, [(2, -0.1), (3, -9999.0)])], [0], {3: "8c8d"}),
        Finish(0, "stop"),
        End(usage(1, 2)),
    ]
    builder = build(a_job(reasoning=None, logprobs=1))
    run(builder, entries(frames, []))
    assert builder.response()["choices"][0]["logprobs"]["content"] == [
        {
            "token": "bytes:\\xf0\\x9f", "logprob": -0.5, "bytes": [0xF0, 0x9F],
            "top_logprobs": [{"token": "bytes:\\xf0\\x9f", "logprob": -0.5, "bytes": [0xF0, 0x9F]}],
        },
        {
            "token": "bytes:\\x8c\\x8d", "logprob": -9999.0, "bytes": [0x8C, 0x8D],
            "top_logprobs": [{"token": "a", "logprob": -0.1, "bytes": [0x61]}],
        },
    ]  # fmt: skip


@pytest.mark.parametrize("place", range(1, 5))
def test_an_error_is_the_only_end(place: int) -> None:
    error = WorkerLost("gone")
    frames: list[Frame] = [Take("w"), Start(3), Delta(0, [5], "<think>a"), Finish(0, "stop")][:place]
    chunks = data(run(build(a_job()), entries([*frames, Error(error.to_object(), 503, True)], [1, 2])))
    assert chunks[-1] == {"error": error.to_object()}
    assert not any(c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"])


def test_cuts_of_a_text_lie_between_characters() -> None:
    """The joined deltas are the message's text to the character."""
    text = "<think>🌍é\u2028</think>\x85你"
    pieces = [text[a:b] for a, b in pairwise(range(len(text) + 1))]
    events = a_stream(*pieces)
    assert all(len(event.data.decode().splitlines()) == 1 for event in events)
    assert told(data(events), "reasoning_content", 1) == ["🌍é"] and told(data(events), "content", 1) == ["你"]
