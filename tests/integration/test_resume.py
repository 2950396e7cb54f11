"""Coming back to a request by its id, on whichever API node: looking, resuming, cancelling, the same key again."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.schemas.answers import CompletionJob
from api.schemas.chat_answers import ChatJob
from shared import keys
from tests.conftest import script, wait_for
from tests.stack import (
    ANSWER_S,
    ROOT,
    SCRIPTED,
    Answer,
    Client,
    Stack,
    Stream,
    calls_of,
    endless,
    event_name,
    free_port,
    reasoning_of,
    text_of,
)
from tests.stack import said as chat

WORDS = [f"w{i} " for i in range(30)]
SLOW = script(*WORDS, delay_ms=40)
ABC = script("a", "b", "c", delay_ms=30)


#: A call of a tool, cut inside its tag, its name and its arguments.
CALL = ["\n<tool_", 'call>{"name": ', '"f", "arguments": {"a"', ': "b', 'c"', "}", "}</tool_call>"]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
#: The same as a raw prompt and as a chat, which is a job like any other.
KINDS = pytest.mark.parametrize("kind", [str, chat], ids=["raw", "chat"])
Kind = Callable[[str], Any]


class Pair:
    """Two API nodes on one store, with one worker."""

    def __init__(self, first: Stack, second: Client) -> None:
        self.first, self.second = first, second


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    first = Stack(tmp_path_factory.mktemp("pair"), (SCRIPTED,), lanes=8, sse_heartbeat_s=1)
    with first, another_node(first) as (second, _):
        yield Pair(first, second)


@contextlib.contextmanager
def another_node(stack: Stack) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """One more API process on the stack's store, on a port of its own."""
    client = Client(free_port())
    owner = json.loads((stack.folder / "data" / "lock").read_text())
    env = {**stack.env, "REDIS_URL": f"unix://{owner['socket_folder']}/store.sock"}
    command = [sys.executable, "-m", "api", "--port", str(client.port)]
    with (stack.folder / f"node-{client.port}.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: client.serves(SCRIPTED), 30)
            yield client, process
        finally:
            process.terminate()
            process.wait(40)


def job_of(answer: Answer, status: int = 200) -> dict[str, Any]:
    """The job object of an answer, which has the described shape."""
    assert answer.status == status, answer
    (ChatJob if answer.json["object"].startswith("chat.") else CompletionJob).model_validate(answer.json)
    return answer.json


def shown(client: Client, job_id: str) -> dict[str, Any]:
    return job_of(client.job(job_id))


def is_idle(pair: Pair) -> None:
    """Nothing runs, waits or is followed; leaves no trace for the next test."""
    wait_for(pair.first.idle, 15)


def all_events(stream: Stream) -> list[tuple[str | None, dict[str, Any]]]:
    return list(zip(stream.ids, stream.data, strict=True))


# -- resume


@KINDS
def test_a_stream_goes_on_at_another_node(pair: Pair, kind: Kind) -> None:
    with pair.first.open(kind(SLOW), headers={"X-Resume-Grace": "30"}) as stream:
        stream.goes_on(7)
        stream.leave()
    with pair.second.resume(stream.id, stream.ids[-1]) as rest:
        rest.read()
    assert stream.text + rest.text == "".join(WORDS)
    assert (rest.finish, rest.done, rest.error) == ("stop", 1, None)
    assert rest.id == stream.id
    names = [event_name(str(event_id)) for event_id in [*stream.ids, *rest.ids]]
    assert names == sorted(set(names))
    assert len(rest.data) > 5, "it is followed piece by piece"
    is_idle(pair)


def test_a_running_stream_can_be_followed_by_many(pair: Pair) -> None:
    """On its own node and on another, from the start and from the middle; one that leaves disturbs nobody."""
    with (
        pair.first.open(SLOW) as stream,
        pair.first.resume(stream.goes_on(3).id) as near,
        pair.second.resume(stream.id) as far,
        pair.second.resume(stream.id, stream.ids[-1]) as middle,
        pair.first.resume(stream.id) as leaving,
        pair.second.resume(stream.id) as leaving_too,
    ):
        seen = stream.text
        for gone in (leaving, leaving_too):
            gone.goes_on(1)
            gone.leave()
        texts = [other.read().text for other in (stream, near, far, middle)]
    whole = "".join(WORDS)
    assert texts == [whole, whole, whole, whole.removeprefix(seen)]
    is_idle(pair)


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (ABC, {}),
        (ABC, {"echo": True, "logprobs": 1, "n": 2}),
        (ABC, {"stream_options": {"include_usage": True}}),
        (chat(script("<th", "ink>a", "</th", "ink>b", "c", delay_ms=30)), {"logprobs": True, "n": 2}),
        (chat(script("<think>x</think>", *CALL, *CALL, delay_ms=30)), {"logprobs": True, **TOOLS}),
    ],
    ids=["plain", "echo", "usage", "chat", "tools"],
)
def test_an_ended_stream_is_replayed_from_any_event(pair: Pair, prompt: Any, fields: dict[str, Any]) -> None:
    stream = pair.first.stream(prompt, **fields)
    assert stream.ended and len(stream.data) > 3
    with pair.second.resume(stream.id) as whole:
        whole.read()
    assert said(whole) == said(stream)
    events = all_events(stream)
    for count, (event_id, _) in enumerate(events, 1):
        for query in ({"starting_after": event_id}, None):
            with pair.second.resume(stream.id, None if query else event_id, **(query or {})) as rest:
                if count == len(events):
                    assert rest.answer is not None and rest.answer.status == 204 and rest.answer.raw == b""
                    continue
                rest.read()
            assert rest.done == 1
            assert said_of([*events[:count], *all_events(rest)]) == said(stream)


