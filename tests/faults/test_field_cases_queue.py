"""Field cases of queue, worker and store: faults that people met in systems like this one. Long idle times are true with
--slow, else a sixtieth of it.

Elsewhere: FB-002, FB-022 in test_hub.py, FB-018 with FB-118 in test_batch_faults.py, FB-019 in test_races.py, FB-021 in
test_lane_worker.py, FB-043 in test_known_jobs.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from shared import keys
from shared.frames import Take
from tests.conftest import Node, Store, Worker, script, wait_for
from tests.faults import books
from tests.faults.proxy import Proxy
from tests.faults.told import of_answer, of_stream
from tests.integration.test_http_completions import refused
from tests.stack import SCRIPTED, Answer, Stack, endless

WORDS = [f"w{number} " for number in range(30)]
TEXT = "".join(WORDS)
MINUTE = 60.0

Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("queue"), options=("--workers", "2:2")) as stack:
        wait_for(lambda: len(stack.status()["workers"]) == 2, 60)
        yield stack


def connections(store: Any) -> set[str]:
    """Ids of the connections that are not the tests' own."""
    return {client["id"] for client in store.client_list() if client["id"] != str(store.client_id())}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scale", [1 / 60, pytest.param(1.0, marks=pytest.mark.slow)])
def test_fb016_fb086_idle_workers_and_slow_streams_keep_their_connections(pair: Stack, scale: float) -> None:
    """Nobody leaves, nobody connects anew, and what comes after the silence is served."""
    before = pair.workers()
    with pair.store() as store:
        pair.complete("warm")
        known = connections(store)
        with pair.open(script("a", "b", start_delay_ms=scale * MINUTE * 1000 + 6000)) as slow:
            assert not threading.Event().wait(scale * 10 * MINUTE)
            assert of_stream(slow.read(timeout=120)).choices[0].text == "ab"
        assert pair.workers() == before
        assert len(connections(store) - known) <= 4, "a pool may open one that it had not needed before"
        assert {worker["lanes"] for worker in pair.status()["workers"]} == {64}
    assert pair.complete(script("o", "k")).text == "ok"


@pytest.mark.slow
def test_fb017_a_killed_worker_leaves_nothing_started_for_ever(tmp_path: Path) -> None:
    """The only one, and no other comes: the clients are told, and so is RQ."""
    with (
        Stack(tmp_path, (), options=("--workers", "0:0"), cold_start_s=2) as stack,
        stack.store() as store,
        ThreadPoolExecutor(1) as threads,
    ):
        worker = Worker(stack.url, "only", lease_s=2)
        try:
            wait_for(lambda: stack.serves(SCRIPTED))
            with stack.open(endless(delay_ms=50)) as stream:
                stream.goes_on(2)
                plain = threads.submit(stack.complete, endless(delay_ms=40))
                wait_for(lambda: stack.busy() == 2)
                worker.kill()
                stream.read(timeout=30)
            assert stream.error is not None and stream.error["code"] == "worker_lost"
            refused(plain.result(30), 503, code="worker_lost")
            job = RqJob.fetch(stream.id, connection=store, serializer=JSONSerializer)
            assert job.get_status() == "failed"
            wait_for(lambda: not books.left_behind(store), 30)
        finally:
            worker.kill()


def test_fb020_a_running_job_that_is_cancelled_stops(pair: Stack) -> None:
    """By RQ's own means, twice, and once more after the end."""
    with pair.store() as store, pair.open(endless(delay_ms=30)) as stream:
        stream.goes_on(3)
        job = RqJob.fetch(stream.id, connection=store, serializer=JSONSerializer)
        job.cancel()
        with contextlib.suppress(Exception):  # RQ itself raises for a second one
            job.cancel()
        stream.read(timeout=20)
        assert stream.error is not None and stream.error["code"] == "cancelled"
        wait_for(lambda: pair.busy() == 0, 2)
        count = len(books.ids(books.logged(store, stream.id)))
        with contextlib.suppress(Exception):
            job.cancel()
        assert len(books.ids(books.logged(store, stream.id))) == count
    assert pair.complete(script("o", "k")).text == "ok"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [120, 1000])
def test_fb074_a_worker_that_sleeps_beyond_its_lease_runs_nothing_twice(pair: Stack, count: int) -> None:
    """Its jobs go on elsewhere; when it wakes it writes nothing more of them."""
    with pair.store() as store, ThreadPoolExecutor(24) as threads:
        [first, _] = wait_for(lambda: len(found := pair.workers()) == 2 and found, 60)
        asked = [threads.submit(pair.stream, script(f"{n} ", *WORDS[:9], delay_ms=40)) for n in range(count)]
        wait_for(lambda: any(books.pid_of(store, worker) == first for worker in books.running(store).values()))
        os.kill(first, signal.SIGSTOP)
        wake = threading.Timer(12.0, os.kill, (first, signal.SIGCONT))
        wake.start()
        overtaken = 0
        for number, future in enumerate(asked):
            stream = future.result(120)
            assert of_stream(stream).choices[0].text == f"{number} " + "".join(WORDS[:9])
            told = books.logged(store, stream.id)
            overtaken += sum(isinstance(frame, Take) for frame in told) > 1
            assert len(books.ids(told)) == 11, "each token once"
            assert store.xlen(f"rq:results:{stream.id}") <= 1
        wake.join()
        assert overtaken
        wait_for(pair.idle, 30)


