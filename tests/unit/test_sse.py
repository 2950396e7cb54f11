"""Streams as a client reads them: events, comments, errors before and after the headers, one end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.lifecycle import Lifecycle
from api.relay import sse
from api.relay.completion_builder import CompletionBuilder
from api.relay.exchange import Exchange
from api.relay.grace import Graces
from shared.errors import ContextLengthExceeded, JobLost, NoWorker, SluiceError, StoreUnavailable, WorkerLost
from shared.frames import Delta, Error, Frame, Start, Take
from shared.jobs import Job
from shared.scripts import Place
from tests.contract.schemas import check_chunk, check_error
from tests.unit.completion_frames import a_job, told
from tests.unit.fakes import FakeStore


class Stream:
    """A parsed event stream."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.ids: list[str | None] = []
        self.data: list[dict[str, Any]] = []
        self.comments: list[str] = []
        self.done = 0
        current = None
        for line in raw.decode().split("\n"):
            if line.startswith(":"):
                self.comments.append(line)
            elif line.startswith("id: "):
                current = line[4:]
            elif line == "data: [DONE]":
                self.done += 1
            elif line.startswith("data: "):
                self.data.append(json.loads(line[6:]))
                self.ids.append(current)
                current = None
        for chunk in self.data:
            check_error(chunk) if "error" in chunk else check_chunk(chunk)

    @property
    def text(self) -> str:
        return "".join(choice["text"] for chunk in self.data for choice in chunk.get("choices", []))

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [chunk["error"] for chunk in self.data if "error" in chunk]


def ask(client: FlaskClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "p", "stream": True, **fields})


def says(*items: Frame | list[Frame] | Exception) -> Callable[[Job], Iterator[Any]]:
    return lambda job: iter(items)