def said(stream: Stream) -> Any:
    return said_of(all_events(stream))


def said_of(events: list[tuple[str | None, dict[str, Any]]]) -> Any:
    """What came to a client, however it was cut into events."""
    texts: dict[int, str] = {}
    reasoning: dict[int, str] = {}
    pieces: dict[int, list[dict[str, Any]]] = {}
    finishes: list[Any] = []
    tokens: dict[int, list[str]] = {}
    usages = []
    for _, chunk in events:
        usages += [chunk["usage"]] if chunk.get("usage") else []
        for choice in chunk["choices"]:
            index = choice["index"]
            pieces.setdefault(index, []).append(choice)
            reasoning[index] = reasoning.get(index, "") + reasoning_of(choice)
            texts[index] = texts.get(index, "") + text_of(choice)
            scores = choice["logprobs"] or {}
            new = scores.get("tokens", []) + [entry["token"] for entry in scores.get("content", ())]
            tokens[index] = tokens.get(index, []) + new
            finishes += [(index, choice["finish_reason"])] if choice["finish_reason"] else []
    calls = {index: calls_of(own) for index, own in pieces.items()}
    return texts, reasoning, calls, sorted(finishes), tokens, usages


def test_cursors_that_are_none(pair: Pair) -> None:
    job_id = pair.first.stream(script("a")).id
    for bad in ("x", "1", "1-", "1-1.", "1-1.1.1", "-1-1", "1" * 50 + "-1"):
        with pair.second.resume(job_id, bad) as refused:
            assert refused.answer is not None and refused.answer.status == 400, bad
            assert refused.answer.error["param"] == "Last-Event-ID"
    with pair.second.resume(job_id, starting_after="x") as refused:
        assert refused.answer is not None and refused.answer.error["param"] == "starting_after"
    with pair.second.resume("cmpl-" + "0" * 32) as unknown:
        assert unknown.answer is not None and unknown.answer.status == 404
    assert pair.second.call("GET", f"/v1/completions/{job_id}?stream=maybe").error["param"] == "stream"
    assert pair.second.call("HEAD", f"/v1/completions/{job_id}?stream=true").status == 405
    assert pair.second.call("HEAD", f"/v1/completions/{job_id}").status == 200


def test_a_cursor_that_the_log_does_not_have(pair: Pair) -> None:
    """Of an ended stream: known at once. Of a running one: somebody may be putting back what the store lost."""
    ended = pair.first.stream(script("a", "b"))
    attempt, number, _ = event_name(str(ended.ids[0]))
    for cursor in (f"{attempt}-{number + 50}", f"{attempt - 1}-{number}"):
        with pair.second.resume(ended.id, cursor) as lost:
            assert lost.answer is not None and lost.answer.status == 503, cursor
            assert lost.answer.error["code"] == "log_lost"
    with pair.first.open(endless(delay_ms=300)) as running:
        running.goes_on(1)
        attempt, number, _ = event_name(str(running.ids[0]))
        with pair.second.resume(running.id, f"{attempt}-{number + 10_000}") as waiting:
            assert waiting.answer is None
            waiting.read()
            assert 5.5 < waiting.seconds < 9
        assert (waiting.error or {})["code"] == "log_lost" and waiting.done == 1 and waiting.text == ""
        running.goes_on(2)
    is_idle(pair)