@pytest.mark.parametrize("together", [True, False])
def test_fb075_an_id_that_the_caller_chose_is_no_job_id(pair: Stack, together: bool) -> None:
    def ask(word: str) -> Answer:
        body = {"model": SCRIPTED, "prompt": script(word, delay_ms=50)}
        return pair.call("POST", "/v1/completions", body, headers={"X-Request-Id": "mine"})

    with ThreadPoolExecutor(2 if together else 1) as threads:
        answers = list(threads.map(ask, ("one", "two")))
    assert [answer.text for answer in answers] == ["one", "two"]
    assert answers[0].json["id"] != answers[1].json["id"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}


class Canary:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def test_fb077_nothing_is_unpickled(pair: Stack, tmp_path: Path) -> None:
    """As job data, as result, as log entry, and as message on each kind of channel."""
    canary = tmp_path / "canary"
    planted = pickle.dumps(Canary(str(canary)))
    with pair.store() as store, pair.open(script(*WORDS, delay_ms=50), fanout=True) as stream:
        stream.goes_on(2)
        [proc] = [name.decode() for name in store.smembers(keys.PROCS)]
        for worker in store.smembers(keys.WORKERS):
            store.publish(keys.control_channel(worker.decode()), planted)
            store.publish(f"rq:pubsub:{worker.decode()}", planted)
        store.publish(keys.node_channel(proc), planted)
        store.hset(
            keys.job("planted"), mapping={"data": zlib.compress(planted), "status": "queued", "origin": SCRIPTED}
        )
        store.xadd("rq:results:planted", {"type": "1", "return_value": planted})
        store.rpush(keys.queue(SCRIPTED), "planted")
        store.lpush(keys.bell(SCRIPTED), "1")
        wait_for(lambda: store.hget(keys.job("planted"), "status") == b"failed")
        assert of_stream(stream.read()).choices[0].text == TEXT
        assert not canary.exists()
        pickle.loads(planted)
        assert canary.exists(), "the canary works"
        store.delete(keys.job("planted"), "rq:results:planted")


@pytest.mark.slow
def test_fb078_a_reader_that_is_too_slow_for_its_buffer_holds_up_nobody(tmp_path: Path) -> None:
    """The store cuts a subscriber off that does not keep up: the streams are whole nevertheless."""
    with Stack(tmp_path) as stack, stack.store() as store:
        store.config_set("client-output-buffer-limit", "pubsub 1mb 256kb 1")
        [api] = stack.api_processes()
        fat = json.dumps({"pieces": ["x" * 20_000], "repeat": 120, "delay_ms": 5})
        with ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(stack.stream, fat, logprobs=5, timeout=100) for _ in range(6)]
            wait_for(lambda: stack.busy() == 6)
            os.kill(api, signal.SIGSTOP)  # it does not read its channel for a while
            with contextlib.suppress(BaseException):
                wait_for(lambda: not any("node:" in str(c) for c in store.pubsub_channels(keys.node_channel("*"))), 4)
            os.kill(api, signal.SIGCONT)
            for future in asked:
                assert len(of_stream(future.result(110)).choices[0].text) == 20_000 * 120
        assert stack.stream(script("o", "k")).text == "ok"


def test_fb080_a_connection_that_swallows_everything_is_noticed(store: Store, start_worker: Start) -> None:
    """No reset, no answer: as a firewall drops an idle connection. The API's side hears its channel again in time."""
    start_worker()
    proxy = Proxy(store.url.removeprefix("unix://"))
    node = Node(proxy.url)
    try:
        stream = node.submit(script(*(f"w{n} " for n in range(100)), delay_ms=100))
        stream.read(lambda stream: len(stream.tokens) >= 3)
        proxy.swallow()
        assert stream.read(timeout=60).text == "".join(f"w{n} " for n in range(100))
    finally:
        node.hub.stop()
        node.gateway.leave()
        proxy.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [200, 3000])
