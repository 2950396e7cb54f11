"""The lane worker from outside: as RQ and its tools see it, and as the store is told."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rq.command import send_stop_job_command
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.worker import Worker as RqWorker

from shared import keys
from shared.errors import LogLost, NoWorker, StoreUnavailable
from shared.frames import Delta, Take, decode_entry
from shared.jobs import FUNCTION, Job, new_id
from shared.scripts import Scripts
from tests.conftest import Node, Store, Worker, script, wait_for

ORIGIN = "scripted:interactive:default"
SLOW = script("a ", repeat=0, delay_ms=30)

Start = Callable[..., Worker]


def queue(store: Store) -> Queue:
    return Queue(ORIGIN, connection=store.client, serializer=JSONSerializer)


def rq_job(store: Store, job_id: str) -> RqJob:
    return RqJob.fetch(job_id, connection=store.client, serializer=JSONSerializer)


def rq_info(store: Store, *options: str) -> str:
    command = [sys.executable, "-m", "rq.cli", "info", "-u", store.url, "--raw", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_rq_sees_waiting_and_running_jobs_as_they_are(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker(lanes=16)
    finished_before = queue(store).finished_job_registry.count
    streams = [node.submit(SLOW, max_tokens=400) for _ in range(20)]
    wait_for(lambda: queue(store).started_job_registry.count == 16)
    for stream in streams[:16]:
        stream.read(lambda stream: len(stream.tokens) >= 3)
    assert queue(store).count == 4
    info = rq_info(store)
    assert f"queue {ORIGIN} 4, 16 executing, {finished_before} finished" in info
    assert f"worker {worker.name}" in info and " busy " in info
    running = {rq_job(store, stream.job.id).get_status() for stream in streams[:16]}
    waiting = {rq_job(store, stream.job.id).get_status() for stream in streams[16:]}
    assert (running, waiting) == ({JobStatus.STARTED}, {JobStatus.QUEUED})
    (seen,) = [w for w in RqWorker.all(connection=store.client) if w.name == worker.name]
    assert seen.current_execution_count == 16
    assert rq_job(store, streams[0].job.id).worker_name == worker.name
    for stream in streams:
        stream.hang_up()
    wait_for(lambda: queue(store).started_job_registry.count == 0 and queue(store).count == 0)
    assert queue(store).canceled_job_registry.count >= 20


def test_rqs_counting_of_registries_fails_no_running_job(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script("x", repeat=40, delay_ms=20))
    stream.read(lambda stream: stream.tokens)
    for registry in (queue(store).started_job_registry, queue(store).failed_job_registry):
        registry.cleanup()
        assert registry.count >= 0
    assert stream.read().text == "x" * 40


def test_the_result_and_the_counters_are_rqs(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker()
    stream = node.submit(script("a", "b")).read()
    job = rq_job(store, stream.job.id)
    result: Any = wait_for(job.latest_result)
    assert result.return_value["choices"] == [{"index": 0, "text": "ab", "finish_reason": "stop"}]
    assert result.return_value["usage"] == stream.end.usage
    assert job.get_status() == JobStatus.FINISHED
    assert job.id in queue(store).finished_job_registry
    wait_for(lambda: "1 finished, 0 failed" in rq_info(store, "-W") and worker.name in rq_info(store, "-W"))


def test_a_failed_job_is_failed_in_rq(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script("a", "b", error_after=1)).read()
    assert stream.text == "a" and stream.error is not None
    wait_for(lambda: stream.job.id in queue(store).failed_job_registry)
    result: Any = wait_for(lambda: rq_job(store, stream.job.id).latest_result())
    assert result.type == result.Type.FAILED


def test_stop_job_ends_that_lane_and_no_other(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    one, other = node.submit(SLOW), node.submit(script("b", repeat=40, delay_ms=30))
    for stream in (one, other):
        stream.read(lambda stream: stream.tokens)
    began = time.monotonic()
    send_stop_job_command(store.client, one.job.id, serializer=JSONSerializer)
    one.read()
    assert one.error is not None and one.error["code"] == "cancelled"
    assert time.monotonic() - began < 1
    assert rq_job(store, one.job.id).get_status() == JobStatus.STOPPED
    assert other.read().text == "b" * 40


def test_deadlines_end_running_and_waiting_jobs(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    node.settings.request_timeout_s = 1.5
    running, waiting = node.submit(SLOW), node.submit(SLOW)
    for stream in (running, waiting):
        stream.read()
        assert stream.error is not None and stream.error["code"] == "deadline_exceeded"
    assert running.tokens and not waiting.tokens


def test_sigterm_lets_running_jobs_finish_and_takes_no_more(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker(lanes=1)
    running, waiting = node.submit(script("x", repeat=30, delay_ms=30)), node.submit(script("y"))
    running.read(lambda stream: stream.tokens)
    worker.process.send_signal(signal.SIGTERM)
    assert running.read().text == "x" * 30
    assert running.finish == "stop"
    assert worker.process.wait(10) == 0
    assert rq_job(store, waiting.job.id).get_status() == JobStatus.QUEUED
    assert not store.client.sismember(keys.WORKERS, worker.name)
    assert worker.name not in [w.name for w in RqWorker.all(connection=store.client)]
    waiting.hang_up()


def test_what_outlasts_the_drain_goes_on_elsewhere(store: Store, start_worker: Start, node: Node) -> None:
    first = start_worker(drain_s=0.3)
    stream = node.submit(script(*(f"w{n} " for n in range(120)), delay_ms=50))
    stream.read(lambda stream: len(stream.tokens) > 3)
    second = start_worker()
    assert first.stop() == 0
    assert stream.read().text == "".join(f"w{n} " for n in range(120))
    assert [frame.worker for frame in stream.frames if isinstance(frame, Take)] == [first.name, second.name]
    assert store.client.hget(keys.job(stream.job.id), "kills") == b"0"


def test_an_idle_worker_drains_at_once(start_worker: Start) -> None:
    worker = start_worker()
    began = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - began < 4


def test_the_lease_is_renewed_and_runs_out_after_a_kill(store: Store, start_worker: Start) -> None:
    worker = start_worker(lease_s=2.5)
    lease = keys.lease(worker.name)
    for _ in range(2):  # it shrinks and grows again, and never runs out
        wait_for(lambda: 0 < store.client.pttl(lease) < 1500)
        wait_for(lambda: store.client.pttl(lease) > 2000)
    worker.kill()
    wait_for(lambda: not store.client.exists(lease), 4)


def test_what_a_dead_worker_ran_goes_on_elsewhere(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker(lease_s=2)
    stream = node.submit(script(*(f"w{n} " for n in range(30)), delay_ms=50))
    stream.read(lambda stream: len(stream.tokens) > 3)
    worker.kill()
    second = start_worker()
    assert stream.read().text == "".join(f"w{n} " for n in range(30))
    assert [frame.worker for frame in stream.frames if isinstance(frame, Take)] == [worker.name, second.name]
    assert stream.end.usage["completion_tokens"] == 31


def test_a_request_that_hangs_workers_is_ended_and_its_neighbour_is_not(
    store: Store, start_worker: Start, node: Node
) -> None:
    """Each of three workers gets nowhere any more and gives away what it ran; the third time it is known whose fault it is."""
    workers = [start_worker(stall_s=1.5)]
    bad = node.submit(script("a", "b", "c", "d", hang_after=2, delay_ms=20))
    good = node.submit(script(*(f"w{n} " for n in range(30)), delay_ms=30))
    bad.read(lambda stream: len(stream.tokens) == 2)
    workers += [start_worker(stall_s=1.5) for _ in range(2)]
    bad.read(timeout=40)
    assert bad.error is not None and bad.error["code"] == "poison_request"
    assert bad.text == "ab"
    start_worker()
    assert good.read().text == "".join(f"w{n} " for n in range(30))
    assert [worker.process.wait(10) for worker in workers] == [70, 70, 70]
    crash = store.client.hget(keys.job(bad.job.id), "crash").decode()
    assert all(worker.name in crash for worker in workers) and "no progress" in crash
    assert store.client.hget(keys.job(good.job.id), "kills") in (b"0", b"1")


def test_nobody_came_for_what_a_dead_worker_ran(start_worker: Start, node: Node) -> None:
    node.settings.cold_start_s = 1.0
    worker = start_worker(lease_s=2)
    stream = node.submit(SLOW)
    stream.read(lambda stream: stream.tokens)
    worker.kill()
    stream.read()
    assert stream.error is not None and stream.error["code"] == "worker_lost"


def test_without_a_worker_a_request_is_refused_at_once(start_worker: Start, node: Node) -> None:
    worker = start_worker()
    job = node.submit(script("a")).read().job
    assert worker.stop() == 0
    wait_for(lambda: not node.gateway.status()["workers"])
    with pytest.raises(NoWorker):
        node.gateway.submit(msgspec.structs.replace(job, id=new_id()))


class Canary:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


BAD_JOBS: dict[str, dict[str, Any]] = {
    "fields": {"prompts": "no list"},
    "no prompts": {"prompts": []},
    "no choices": {"n": 0, "best_of": 0},
    "too many choices": {"n": 3_000_000},
    "empty stop": {"stop": [""]},
    "ids beyond": {"prompts": [[99_999_999]]},
    "odd bias": {"params": {"logit_bias": {"-1": 1}}},
    "another id": {"id": "somebody-else"},
}


@pytest.mark.parametrize("kind", ["pickle", "function", "garbage", "bomb", *BAD_JOBS])
def test_a_job_that_somebody_else_wrote_runs_no_code_and_harms_no_neighbour(
    kind: str, store: Store, start_worker: Start, node: Node, tmp_path: Path
) -> None:
    worker = start_worker()
    neighbour = node.submit(script("x", repeat=30, delay_ms=20))
    neighbour.read(lambda stream: stream.tokens)
    canary = tmp_path / "canary"
    job_id = f"planted-{kind.replace(' ', '-')}"
    request = {"id": job_id, "model": "scripted", "prompts": ["x"], "seed": 1, "created": 0} | BAD_JOBS.get(kind, {})
    data = {
        "pickle": pickle.dumps(("os.system", None, (Canary(str(canary)),), {})),
        "function": JSONSerializer.dumps(("os.system", None, [f"touch {canary}"], {})),
        "garbage": b"\xff\x00",
        "bomb": b" " * 200_000_000,
    }.get(kind) or JSONSerializer.dumps(("sluice.completion", None, [request], {}))
    store.client.hset(
        f"rq:job:{job_id}", mapping={"data": zlib.compress(data), "status": "queued", "origin": "scripted"}
    )
    store.client.rpush("rq:queue:scripted", job_id)
    store.client.lpush(keys.bell("scripted"), "1")
    wait_for(lambda: store.client.hget(f"rq:job:{job_id}", "status") == b"failed")
    assert not canary.exists()
    assert neighbour.read().text == "x" * 30
    assert worker.process.poll() is None and node.submit(script("a")).read().text == "a"


ODD_NUMBERS = ("nan", "1e300", "-1e300", "inf", "0.5", "x", "18446744073709551615")
NUMBERS = ("a", "dl", "kills", "log_ttl", "needs", "queued", "result_ttl", "timeout")


def test_odd_jobs_take_nobody_elses_turn(store: Store, start_worker: Start, node: Node) -> None:
    """They are taken at once with a good one: none may be lost on the way to the worker, and each gets its end."""
    worker = start_worker()
    os.kill(worker.process.pid, signal.SIGSTOP)
    odd: dict[str, tuple[str, str]] = {}
    for field in NUMBERS:
        for value in ODD_NUMBERS:
            job = Job(id=new_id(), model="scripted", prompts=[script("a")], seed=1, created=0)
            data = JSONSerializer.dumps((FUNCTION, None, [msgspec.to_builtins(job, str_keys=True)], {}))
            fields = {"data": data, "status": "queued", "origin": "scripted", "log_ttl": "60", field: value}
            store.client.hset(keys.job(job.id), mapping=fields)
            odd[job.id] = (field, value)
    unwritable = new_id()
    store.client.hset(keys.job(unwritable), mapping={"data": b"", "status": "queued", "origin": "scripted"})
    store.client.set(f"rq:executions:{unwritable}", "no zset")
    store.client.set(keys.job("no-hash"), "text")
    store.client.rpush("rq:queue:scripted", "no-hash", unwritable, *odd)
    stream, began = node.submit(script("a", "b")), time.monotonic()
    os.kill(worker.process.pid, signal.SIGCONT)
    assert stream.read().text == "ab"
    assert time.monotonic() - began < 2, "lost, and given back by the heartbeat"
    wait_for(lambda: all(store.client.hget(keys.job(job_id), "terminal") for job_id in odd))
    failed = {what for job_id, what in odd.items() if store.client.hget(keys.job(job_id), "status") != b"finished"}
    assert failed <= {("dl", "0.5"), ("timeout", "0.5")}, "only these say that the time is over"
    assert store.client.hmget(keys.job(unwritable), "status", "terminal") == [b"failed", b"take"]
    wait_for(lambda: store.client.hlen(keys.lanes(worker.name)) == 0)


def test_jobs_that_somebody_wrote_over_while_they_run_are_let_go(store: Store, start_worker: Start, node: Node) -> None:
    """They hold no lane for ever, and nobody up: neither the writes of the others nor what is known of the worker."""
    worker = start_worker()
    other, endless, ending = node.submit(SLOW), node.submit(SLOW), node.submit(script("a", "b", delay_ms=700))
    for stream in (other, endless, ending):
        stream.read(lambda stream: stream.tokens)
    for stream in (endless, ending):
        store.client.set(keys.job(stream.job.id), "text", ex=60)
    store.client.hdel(keys.stat(worker.name), "pid")  # comes back when its figures are renewed
    wait_for(lambda: node.busy() == 1, 30)
    wait_for(lambda: store.client.hexists(keys.stat(worker.name), "pid"), 30)
    count = len(other.tokens)
    other.read(lambda stream: len(stream.tokens) >= count + 100)
    other.hang_up()
    assert node.submit(script("o", "k")).read().text == "ok"


def test_a_log_that_somebody_wrote_over_is_put_back(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script("x", repeat=100, delay_ms=20))
    stream.read(lambda stream: len(stream.tokens) > 5)
    store.client.set(keys.log(stream.job.id), "text")
    assert stream.read().text == "x" * 100
    told = [entry for _, fields in store.client.xrange(keys.log(stream.job.id)) for entry in decode_entry(fields[b"f"])]
    assert told == stream.frames


def test_odd_cards_and_figures_are_passed_over(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    store.client.sadd(keys.CARDS, "odd", "odder")
    store.client.hset(keys.card("odd"), "card", b"{\xff")
    store.client.set(keys.card("odder"), "text")
    for name, figures in (("odd", {"model": "scripted", "lanes": "many"}), ("odder", {"lanes": "1"})):
        store.client.sadd(keys.WORKERS, name)
        store.client.set(keys.lease(name), "1", ex=60)
        store.client.hset(keys.stat(name), mapping=figures)
    try:
        wait_for(node.gateway.cards)
        assert [card.id for card in node.gateway.cards()] == ["scripted"]
        assert len(node.gateway.status()["workers"]) == 1
        assert node.submit(script("o", "k")).read().text == "ok"
    finally:
        store.client.srem(keys.CARDS, "odd", "odder")
        store.client.srem(keys.WORKERS, "odd", "odder")
        store.client.delete(*(key(name) for key in (keys.card, keys.lease, keys.stat) for name in ("odd", "odder")))


def test_a_job_that_rq_itself_enqueued_runs(store: Store, start_worker: Start) -> None:
    start_worker()
    request = Job(id="by-rq", model="scripted", prompts=[script("a", "b")], seed=1, created=0)
    plain = Queue("scripted", connection=store.client, serializer=JSONSerializer)
    plain.enqueue(FUNCTION, msgspec.to_builtins(request, str_keys=True), job_id="by-rq")
    result: Any = wait_for(lambda: rq_job(store, "by-rq").latest_result())
    assert result.return_value["choices"][0]["text"] == "ab"


def test_a_take_whose_answer_was_lost_is_found_by_the_heartbeat(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker()
    # Taken in the worker's name, by somebody else: the store thinks it runs there, the worker never heard of it.
    os.kill(worker.process.pid, signal.SIGSTOP)
    stream = node.submit(script("a", "b"))
    Scripts(store.client).take(worker.name, 1, 64, "scripted", "scripted-1", b"{}", 1000, b"{}")
    os.kill(worker.process.pid, signal.SIGCONT)
    assert stream.read(timeout=20).text == "ab"
    assert len({name.a for name in stream.names}) >= 2


def test_an_overtaken_lane_is_refused_by_the_log_and_dropped(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(SLOW)
    stream.read(lambda stream: stream.tokens)
    wait_for(lambda: node.busy() == 1)

    store.client.eval(
        """local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1][1]
        local a, s = string.match(top, '(%d+)-(%d+)')
        a = string.format('%.0f', a + 5)
        redis.call('XADD', KEYS[1], a .. '-' .. string.format('%.0f', s + 1), 'f', '[{"k":"take","worker":"other"}]')
        redis.call('HSET', KEYS[2], 'a', a, 'owner', 'other')""",
        *(2, keys.log(stream.job.id), keys.job(stream.job.id)),
    )
    wait_for(lambda: node.busy() == 0)
    last = store.client.xrevrange(keys.log(stream.job.id), count=1)[0]
    assert b'"worker":"other"' in last[1][b"f"], "the old owner wrote after the take"


def test_a_cancel_is_heard_after_the_subscription_was_killed(store: Store, start_worker: Start, node: Node) -> None:
    """FB-021's kind: the command thread survives a broken subscription."""
    start_worker()
    store.client.client_kill_filter(_type="pubsub")
    stream = node.submit(SLOW)
    stream.read(lambda stream: stream.tokens)
    store.client.client_kill_filter(_type="pubsub")
    stream.hang_up()
    wait_for(lambda: node.busy() == 0, 2)