def test_best_of_cannot_be_streamed_afterwards_either(pair: Pair) -> None:
    answer = pair.first.complete(script("a"), best_of=3)
    with pair.first.resume(answer.json["id"]) as refused:
        assert refused.answer is not None and refused.answer.status == 400


# -- the log and the result


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (ABC, {}),
        (ABC, {"echo": True, "logprobs": 2, "n": 2}),
        (ABC, {"best_of": 3, "logprobs": 0}),
        (chat(script("<think>", "a", "</think>", "b")), {"logprobs": True, "top_logprobs": 2, "n": 2}),
        (chat(script("b", *CALL, *CALL)), TOOLS),
    ],
    ids=["plain", "echo", "best of", "chat", "tools"],
)
def test_a_result_outlives_its_log(pair: Pair, prompt: Any, fields: dict[str, Any]) -> None:
    answer = pair.first.complete(prompt, **fields)
    job_id = answer.json["id"]
    with pair.first.store() as store:
        wait_for(lambda: store.exists(keys.results(job_id)))
        from_log = shown(pair.second, job_id)
        assert 3500 < store.ttl(keys.results(job_id)) <= 3600 and 200 < store.ttl(keys.log(job_id)) <= 300
        assert store.delete(keys.log(job_id))
    job = shown(pair.second, job_id)
    assert job == from_log
    assert {name: job[name] for name in answer.json} == answer.json
    assert (job["status"], job["error"], job["queue_position"]) == ("completed", None, None)
    assert job["timings"]["total_ms"] >= job["timings"]["first_token_ms"] >= 0
    with pair.second.resume(job_id) as expired:
        assert expired.answer is not None
        assert (expired.answer.status, expired.answer.error["code"]) == (410, "stream_expired") or "best_of" in fields


def test_what_is_not_to_be_stored_is_gone_a_minute_after_its_end(pair: Pair) -> None:
    job_id = pair.first.complete(script("a"), store=False).json["id"]
    with pair.first.store() as store:
        wait_for(lambda: store.exists(keys.results(job_id)))
        for key in (keys.job(job_id), keys.log(job_id), keys.results(job_id)):
            assert 0 < store.ttl(key) <= 60, key


def test_a_job_says_how_it_stands(pair: Pair) -> None:
    running = [pair.first.open(endless(delay_ms=20)) for _ in range(8)]
    with contextlib.ExitStack() as streams:
        for stream in running:
            streams.enter_context(stream).goes_on(1)
        first, second = pair.first.ask(script("a")), None
        with first:
            wait_for(lambda: pair.first.queue()[0] == 1)
            second = job_of(pair.first.complete(script("b"), background=True), 202)
            assert (second["status"], second["queue_position"], second["choices"]) == ("queued", 2, [])
            job = shown(pair.second, running[0].id)
            assert (job["status"], job["choices"], job["usage"]) == ("running", [], None)
    wait_for(lambda: shown(pair.second, second["id"])["status"] == "completed")
    assert shown(pair.second, running[0].id)["status"] == "cancelled"
    is_idle(pair)


@KINDS
def test_a_failed_request_keeps_its_error_and_its_text(pair: Pair, kind: Kind) -> None:
    answer = pair.first.complete(kind(script("a", "b", "c", error_after=2)))
    assert answer.status == 500
    job = shown(pair.second, answer.headers["x-sluice-id"])
    assert (job["status"], job["error"]) == ("failed", answer.error)
    assert (text_of(job["choices"][0]), job["choices"][0]["finish_reason"]) == ("ab", None)
    assert job["usage"]["completion_tokens"] == 2


# -- cancel