def test_fb081_nothing_grows_for_ever(tmp_path: Path, count: int) -> None:
    """Streams, some of them hung up on and some whose worker dies: when their time is over the store is as it was."""
    with Stack(tmp_path, options=("--workers", "2:2"), log_ttl_s=2, result_ttl_s=2) as stack, stack.store() as store:
        wait_for(lambda: len(stack.status()["workers"]) == 2, 60)
        for _ in range(30):
            stack.complete(script("warm"))
        wait_for(lambda: not keys_of_requests(store), 30)
        before, memory = store.dbsize(), store.info("memory")["used_memory"]

        def once(number: int) -> None:
            with stack.open(script(*WORDS[:8], delay_ms=10)) as stream:
                if number % 10 == 0:
                    stream.goes_on(1)
                    stream.leave()
                else:
                    assert of_stream(stream.read()).choices[0].text == "".join(WORDS[:8])
                    assert all(store.ttl(key) > 0 for key in (keys.log(stream.id), keys.job(stream.id)))

        with ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(once, number) for number in range(count)]
            wait_for(lambda: books.running(store), every=0.005)
            os.kill(stack.workers()[0], signal.SIGKILL)
            for future in asked:
                future.result(200)
        wait_for(lambda: not keys_of_requests(store), 40)
        wait_for(lambda: len(stack.status()["workers"]) == 2, 60)
        # one list of executions and one worker's record more, for the time that RQ keeps them
        assert store.dbsize() <= before * 1.05 + 4
        assert store.info("memory")["used_memory"] <= memory * 1.05 + 2_000_000, "buffers come and go"
        wait_for(lambda: not books.left_behind(store), 30)


def keys_of_requests(store: Any) -> list[bytes]:
    return [key for key in store.scan_iter(count=1000) if b"cmpl-" in key]


def test_fb082_a_store_that_becomes_a_replica_is_waited_for(pair: Stack) -> None:
    """It refuses writes for a while, as one that fails over does: new work 503, nothing lost, and no restart."""
    before = (pair.workers(), pair.api_processes())
    with pair.store() as store, pair.open(script(*WORDS, delay_ms=100)) as stream:
        stream.goes_on(3)
        store.execute_command("CONFIG", "SET", "min-replicas-to-write", "1")  # what a primary alone answers: NOREPLICAS
        try:
            answer = pair.complete(script("n", "o"))
            refused(answer, 503, code="store_unavailable")
            assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-should-retry"] == "true"
        finally:
            store.execute_command("CONFIG", "SET", "min-replicas-to-write", "0")
        assert of_stream(stream.read(timeout=60)).choices[0].text == TEXT
    assert pair.complete(script("o", "k")).text == "ok"
    assert (pair.workers(), pair.api_processes()) == before


@pytest.mark.parametrize("ttl", ["0", "-1", "1", "x", ""])
def test_fb085_odd_times_to_live_harm_nobody(store: Store, start_worker: Start, node: Node, ttl: str) -> None:
    worker = start_worker()
    stream = node.submit(script("a", "b", start_delay_ms=200))
    store.client.hset(keys.job(stream.job.id), mapping={"result_ttl": ttl, "log_ttl": ttl, "failure_ttl": ttl})
    assert stream.read().text == "ab"
    assert worker.process.poll() is None
    assert 0 < store.client.ttl(keys.job(stream.job.id)) <= 3600
    assert node.submit(script("o", "k")).read().text == "ok"


def test_fb087_prompts_are_no_descriptions(pair: Stack) -> None:
    """What RQ's tools show of a job says nothing of its content, so nothing of it can run in an operator's browser."""
    evil = "<img src=x onerror=alert(1)>"
    with pair.store() as store:
        answer = pair.complete(evil, user=evil)
        assert of_answer(answer).choices[0].text == evil
        fields = store.hgetall(keys.job(answer.json["id"]))
        assert not [name for name, value in fields.items() if evil.encode() in value and name != b"data"]
        assert fields[b"description"] == b"completion"
        failed = pair.complete(json.dumps({"pieces": [evil], "error_after": 0}))
        assert failed.status == 500
        job = RqJob.fetch(failed.headers["x-sluice-id"], connection=store, serializer=JSONSerializer)
        assert evil not in str(job.latest_result().exc_string)


def test_fb145_an_api_process_that_restarts_finishes_its_streams_first(pair: Stack) -> None:
    """Plain and streamed: they are drained before it ends, as at a deployment."""
    [old] = pair.api_processes()
    master = pair.pids(" -m api")[0]
    with pair.open(script(*WORDS, delay_ms=50)) as stream, ThreadPoolExecutor(1) as threads:
        stream.goes_on(2)
        plain = threads.submit(pair.complete, script(*WORDS, delay_ms=50))
        wait_for(lambda: pair.busy() == 2)
        os.kill(master, signal.SIGTERM)
        assert of_stream(stream.read()).choices[0].text == TEXT
        assert plain.result(30).text == TEXT
    wait_for(lambda: pair.serves(SCRIPTED) and old not in pair.api_processes(), 40)
    assert pair.complete(script("o", "k")).text == "ok"


def test_gaps_between_tokens_stay_small_while_others_are_killed(pair: Stack) -> None:
    """FB-074's kind: a death costs those alone that ran there."""
    with pair.store() as store, pair.open(script(*WORDS, delay_ms=100)) as stream:
        stream.goes_on(2)
        mine = books.owner(store, stream.id)
        both = wait_for(lambda: len(found := pair.workers()) == 2 and found, 60)
        [other] = [pid for pid in both if pid != mine]
        os.kill(other, signal.SIGKILL)
        assert of_stream(stream.read()).choices[0].text == TEXT
        assert max(b - a for a, b in pairwise(stream.times)) < 1.5
