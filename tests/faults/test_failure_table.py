"""What breaks, and what the clients see of it: the failures that DESIGN's table names, one by one.

Failover itself is in test_failover.py, requests that kill workers are in test_poison.py, restarts of everything that `up`
looks after are in test_stack_faults.py.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from shared import keys
from tests.conftest import Worker, script, wait_for
from tests.faults import books
from tests.faults.told import of_answer, of_stream
from tests.integration.test_http_completions import refused
from tests.stack import SCRIPTED, Stack, body, endless

WORDS = [f"w{number} " for number in range(40)]
TEXT = "".join(WORDS)
#: How long requests wait for a worker, s.
COLD_START = 10.0
#: How long those of a dead API process run on, s.
GRACE = 4.0

Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Store and API; the workers are the tests' own, so nobody starts them again."""
    with Stack(
        tmp_path_factory.mktemp("bare"),
        (),
        options=("--workers", "0:0"),
        cold_start_s=COLD_START,
        orphan_grace_s=GRACE,
    ) as stack:
        yield stack


@pytest.fixture
def start(bare: Stack) -> Iterator[Start]:
    """Workers of `bare`; what is left of them is gone when the next test begins."""
    workers: list[Worker] = []

    def start(**settings: object) -> Worker:
        workers.append(Worker(bare.url, f"own-{os.urandom(4).hex()}", **settings))
        wait_for(lambda: bare.serves(SCRIPTED))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
    with bare.store() as store:
        for worker in workers:
            store.delete(keys.lease(worker.name))
        wait_for(lambda: not store.exists(keys.WORKERS), 20)


# Workers


def test_no_other_worker_comes_in_time(bare: Stack, start: Start) -> None:
    worker = start(lease_s=2)
    with bare.open(script(*WORDS, delay_ms=50)) as stream, ThreadPoolExecutor(2) as threads:
        stream.goes_on(3)
        plain = threads.submit(bare.complete, script(*WORDS, delay_ms=60))
        wait_for(lambda: bare.busy() == 2)
        worker.kill()
        stream.read(timeout=30)
        assert stream.error is not None and stream.error["code"] == "worker_lost" and stream.done == 1
        assert TEXT.startswith(stream.text) and stream.finish is None
        answer = plain.result(30)
        refused(answer, 503, code="worker_lost")
        assert answer.headers["x-should-retry"] == "true" and int(answer.headers["retry-after"]) >= 1


def test_a_job_that_fails_takes_nobody_along(bare: Stack, start: Start) -> None:
    worker = start()
    with bare.open(script(*WORDS, delay_ms=20)) as neighbour, bare.open(script("a", "b", error_after=1)) as failing:
        failing.read()
        assert failing.text == "a" and failing.error is not None and failing.error["code"] == "internal_error"
        assert of_stream(neighbour.read()).choices[0].text == TEXT
    assert worker.process.poll() is None


def test_a_worker_that_is_told_to_stop_takes_nothing_more_and_ends(bare: Stack, start: Start) -> None:
    first = start(drain_s=60)
    with bare.open(script(*WORDS, delay_ms=250)) as running:
        running.goes_on(3)
        first.process.send_signal(signal.SIGTERM)
        wait_for(lambda: any(worker["draining"] for worker in bare.status()["workers"]), every=0.005)
        second = start()
        assert bare.stream(script("o", "k")).text == "ok"
        with bare.store() as store:
            wait_for(lambda: books.running(store) == {running.id: first.name})
        assert of_stream(running.read()).choices[0].text == TEXT
    assert first.process.wait(20) == 0, "what it ran could finish"
    assert [worker["name"] for worker in bare.status()["workers"]] == [second.name]


def test_nothing_is_known_that_starts_workers(bare: Stack, start: Start) -> None:
    start().stop()
    wait_for(lambda: not bare.status()["workers"])
    for streamed in (False, True):
        answer = bare.call("POST", "/v1/completions", body("x", SCRIPTED, {"stream": streamed}))
        refused(answer, 503, code="no_worker")
        assert answer.seconds < 1.5 and int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-should-retry"] == "true"