@KINDS
def test_cancel_ends_a_stream_and_keeps_its_text(pair: Pair, kind: Kind) -> None:
    """FB-020: once more, and once more after the end; finished and unknown ones; never a 500."""
    with pair.first.open(kind(endless(delay_ms=20))) as stream:
        stream.goes_on(5)
        began = time.monotonic()
        job = job_of(pair.second.cancel(stream.id))
        stream.read()
        assert time.monotonic() - began < 1
    assert job["status"] == "cancelled" and job["error"]["code"] == "cancelled"
    assert (stream.error or {})["code"] == "cancelled" and stream.done == 1 and stream.finish is None
    wait_for(lambda: pair.first.busy() == 0, 1)
    with pair.first.store() as store:
        wait_for(lambda: store.exists(keys.results(stream.id)))
        sampled = sum(
            len(frame.get("t", ()))
            for _, fields in store.xrange(keys.log(stream.id))
            for frame in json.loads(fields[b"f"])
        )
        store.delete(keys.log(stream.id))
    for client in (pair.first, pair.second, pair.first):
        again = job_of(client.cancel(stream.id))
        assert again == job == shown(client, stream.id)
    assert text_of(job["choices"][0]).startswith(stream.text) and job["choices"][0]["finish_reason"] is None
    assert job["usage"]["completion_tokens"] == sampled >= 4

    done = pair.first.complete(script("a", "b")).json
    assert job_of(pair.second.cancel(done["id"]))["status"] == "completed"
    assert shown(pair.second, done["id"])["choices"] == done["choices"]
    for unknown in ("cmpl-" + "0" * 32, "x", "..", "%00", "a" * 500):
        assert pair.second.cancel(unknown).status == 404, unknown


def test_cancel_of_a_plain_request_and_of_a_waiting_one(pair: Pair) -> None:
    with ThreadPoolExecutor() as threads:
        plain = threads.submit(pair.first.complete, endless(delay_ms=20))
        wait_for(lambda: pair.first.busy() == 1)
        with pair.first.store() as store:
            [job_id] = [key.decode().rpartition(":")[2] for key in store.scan_iter("rq:executions:cmpl-*")]
        assert job_of(pair.second.cancel(job_id))["status"] == "cancelled"
        answer = plain.result(5)
        assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (409, "cancelled", "false")

        with contextlib.ExitStack() as streams:
            for _ in range(8):
                streams.enter_context(pair.first.open(endless(delay_ms=20))).goes_on(1)
            job_id = job_of(pair.first.complete(script("b"), background=True), 202)["id"]
            assert job_of(pair.second.cancel(job_id))["status"] == "cancelled"
            assert pair.first.queue() == (0, 8)
        job = shown(pair.first, job_id)
        assert (job["choices"], job["usage"], job["queue_position"]) == ([], None, None)
    is_idle(pair)


def test_cancel_is_heard_after_the_subscriptions_were_cut(pair: Pair) -> None:
    """FB-021"""
    with pair.first.store() as store:
        store.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    with pair.first.open(endless(delay_ms=20)) as stream:
        stream.goes_on(2)
        pair.second.cancel(stream.id)
        stream.read(timeout=10)
    assert (stream.error or {})["code"] == "cancelled"
    wait_for(lambda: pair.first.busy() == 0, 5)


# -- background and grace


@KINDS
def test_a_background_request_needs_no_client(pair: Pair, kind: Kind) -> None:
    job = job_of(pair.first.complete(kind(script("a", "b", delay_ms=100)), background=True), 202)
    assert job["status"] in ("queued", "running") and job["choices"] == []
    with pair.second.resume(job["id"]) as stream:
        assert stream.read().text == "ab"
    wait_for(lambda: shown(pair.second, job["id"])["status"] == "completed")
    assert text_of(shown(pair.first, job["id"])["choices"][0]) == "ab"
    with pair.first.store() as store:
        deadline, created = store.hmget(keys.job(job["id"]), "dl", "queued")
    assert 86_300_000 < int(deadline) - int(created) <= 86_400_000


def test_a_background_stream_runs_on_without_its_client(pair: Pair) -> None:
    with pair.first.open(script(*WORDS, delay_ms=20), background=True) as stream:
        stream.goes_on(2)
        stream.leave()
    with pair.second.resume(stream.id, stream.ids[-1]) as follower:
        follower.goes_on(1)
        follower.leave()
    wait_for(lambda: shown(pair.second, stream.id)["status"] == "completed")
    assert shown(pair.second, stream.id)["choices"][0]["text"] == "".join(WORDS)


def test_webhooks_are_refused(pair: Pair) -> None:
    answer = pair.first.complete("x", background=True, webhook_url="https://example.com")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "webhook_url")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_grace_ends_when_nobody_came_back(pair: Pair, streamed: bool) -> None:
    ask = pair.first.open if streamed else pair.first.ask
    with ask(endless(delay_ms=20), headers={"X-Resume-Grace": "1"}) as gone:
        wait_for(lambda: pair.first.busy() == 1)
        left = gone.leave()
        wait_for(lambda: pair.first.busy() == 0, 4)
    assert 0.9 < time.monotonic() - left < 3