def test_a_stream(client: FlaskClient, store: FakeStore) -> None:
    store.script = says(*told("Hel", "lo"))
    response = ask(client)
    stream = Stream(response.data)
    assert response.status_code == 200 and response.headers["Content-Type"] == "text/event-stream"
    assert (response.headers["Cache-Control"], response.headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert response.headers["x-sluice-id"] == store.jobs[0].id == stream.data[0]["id"]
    assert (stream.text, stream.done, stream.ids) == ("Hello", 1, ["5-3", "5-4", "6-7"])
    assert stream.data[-1]["usage"]["completion_tokens"] == 3 and stream.raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert store.calls == ["open", "submit"] and not store.detached
    assert all(subscription.closed for subscription in store.open_subscriptions.values())


def test_an_alias_answers_under_the_real_id(client: FlaskClient, store: FakeStore) -> None:
    store.script = says(*told("a"))
    assert {chunk["model"] for chunk in Stream(ask(client, model="alias").data).data} == {"scripted"}


@pytest.mark.parametrize("before", [[], [Take("w")]])
@pytest.mark.parametrize("together", [True, False])
def test_an_error_as_first_frame_is_a_plain_http_error(
    client: FlaskClient, store: FakeStore, before: list[Frame], together: bool
) -> None:
    error = ContextLengthExceeded("too long", param="max_tokens")
    frames = [*before, Error(error.to_object(), 400)]
    store.script = says(frames) if together else says(*frames)
    response = ask(client)
    assert response.status_code == 400 and response.json == {"error": error.to_object()}
    assert response.headers["x-sluice-id"] and not store.detached


def test_after_start_an_error_comes_in_the_stream(client: FlaskClient, store: FakeStore) -> None:
    """FB-004, and the frames of one entry are judged one by one."""
    error = WorkerLost("The worker is gone.")
    store.script = says([Take("w"), Start(1), Delta(0, [1], "abc"), Error(error.to_object(), 503, True)])
    response = ask(client)
    stream = Stream(response.data)
    assert response.status_code == 200 and (stream.text, stream.done) == ("abc", 1)
    assert stream.errors == [error.to_object()] and stream.data[-1] == {"error": error.to_object()}
    assert not any(c["finish_reason"] for chunk in stream.data[:-1] for c in chunk["choices"])


@pytest.mark.parametrize(
    ("raised", "code"), [(JobLost("lost"), "job_lost"), (ZeroDivisionError("/secret/path.py"), "internal_error")]
)
def test_whatever_is_raised_after_the_headers_is_one_error_and_done(
    client: FlaskClient, store: FakeStore, raised: Exception, code: str
) -> None:
    store.script = says(Take("w"), Start(1), Delta(0, [1], "abc"), raised)
    stream = Stream(ask(client).data)
    assert (stream.text, [error["code"] for error in stream.errors], stream.done) == ("abc", [code], 1)
    assert "/secret" not in stream.raw.decode() and store.detached == [store.jobs[0].id]


@pytest.mark.parametrize("raised", [JobLost("lost"), StoreUnavailable("away")])
def test_errors_of_this_side_before_the_headers(client: FlaskClient, store: FakeStore, raised: SluiceError) -> None:
    store.script = says(Take("w"), raised)
    response = ask(client)
    assert (response.status_code, response.json["error"]["code"]) == (503, raised.code)
    assert (response.headers["x-should-retry"], response.headers["Retry-After"]) == ("true", "1")
    assert response.headers["retry-after-ms"] == "1000" and store.detached == [store.jobs[0].id]


def test_no_worker_is_a_503_at_once(client: FlaskClient, store: FakeStore) -> None:
    def refuse(job: Job) -> Iterator[Any]:
        raise NoWorker("nobody")

    store.script = refuse
    response = ask(client)
    assert (response.status_code, response.json["error"]["code"]) == (503, "no_worker")
    assert "x-sluice-id" not in response.headers and not store.detached


def test_nothing_within_the_wait_means_200(client: FlaskClient, store: FakeStore) -> None:
    def later(job: Job) -> Iterator[Any]:
        subscription = store.open_subscriptions[job.id]
        threading.Timer(0.4, lambda: subscription.push(Error(WorkerLost("gone").to_object(), 503))).start()
        return iter([Take("w")])

    store.script = later
    response = ask(client)
    assert response.status_code == 200 and Stream(response.data).errors[0]["code"] == "worker_lost"


class Clock:
    """Moves on only when somebody waits for frames."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def written(store: FakeStore, frames: list[Frame | None], clock: Clock, heartbeat: float | None = 8) -> list[bytes]:
    """The pieces of a stream whose frames come so; None = the wait passes without a frame."""
    exchange = Exchange(
        a_job(), CompletionBuilder(a_job(), fingerprint="f"),
        hub=store, gateway=store, lifecycle=Lifecycle(), graces=Graces(print), clock=clock,
        holds=lambda constraint, text: True,  # type: ignore[arg-type]
    )  # fmt: skip
    subscription = store.open_subscriptions["cmpl-1"]
    real_get, plan = subscription.get, iter(frames)

    def get(timeout: float) -> Any:
        frame = next(plan)
        if frame is None:
            assert timeout > 0
            clock.now += timeout
            return None
        clock.now += 0.1
        subscription.push(frame)
        return real_get(1)

    subscription.get = get  # type: ignore[method-assign]
    exchange.submit()
    return list(sse.stream(exchange, [], heartbeat=heartbeat, clock=clock))


def test_silence_is_filled_with_comments(store: FakeStore) -> None:
    frames = told("a", "b")
    clock = Clock()
    pieces = written(store, [*frames[:3], None, None, frames[3], None, *frames[4:]], clock)
    assert pieces[0] == b"" and [p for p in pieces if p.startswith(b":")] == [b": keep-alive\n"] * 3
    for piece in pieces:
        assert not piece.startswith(b": ping") and not (piece.startswith(b":") and b"\n\n" in piece)


def test_frames_without_text_do_not_count_as_signs_of_life(store: FakeStore) -> None:
    """A held-back or slow text leaves the client without a byte all the same."""
    clock = Clock()
    silent: list[Frame | None] = [Take("w"), Start(1), *[Delta(0, [1]) for _ in range(200)]]
    pieces = written(store, [*silent, *told("x")[2:]], clock)
    assert pieces.count(b": keep-alive\n") == 2


def test_the_place_in_the_queue(store: FakeStore) -> None:
    store.places = [Place(3, 4.2), Place(3, 4.2), Place(2), Place(1)]
    waits: list[Frame | None] = [None] * 4
    pieces = written(store, [*waits, *told("a")], Clock())
    assert [p for p in pieces if p.startswith(b":")] == [
        b": queued position=3 eta=4s\n", b": queued position=2\n", b": queued position=1\n",
    ]  # fmt: skip


def test_the_load_of_the_first_worker(store: FakeStore) -> None:
    """Looked at more often than a place in a queue that moves."""
    waiting, loading = Place(1, served=False), [Place(1, served=False, loading=percent) for percent in (0, 40, 40, 90)]
    store.places = [waiting, *loading, Place(2)]
    clock = Clock()
    pieces = written(store, [*[None] * 5, *told("a")], clock)
    assert [p for p in pieces if p.startswith(b":")] == [
        *(b": queued position=1\n", b": loading 0 %\n", b": loading 40 %\n", b": loading 90 %\n"),
        b": queued position=2\n",
    ]
    assert 2.5 <= clock() - 100 < 4


def test_a_place_that_stays_is_said_again_as_keep_alive(store: FakeStore) -> None:
    store.places = [Place(3)] * 20
    pieces = written(store, [*[None] * 8, *told("a")], Clock())
    assert [p for p in pieces if p.startswith(b":")] == [b": queued position=3\n"] * 3


def test_no_comments_if_switched_off(store: FakeStore, make_client: Callable[..., FlaskClient]) -> None:
    store.places = [Place(3)] * 20
    pieces = written(store, [None, None, *told("a")], Clock(), heartbeat=None)
    assert not [p for p in pieces if p.startswith(b":")]
    store.script = says(*told("a"))
    assert Stream(ask(make_client(sse_heartbeat="off")).data).comments == []


def test_closing_an_unread_stream_lets_go(client: FlaskClient, store: FakeStore) -> None:
    """A client that is gone before the first byte: the generator never ran, the lane must be freed all the same."""
    store.script = says(Take("w"), Start(1), Delta(0, [1], "abc"))
    response = client.post("/v1/completions", json={"prompt": "p", "stream": True}, buffered=False)
    response.close()
    assert store.detached == [store.jobs[0].id]


def test_closing_midway_lets_go_once(client: FlaskClient, store: FakeStore) -> None:
    """FB-005"""
    store.script = says(Take("w"), Start(1), Delta(0, [1], "abc"))
    response = client.post("/v1/completions", json={"prompt": "p", "stream": True}, buffered=False)
    pieces = iter(response.response)
    assert b"abc" in next(pieces) + next(pieces)  # type: ignore[operator]
    response.close()
    assert store.detached == [store.jobs[0].id]


def test_a_half_closed_client_gets_an_end_too(client: FlaskClient, store: FakeStore) -> None:
    def gone(job: Job) -> Iterator[Any]:
        yield from (Take("w"), Start(1), Delta(0, [1], "abc"))
        threading.Timer(0.1, store.open_subscriptions[job.id].hang_up).start()

    store.script = gone
    stream = Stream(ask(client).data)
    assert ([error["code"] for error in stream.errors], stream.done) == (["cancelled"], 1)
    assert store.detached == [store.jobs[0].id]