def test_something_is_known_that_starts_workers(bare: Stack, start: Start) -> None:
    """It waits in the queue, is served by the one that comes, and is not left waiting where none does."""
    start().stop()
    wait_for(lambda: not bare.status()["workers"])
    with bare.store() as store, ThreadPoolExecutor(2) as threads:
        store.set(keys.starter(SCRIPTED), "1", ex=60)
        try:
            wait_for(lambda: bare.serves() and SCRIPTED in bare.models())
            waiting = threads.submit(bare.complete, script("l", "a", "t", "e"))
            wait_for(lambda: bare.queue() == (1, 0))
            worker = start()
            assert waiting.result(30).text == "late"
            worker.stop()
            answer = bare.complete(script("n", "o"))
            refused(answer, 503, code="no_worker")
            assert COLD_START <= answer.seconds < COLD_START + 5
            assert 1 <= int(answer.headers["retry-after"]) <= 120
            assert bare.queue() == (0, 0)
        finally:
            store.delete(keys.starter(SCRIPTED))


# API processes


def test_requests_of_a_killed_api_process_run_on_for_a_while(bare: Stack, start: Start) -> None:
    start()
    [before] = wait_for(lambda: bare.api_processes())
    with bare.open(endless(delay_ms=30)) as stream, bare.store() as store:
        stream.goes_on(3)
        os.kill(before, signal.SIGKILL)
        with pytest.raises((OSError, http.client.HTTPException, pytest.fail.Exception)):
            stream.read(timeout=20)
            assert stream.done == 0 and stream.finish is None
            raise ConnectionError("ended without its end: the client can see that it is not whole")
        assert stream.error is None and stream.finish is None
        seen = len(books.ids(books.logged(store, stream.id)))
        wait_for(lambda: len(books.ids(books.logged(store, stream.id))) > seen + 30, 10)
        assert store.hget(keys.job(stream.id), "terminal") is None
        wait_for(lambda: store.hget(keys.job(stream.id), "terminal"), GRACE + 10)
        last = books.logged(store, stream.id)[-1]
        assert getattr(last, "error", {}).get("code") == "cancelled"
        wait_for(lambda: bare.serves() and bare.idle(), 30)
        wait_for(lambda: not books.left_behind(store), 30)


def test_an_api_process_that_is_told_to_stop_lets_its_streams_finish(bare: Stack, start: Start) -> None:
    """`up` starts it again: who comes meanwhile is refused or waits, and nobody's text is cut."""
    start()
    master = bare.pids(" -m api")[0]
    with bare.open(script(*WORDS, delay_ms=50)) as stream, ThreadPoolExecutor(1) as threads:
        stream.goes_on(3)
        plain = threads.submit(bare.complete, script(*WORDS, delay_ms=40))
        wait_for(lambda: bare.busy() == 2)
        os.kill(master, signal.SIGTERM)
        assert of_stream(stream.read()).choices[0].text == TEXT
        assert of_answer(plain.result(30)).choices[0].text == TEXT
    wait_for(lambda: bare.pids(" -m api")[:1] not in ([], [master]) and bare.serves(SCRIPTED), 30)
    assert bare.complete(script("o", "k")).text == "ok"


# Clients


def test_a_slow_client_holds_up_nobody_and_misses_nothing(bare: Stack, start: Start) -> None:
    """It reads nothing until its request has long ended: what the server kept for it is bounded, the rest is in the log,
    and deltas that waited come together."""
    start()
    count = 4000
    prompt = json.dumps({"pieces": ["tick ", "tock "], "repeat": count // 2, "delay_ms": 1})
    sent = json.dumps(body(prompt, SCRIPTED, {"stream": True, "logprobs": 5})).encode()
    with socket.socket() as slow, bare.store() as store:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect(("127.0.0.1", bare.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n"
        )
        slow.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
        [job_id] = wait_for(lambda: list(books.running(store)))
        quick = bare.stream(script(*WORDS, delay_ms=20))
        assert of_stream(quick).choices[0].text == TEXT
        assert max(b - a for a, b in pairwise(quick.times)) < 1.0
        wait_for(lambda: store.hget(keys.job(job_id), "terminal"), 60)
        assert len(books.ids(books.logged(store, job_id))) == count + 1, "the engine did not wait for it"
        response = http.client.HTTPResponse(slow, method="POST")
        response.begin()
        events = [line[6:] for line in response.read().split(b"\n") if line.startswith(b"data: {")]
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == "tick tock " * (count // 2)
    entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["token_logprobs"]]
    assert len(entries) == count + 1 and len(pieces) < count