def test_cut_connections_cost_no_token(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    words = [f"w{i} " for i in range(60)]
    streams = [node.submit(script(*words, delay_ms=25)) for _ in range(4)]
    for cut in (5, 20, 40):
        streams[0].read(lambda stream, cut=cut: len(stream.tokens) >= cut)
        store.client.client_kill_filter(_type="normal", skipme=True)
    for stream in streams:
        assert stream.read().text == "".join(words)
        assert stream.tokens == [512 + i for i in range(60)] + [257]


def test_a_full_store_lets_running_streams_finish(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script("x", repeat=60, delay_ms=20))
    stream.read(lambda stream: stream.tokens)
    store.client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable):
            node.submit(script("y"))
        assert stream.read().text == "x" * 60
        assert stream.finish == "stop"
    finally:
        store.client.config_set("maxmemory", "0")
        store.client.delete("sluice:full")  # the scripts know it for a second


#: What is kept of models and tenants, not of requests, and who looks after them.
BOOKS = (b"sluice:alone:", b"sluice:bell", b"sluice:full", b"sluice:pace:", b"sluice:served:", b"sluice:sweep")


def test_nothing_is_left_of_ended_requests_but_log_and_result(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker()
    before = set(store.client.keys("*"))
    streams = [node.submit(script("a", "b")).read() for _ in range(5)]
    wait_for(lambda: not store.client.exists(keys.lanes(worker.name)))
    wait_for(lambda: not store.client.exists(keys.attached(node.gateway.proc)))
    wait_for(lambda: not store.client.exists(keys.UNKEPT), 30)  # of a worker that an earlier test has killed
    new = set(store.client.keys("*")) - before
    ids = {stream.job.id.encode() for stream in streams}
    left = [key for key in new if not any(job_id in key for job_id in ids)]
    assert not [key for key in left if not key.startswith((b"rq:", *BOOKS))], left
    for key in new:
        if any(job_id in key for job_id in ids):
            assert store.client.ttl(key) > 0, key


def test_every_delta_was_logged_before_it_was_published(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script("x", repeat=20, delay_ms=5))
    seen = 0
    while not stream.ended:
        stream.read(lambda stream, seen=seen: len(stream.frames) > seen)
        seen = len(stream.frames)
        top = store.client.xrevrange(keys.log(stream.job.id), count=1)[0][0].decode()
        assert int(top.split("-")[1]) >= stream.names[-1].s
    assert sum(isinstance(frame, Delta) for frame in stream.frames) == 21


def test_scripts_are_loaded_again_by_a_store_that_forgot_them(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    node.submit(script("a")).read()
    store.client.script_flush()
    assert node.submit(script("a", "b")).read().text == "ab"


def test_a_worker_that_the_store_forgot_goes_on_under_a_new_name(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker()
    node.submit(script("a")).read()
    store.client.srem(keys.WORKERS, worker.name)
    wait_for(lambda: [name for name in store.client.smembers(keys.WORKERS) if name.startswith(worker.name.encode())])
    assert not store.client.sismember(keys.WORKERS, worker.name)
    wait_for(lambda: node.gateway.status()["workers"])
    stream = node.submit(script("a", "b")).read()
    assert stream.text == "ab"
    stream = node.submit(SLOW)
    stream.read(lambda stream: stream.tokens)
    stream.hang_up()  # the new name has its control channel
    wait_for(lambda: node.busy() == 0, 2)
    worker.stop()


def test_a_request_waits_for_a_worker_that_something_starts_but_not_for_ever(
    store: Store, start_worker: Start, node: Node
) -> None:
    first = start_worker()
    node.submit(script("a")).read()
    first.kill()
    store.client.delete(keys.lease(first.name))
    store.client.set(keys.starter("scripted"), "1", ex=60)
    wait_for(lambda: not node.gateway.status()["workers"])
    stream = node.submit(script("a", "b"))
    start_worker()
    assert stream.read().text == "ab"
    late = node.submit(SLOW)
    late.read(lambda stream: stream.tokens)
    late.hang_up()


def test_no_worker_in_time_is_told_so(store: Store, node: Node) -> None:
    node.settings.cold_start_s = 1.0
    store.client.set(keys.starter("scripted"), "1", ex=60)
    wait_for(lambda: not node.gateway.status()["workers"])
    stream = node.submit(script("a")).read(timeout=15)
    assert stream.error is not None and stream.error["code"] == "no_worker"
    store.client.delete(keys.starter("scripted"))


def test_rqs_cancel_reaches_waiting_and_running_requests(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    running = node.submit(SLOW)
    running.read(lambda stream: stream.tokens)
    waiting = node.submit(SLOW)
    for stream in (waiting, running):
        rq_job(store, stream.job.id).cancel()
        stream.read(timeout=20)
        assert stream.error is not None and stream.error["code"] == "cancelled"
    wait_for(lambda: node.busy() == 0)


def test_a_stream_whose_log_has_expired_ends_with_log_lost(store: Store, start_worker: Start, node: Node) -> None:
    """The client reads nothing while 1,500 frames come, more than is kept for it, and then the log is gone."""
    start_worker()
    stream = node.submit(script("x", repeat=1500, delay_ms=3))
    wait_for(lambda: store.client.hget(keys.job(stream.job.id), "terminal"), 30)
    store.client.delete(keys.log(stream.job.id))
    with pytest.raises(LogLost):
        stream.read(timeout=40)
    assert 0 < len(stream.text) < 1500


def test_a_request_that_waits_for_lanes_keeps_its_turn(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=2)
    runs = script("r", repeat=25, delay_ms=20)
    first = node.submit(runs)
    first.read(lambda stream: stream.tokens)
    wide = node.submit(script("w"), tenant="a", n=2)
    late = [node.submit(script("l"), tenant="b") for _ in range(3)]
    for stream in (first, wide, *late):
        stream.read()
    taken = [stream.names[0].a for stream in (wide, *late)]
    assert taken == sorted(taken)


def test_special_tokens_have_no_text_unless_asked_for(start_worker: Start, node: Node) -> None:
    """Pieces of a script are text whatever they look like; ids 256 to 511 are special."""
    start_worker()
    prompt = script(prefer_ids=[300])
    hidden, shown = (
        node.submit(prompt, max_tokens=2).read(),
        node.submit(prompt, max_tokens=2, skip_special=False).read(),
    )
    assert (hidden.text, hidden.tokens, shown.text) == ("", [300, 300], "<|300|>" * 2)
    assert node.submit(script("<|300|>", "<think>"), max_tokens=2).read().text == "<|300|><think>"