def test_a_grace_is_renewed_by_whoever_comes_back(pair: Pair) -> None:
    with pair.first.open(endless(delay_ms=20), headers={"X-Resume-Grace": "2"}) as stream:
        stream.goes_on(2)
        stream.leave()
    began = time.monotonic()
    with pair.second.resume(stream.id, stream.ids[-1]) as follower:
        follower.read(lambda follower: time.monotonic() - began > 3)
        assert follower.text, "longer than the first grace"
        left = follower.leave()
    wait_for(lambda: pair.first.busy() == 0, 6)
    assert 1.9 < time.monotonic() - left < 5
    with pair.first.open(script("a"), headers={"X-Resume-Grace": "soon"}) as refused:
        assert refused.answer is not None and refused.answer.error["param"] == "X-Resume-Grace"


# -- Idempotency-Key


def keyed(client: Client, key: str, prompt: str, **fields: Any) -> Answer:
    body = {"model": SCRIPTED, "prompt": prompt, **fields}
    return client.call("POST", "/v1/completions", body, headers={"Idempotency-Key": key})


def test_one_key_is_one_request(pair: Pair) -> None:
    """FB-075: what a caller chooses never gives one request the answer of another."""
    prompt = script("a", "b", delay_ms=100)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(keyed, client, "one", prompt) for client in (pair.first, pair.second) * 3]
        answers = [each.result(ANSWER_S) for each in asked]
    first = answers[0].json
    assert all(answer.json == first for answer in answers)
    assert {answer.headers["x-sluice-id"] for answer in answers} == {first["id"]}
    raw = json.dumps({"prompt": prompt, "user": None, "model": SCRIPTED}).encode()
    same = pair.second.call("POST", "/v1/completions", raw=raw, headers={"Idempotency-Key": "one"})
    assert same.json == first, "the order of keys and nulls do not count"
    other = keyed(pair.second, "one", script("z"))
    assert (other.status, other.error["code"], other.headers["x-should-retry"]) == (
        409,
        "idempotency_conflict",
        "false",
    )
    assert keyed(pair.second, "two", prompt).json["id"] != first["id"]
    is_idle(pair)


@KINDS
def test_one_key_is_one_stream(pair: Pair, kind: Kind) -> None:
    """Running: followed from its start. Ended: replayed, also from its result when its log is gone."""
    key = {"Idempotency-Key": f"stream-{kind.__name__}"}
    with pair.first.open(kind(SLOW), headers=key) as stream, pair.second.open(kind(SLOW), headers=key) as same:
        stream.goes_on(2)
        same.goes_on(2)
        stream.leave()
        same.read()
    assert same.id == stream.id and same.text == "".join(WORDS)
    again = pair.first.stream(kind(SLOW), headers=key)
    assert said(again) == said(same)
    with pair.first.store() as store:
        wait_for(lambda: store.exists(keys.results(same.id)))
        store.delete(keys.log(same.id))
    assert said(pair.second.stream(kind(SLOW), headers=key)) == said(same)


def test_a_request_that_may_be_repeated_frees_its_key(pair: Pair) -> None:
    refused = keyed(pair.first, "refused", script("a"), temperature=9)
    assert refused.status == 400 and keyed(pair.first, "refused", script("b")).status == 200
    with pair.first.open(endless(delay_ms=20), headers={"Idempotency-Key": "cancelled"}) as stream:
        stream.goes_on(1)
        pair.second.cancel(stream.id)
        stream.read()
    assert keyed(pair.first, "cancelled", script("b")).status == 200
    with pair.first.open(endless(delay_ms=20), headers={"Idempotency-Key": "hung-up"}) as stream:
        stream.goes_on(1)
        stream.leave()
    is_idle(pair)
    assert keyed(pair.first, "hung-up", script("b")).status == 200
    failed = script("a", error_after=0)  # not one that may be repeated: the answer stays
    assert keyed(pair.first, "failed", failed).status == 500
    assert (
        keyed(pair.first, "failed", failed).headers["x-sluice-id"]
        == keyed(pair.second, "failed", failed).headers["x-sluice-id"]
    )
    wrong = pair.first.call("POST", "/v1/completions", {"prompt": "x"}, headers={"Idempotency-Key": "a b"})
    assert wrong.error["param"] == "Idempotency-Key"


def test_a_background_key(pair: Pair) -> None:
    first = keyed(pair.first, "background", script("a"), background=True)
    second = keyed(pair.second, "background", script("a"), background=True)
    assert first.status == second.status == 202 and first.json["id"] == second.json["id"]


# -- what processes know of each other


def test_the_heartbeat_repairs_what_the_store_thinks(pair: Pair) -> None:
    """An attach that was lost is made again, a detach too; a process that the store has forgotten registers again."""
    with pair.first.open(endless(delay_ms=100)) as stream, pair.first.store() as store:
        stream.goes_on(1)
        procs = [name.decode() for name in store.smembers(keys.PROCS)]
        [home] = [name for name in procs if store.sismember(keys.attached(name), stream.id)]
        [other] = [name for name in procs if name != home]
        store.srem(keys.attached(home), stream.id)
        wait_for(lambda: store.sismember(keys.attached(home), stream.id), 30)
        # not before: a detach of the last one known to follow it cancels the request
        store.sadd(keys.attached(other), stream.id)
        wait_for(lambda: not store.sismember(keys.attached(other), stream.id), 30)
        store.srem(keys.PROCS, home)
        store.delete(keys.attached(home), keys.alive(home))
        wait_for(lambda: store.sismember(keys.attached(home), stream.id) and store.sismember(keys.PROCS, home), 30)
        stream.goes_on(2)
    is_idle(pair)


def test_a_client_that_does_not_read_gets_all_of_it_later(pair: Pair) -> None:
    """FB-078. The lane is done long before; what its client has not read waits in the log and comes in fewer chunks."""
    pieces = 3000
    piece = "a piece of text that is long enough to fill the buffers of a socket "
    with pair.first.open(json.dumps({"pieces": [piece], "repeat": pieces}), logprobs=3) as stream:
        stream.goes_on(1)
        wait_for(lambda: shown(pair.second, stream.id)["status"] == "completed", 30)
        stream.read()
    assert stream.text == piece * pieces
    assert (stream.finish, stream.done) == ("stop", 1)
    assert len(stream.data) < pieces / 2
    middle = len(stream.data) // 2
    with pair.second.resume(stream.id, stream.ids[middle]) as rest:
        rest.read()
    assert said_of([*all_events(stream)[: middle + 1], *all_events(rest)]) == said(stream)


# -- when something breaks


@KINDS
def test_a_stream_goes_on_after_its_api_node_was_killed(pair: Pair, kind: Kind) -> None:
    with another_node(pair.first) as (dying, process):
        with dying.open(kind(SLOW)) as stream:
            stream.goes_on(5)
            process.kill()
            with contextlib.suppress(OSError, http.client.HTTPException):
                stream.read()
        with pair.second.resume(stream.id, stream.ids[-1]) as rest:
            rest.read()
    assert stream.text + rest.text == "".join(WORDS)
    assert (rest.finish, rest.done) == ("stop", 1)


def test_a_node_that_stops_leaves_those_who_may_come_back_to_the_others(pair: Pair) -> None:
    """It does not sign off: its name stays until its time is over, as a dead one's."""
    with another_node(pair.first) as (stopping, process), pair.first.store() as store:
        before = store.smembers(keys.PROCS)
        with stopping.open(endless(delay_ms=20), headers={"X-Resume-Grace": "30"}) as stream:
            stream.goes_on(2)
            stream.leave()
        process.terminate()
        assert process.wait(20) == 0
        assert store.smembers(keys.PROCS) == before
        [own] = [name.decode() for name in before if store.sismember(keys.attached(name.decode()), stream.id)]
        assert store.exists(keys.alive(own))
        with pair.second.resume(stream.id, stream.ids[-1]) as rest:
            rest.goes_on(3)
            pair.second.cancel(stream.id)


def test_background_requests_outlive_their_api_node(pair: Pair) -> None:
    """FB-145"""
    with another_node(pair.first) as (stopping, process):
        job_id = job_of(stopping.complete(script("a", "b", delay_ms=300), background=True), 202)["id"]
        process.kill()
        process.wait(10)
        wait_for(lambda: shown(pair.second, job_id)["status"] == "completed")
    assert shown(pair.first, job_id)["choices"][0]["text"] == "ab"


def test_an_attached_stream_outlives_its_connections(pair: Pair) -> None:
    """FB-022"""
    with pair.first.open(SLOW) as stream, pair.second.resume(stream.goes_on(2).id) as rest:
        with pair.first.store() as store:
            for _ in range(3):
                rest.goes_on(2)
                store.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                store.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert rest.read().text == stream.read().text == "".join(WORDS)
    assert (rest.finish, stream.finish) == ("stop", "stop")
