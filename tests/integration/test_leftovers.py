"""What is left of requests and workers: nothing waits for ever, nothing stays listed in RQ's books."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest

from api.gateway import GONE
from shared import keys, results
from shared.frames import Delta, End, Frame, Name, Start, decode_entry, encode_frame, first_seq
from shared.jobs import Job
from shared.reaper import LATE, NONE_CAME, NOT_LOADED, NOT_TAKEN_UP, ORPHANED, REAPED, Reaper
from shared.scripts import UNKEPT_MS, Scripts, Taken
from shared.settings import Settings
from tests.conftest import Node, Store, Worker, script, wait_for
from workers.emitter import ENTRY_BYTES, Emitter
from workers.engine_loop import EngineLoop
from workers.engines.scripted import ScriptedEngine
from workers.lane import Lane, PromptIds
from workers.lane_worker import LaneWorker

MODEL = "m"


@pytest.fixture
def scripts(store: Store) -> Scripts:
    store.client.flushall()
    return Scripts(store.client)


def submit(scripts: Scripts, job_id: str, key: tuple[str, str] = ("", "")) -> Any:
    return scripts.call(
        *("submit", job_id, "", "t", "interactive", MODEL, 60_000, 60, 60, 1, "", b"", "completion", "", ""),
        *("", 0, *key, 1, "0 0 0"),  # no view, no grace, no limits
    )


#: What a worker says of itself with nothing to do.
IDLE = {"lanes": 4, "free": 4, "draining": 0, "pid": 1, "tokens_per_second": 0.0}


def live(store: Store, worker: str, fingerprint: str) -> None:
    Scripts(store.client).beat("worker", worker, 60_000, register=True)
    store.client.hset(keys.stat(worker), mapping={"model": MODEL, "fp": fingerprint, **IDLE})


def take(scripts: Scripts, worker: str, fingerprint: str) -> list[str]:
    return [job.id for job in scripts.take(worker, 4, 4, MODEL, fingerprint, LATE, 60_000, NONE_CAME).jobs]


def sweep(store: Store, scripts: Scripts, cold_start_ms: int = 0) -> int:
    store.client.delete("sluice:sweep")
    frames = {"late": LATE, "no_worker": NONE_CAME, "lost": NOT_TAKEN_UP, "not_loaded": NOT_LOADED}
    return len(scripts.sweep(cold_start_ms, **frames, most=100, batch_age_ms=600_000).ended)


def test_begun_with_other_numbers(store: Store, scripts: Scripts) -> None:
    """What was begun with numbers that no worker has any more ends, though the model has workers."""
    live(store, "old", "fp1")
    live(store, "new", "fp2")
    submit(scripts, "j1")
    assert take(scripts, "old", "fp1") == ["j1"]
    scripts.reap("old", "killed", proven=True, frames=REAPED)
    store.client.hset(keys.job("j1"), "queued", 1)  # long ago
    assert take(scripts, "new", "fp2") == []
    assert sweep(store, scripts, 1000) == 1
    assert b"worker_lost" in store.client.xrevrange(keys.log("j1"), count=1)[0][1][b"f"]


def test_not_yet_taken(store: Store, scripts: Scripts) -> None:
    """A request that was never begun waits for whoever has the model."""
    live(store, "new", "fp2")
    submit(scripts, "j1")
    store.client.hset(keys.job("j1"), "queued", 1)
    assert sweep(store, scripts, 1000) == 0
    assert not store.client.exists(keys.log("j1"))


def test_rq_lists_the_queue_of_what_goes_on(store: Store, scripts: Scripts) -> None:
    """The tenant's queue is listed again once a request that waited to go on is running."""
    live(store, "w1", "fp")
    live(store, "w2", "fp")
    submit(scripts, "j1")
    take(scripts, "w1", "fp")
    scripts.reap("w1", "killed", proven=True, frames=REAPED)
    sweep(store, scripts, 60_000)
    queue = f"{MODEL}:interactive:t"
    assert not store.client.sismember(keys.RQ_QUEUES, keys.queue(queue))
    assert not store.client.exists(f"rq:workers:{queue}")  # nobody would ever take its workers off
    take(scripts, "w2", "fp")
    assert store.client.sismember(keys.RQ_QUEUES, keys.queue(queue))
    frames = [frame for _, entry in store.client.xrange(keys.log("j1")) for frame in decode_entry(entry[b"f"])]
    assert len(frames) == 2


def test_a_worker_that_leaves(store: Store, scripts: Scripts) -> None:
    """RQ forgets it too, even if it dies before it can tell RQ."""
    live(store, "w1", "fp")
    store.client.sadd("rq:workers", "rq:worker:w1")
    scripts.leave("worker", "w1")
    assert not store.client.sismember("rq:workers", "rq:worker:w1")


def test_what_a_worker_that_leaves_still_has(store: Store, scripts: Scripts) -> None:
    """The store was away when it was to be told of it: what runs goes on elsewhere, what has ended is booked out."""
    live(store, "w1", "fp")
    live(store, "w2", "fp")
    submit(scripts, "runs")
    submit(scripts, "ended")
    assert take(scripts, "w1", "fp") == ["runs", "ended"]
    scripts.end("ended", "client", LATE, "failed")
    scripts.leave("worker", "w1")
    assert not store.client.exists(keys.lanes("w1"))
    assert take(scripts, "w2", "fp") == ["runs"]
    assert store.client.hget(keys.job("runs"), "kills") == b"0"


def ended_by(scripts: Scripts, worker: str, job_id: str) -> str:
    """A request that a worker has taken and ended, and not booked yet; its attempt."""
    submit(scripts, job_id)
    [taken] = scripts.take(worker, 1, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
    end = encode_frame(End({"completion_tokens": 0}))
    won, _ = scripts.end(job_id, worker, end, "finished", attempt=taken.name.a)
    assert won == 1
    return str(taken.name.a)


def result(store: Store, job_id: str) -> tuple[bytes, type[Frame]]:
    """Who kept the one result of a request, and its last frame."""
    [(_, fields)] = store.client.xrange(keys.results(job_id))
    return fields[b"worker_name"], type(results.read([(b"", fields)])[-1])


def test_what_has_ended_and_nobody_keeps(store: Store, scripts: Scripts) -> None:
    """Who ended it died before it kept the result, or left while the store took none: a reaper does, once."""
    live(store, "w1", "fp")
    ended_by(scripts, "w1", "open")
    ended_by(scripts, "w1", "kept")
    ended_by(scripts, "w1", "gone")
    ended_by(scripts, "w1", "odd")
    results.keep(store.client, ["kept"], worker="w1")
    store.client.delete(keys.log("gone"))
    store.client.set(keys.results("odd"), "text")
    scripts.leave("worker", "w1")
    assert set(store.client.zrange(keys.UNKEPT, 0, -1)) == {b"open", b"gone", b"odd"}
    reaper = Reaper(store.client, Settings())
    reaper.look()
    assert store.client.zcard(keys.UNKEPT) == 3, "they have some time"
    for job_id in store.client.zrange(keys.UNKEPT, 0, -1):
        store.client.zincrby(keys.UNKEPT, -UNKEPT_MS, job_id)
    store.client.delete("sluice:sweep")
    Reaper(store.client, Settings()).look()
    assert result(store, "open") == (b"", End) and result(store, "kept") == (b"w1", End)
    assert not store.client.exists(keys.UNKEPT) and not store.client.exists(keys.results("gone"))


def test_results_are_kept_in_a_full_store(store: Store, scripts: Scripts) -> None:
    live(store, "w1", "fp")
    ended_by(scripts, "w1", "j1")
    store.client.config_set("maxmemory", "1mb")
    try:
        results.keep(store.client, ["j1"])
    finally:
        store.client.config_set("maxmemory", "0")
    assert result(store, "j1") == (b"", End)


def test_an_end_that_the_store_has_lost_is_not_booked(store: Store, scripts: Scripts) -> None:
    """Else nobody would ever end the request again: the worker looks for it among what the store thinks it runs."""
    live(store, "w1", "fp")
    a = int(ended_by(scripts, "w1", "j1"))
    store.client.hdel(keys.job("j1"), "terminal")  # as after a restart
    store.client.hset(keys.job("j1"), mapping={"a": a, "status": "started"})
    scripts.book("w1", "j1", a)
    assert store.client.hkeys(keys.lanes("w1")) == [b"j1"]
    store.client.hset(keys.job("j1"), "terminal", "w1")
    scripts.book("w1", "j1", a)
    assert not store.client.exists(keys.lanes("w1"))


def test_what_runs_long_after_its_deadline(store: Store, scripts: Scripts) -> None:
    """Nobody has it any more, whatever became of its worker's list: it ends, and RQ does not count it for ever."""
    live(store, "w1", "fp")
    for job_id in ("lost", "gone"):
        submit(scripts, job_id)
    assert take(scripts, "w1", "fp") == ["lost", "gone"]
    store.client.delete(keys.lanes("w1"))
    store.client.set(keys.job("gone"), "something else")
    wip = f"rq:wip:{MODEL}:interactive:t"
    assert sweep(store, scripts, 60_000) == 0
    for entry in (*store.client.zrange(wip, 0, -1), "somebody:b0ae"):
        store.client.zadd(wip, {entry: 1})
    assert sweep(store, scripts, 60_000) == 1
    assert store.client.hmget(keys.job("lost"), "terminal", "status") == [b"deadline", b"failed"]
    assert store.client.zrange(wip, 0, -1) == [b"somebody:b0ae"], "which is another one's"


def test_a_tenants_count_has_its_time(store: Store, scripts: Scripts) -> None:
    submit(scripts, "j1")
    assert store.client.ttl(keys.served(MODEL, "interactive")) > 0


def test_a_stopped_request_frees_its_key(store: Store, scripts: Scripts) -> None:
    submit(scripts, "j1", ("k", "the body"))
    scripts.end("j1", "rq", LATE, "stopped")
    assert submit(scripts, "j2", ("k", "the body"))[0] == b"ok"


def test_one_dead_process_keeps_nobody_from_burying_the_others(store: Store, scripts: Scripts) -> None:
    submit(scripts, "j1")
    for name in ("a", "b", "odd", "y", "z"):
        live(store, name, "fp")
    assert take(scripts, "z", "fp") == ["j1"]
    store.client.set(keys.lanes("odd"), "text")
    store.client.delete(*(keys.lease(name) for name in ("a", "b", "odd", "y", "z")))
    now = [0.0]
    reaper = Reaper(store.client, Settings(), clock=lambda: now[0])
    for _ in range(6):
        reaper.look()
        now[0] += 1.0
    assert store.client.smembers(keys.WORKERS) == {b"odd"}
    assert store.client.hget(keys.job("j1"), "status") == b"queued"


def follow(store: Store, scripts: Scripts, proc: str, *ids: str) -> None:
    scripts.beat("proc", proc, 60_000, register=True)
    for job_id in ids:
        if not store.client.exists(keys.job(job_id)):
            submit(scripts, job_id)
        scripts.attach_again(job_id, proc)


def test_what_a_dead_process_followed_ends_one_by_one(store: Store, scripts: Scripts) -> None:
    follow(store, scripts, "p1", *(f"j{number}" for number in range(9)))
    store.client.hset(keys.job("j4"), "home", "odd")
    store.client.set(keys.attached("odd"), "text")
    store.client.delete(keys.alive("p1"))
    scripts.reap_proc("p1", ORPHANED)
    ended = [store.client.hget(keys.job(f"j{number}"), "status") for number in range(9)]
    assert ended == [b"canceled"] * 9 and not store.client.exists(keys.attached("p1"))


def test_what_a_process_that_leaves_still_follows(store: Store, scripts: Scripts) -> None:
    """The store did not hear that it let go: nobody else ever would."""
    follow(store, scripts, "p1", "alone", "shared")
    follow(store, scripts, "p2", "shared")
    scripts.leave("proc", "p1", GONE)
    assert store.client.hget(keys.job("alone"), "status") == b"canceled"
    assert store.client.hget(keys.job("shared"), "status") == b"queued"
    assert not store.client.exists(keys.attached("p1"))


def test_free_lanes_are_counted_as_requests_need_them(
    store: Store, start_worker: Callable[..., Worker], node: Node
) -> None:
    """Also those of what is only being prepared."""
    worker = start_worker(lanes=4)
    stream = node.submit(script("a ", repeat=0, delay_ms=30), n=3)
    stream.read(lambda stream: stream.tokens)
    wait_for(lambda: store.client.hget(keys.stat(worker.name), "free") == b"1")
    stream.hang_up()
    loop = EngineLoop(ScriptedEngine(4), lambda done, what: None)
    loop.start()
    own = LaneWorker(loop, loop.wait_loaded(), node.settings, store.url, name="own")
    for needs, free in ((b"3", 1), (b"9", 0), (b"odd", 3)):
        own._taker.preparing["j"] = Taken("j", Name(1, 1), 1.0, [], {b"needs": needs})
        assert own._free_lanes() == free
    loop.stop()


def test_a_worker_that_rq_has_lost(store: Store, start_worker: Callable[..., Worker]) -> None:
    worker = start_worker()
    store.client.delete(f"rq:worker:{worker.name}")
    store.client.srem("rq:workers", f"rq:worker:{worker.name}")
    wait_for(lambda: store.client.hexists(f"rq:worker:{worker.name}", "birth"))
    wait_for(lambda: store.client.sismember("rq:workers", f"rq:worker:{worker.name}"))


def test_a_request_that_the_store_has_lost(store: Store, start_worker: Callable[..., Worker], node: Node) -> None:
    """The worker that runs it puts it back, also where it looks at its lanes first."""
    start_worker()
    stream = node.submit(script("a", "b", "c", delay_ms=1500))
    stream.read(lambda stream: stream.text)
    job = stream.job.id
    with store.client.pipeline() as restart:  # at once, as a restart does: nobody writes on an old connection behind it
        restart.delete(keys.job(job), keys.log(job))
        for kind in ("pubsub", "normal"):
            restart.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        assert all(restart.execute())
    stream.read()
    assert (stream.text, stream.finish) == ("abc", "stop")


def put_back(scripts: Scripts, worker: str, taken: Taken, a: int) -> None:
    """A lane that runs as attempt `a` what it was given."""
    fields = [part for pair in taken.fields.items() for part in pair]
    entry = f'[{{"k":"take","worker":"{worker}"}}]'
    scripts.call("put_back", taken.id, a, worker, "", "", len(fields), *fields, f"{a}-2", entry)


def logged(store: Store, job_id: str) -> tuple[list[int], list[Frame]]:
    """Numbers and frames of a log."""
    numbers, told = list[int](), list[Frame]()
    for name, fields in store.client.xrange(keys.log(job_id)):
        entry = decode_entry(fields[b"f"])
        last = Name.parse(name.decode())
        numbers += range(first_seq(last, entry), last.s + 1)
        told += entry
    return numbers, told


def test_a_lost_request_comes_back_before_its_next_token(
    store: Store, start_worker: Callable[..., Worker], node: Node
) -> None:
    """Which may be long in coming; meanwhile its client would be told that the store has it no longer."""
    start_worker()
    stream = node.submit(script("a", "b", hang_after=1))
    stream.read(lambda stream: stream.text)
    with store.client.pipeline() as restart:
        restart.delete(keys.job(stream.job.id), keys.log(stream.job.id))
        restart.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        assert all(restart.execute())
    wait_for(lambda: store.client.exists(keys.job(stream.job.id)), 20)
    assert logged(store, stream.job.id) == ([1, 2, 3], stream.frames)
    stream.hang_up()


def test_a_request_ends_whatever_lies_where_its_keys_belong(store: Store, scripts: Scripts) -> None:
    live(store, "w1", "fp")
    submit(scripts, "j1", ("k", "the body"))
    [taken] = scripts.take("w1", 1, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
    for key in ("rq:executions:j1", keys.idempotency("t", "k"), f"rq:canceled:{MODEL}:interactive:t"):
        store.client.delete(key)
        store.client.lpush(key, "something else")
    assert scripts.end("j1", "cancel", LATE, "canceled")[0] == 1
    assert store.client.hmget(keys.job("j1"), "terminal", "status") == [b"cancel", b"canceled"]
    assert store.client.xlen(keys.log("j1")) == 2
    scripts.book("w1", "j1", taken.name.a)
    assert not store.client.exists(keys.lanes("w1"))


def test_the_key_of_a_request_that_the_store_has_lost(store: Store, scripts: Scripts) -> None:
    """It comes back with the request, unless it is somebody else's by then."""
    live(store, "w1", "fp")

    def lost_and_put_back(job_id: str, meanwhile: str = "") -> None:
        submit(scripts, job_id, ("k", "the body"))
        [taken] = scripts.take("w1", 1, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
        store.client.delete(keys.job(job_id), keys.log(job_id), keys.idempotency("t", "k"))
        if meanwhile:
            assert submit(scripts, meanwhile, ("k", "the body"))[0] == b"ok"
        fields = [part for pair in taken.fields.items() for part in pair]
        entry = (str(taken.name), b'[{"k":"take","worker":"w1"}]')
        head = ("put_back", job_id, taken.name.a, "w1", "", "", len(fields))
        assert scripts.call(*head, *fields, *entry)[0] == b"ok"

    lost_and_put_back("j1")
    assert submit(scripts, "j2", ("k", "the body")) == [b"same", b"j1"]
    assert submit(scripts, "j2", ("k", "another body")) == [b"conflict"]
    assert 86_000 < store.client.ttl(keys.idempotency("t", "k")) <= 86_400
    scripts.end("j1", "cancel", LATE, "canceled")
    lost_and_put_back("j3", meanwhile="j4")
    assert submit(scripts, "j5", ("k", "the body")) == [b"same", b"j4"]
    scripts.end("j3", "cancel", LATE, "canceled")
    assert store.client.get(keys.idempotency("t", "k")) == b"j4 the body"


def test_an_attempt_that_the_store_has_lost(store: Store, scripts: Scripts) -> None:
    """What RQ lists of the attempt before it goes when the later one is put back."""
    live(store, "w1", "fp")
    submit(scripts, "j1")
    [first] = scripts.take("w1", 4, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
    later = first.name.a + 5  # of a hand-over and a take that the store has lost
    put_back(scripts, "w1", first, later)
    queue = f"{MODEL}:interactive:t"
    assert store.client.zrange(f"rq:wip:{queue}", 0, -1) == [f"j1:{later}".encode()]
    assert store.client.zrange("rq:executions:j1", 0, -1) == [str(later).encode()]


def test_a_take_that_the_store_has_lost(store: Store, scripts: Scripts) -> None:
    """What the take had written comes back with the job: handed over later, it waits where workers with its numbers look."""
    live(store, "w1", "fp")
    live(store, "w2", "fp")
    submit(scripts, "j1")
    before = store.client.hgetall(keys.job("j1"))
    [taken] = scripts.take("w1", 4, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
    store.client.delete(keys.job("j1"), keys.log("j1"), keys.lanes("w1"))
    store.client.hset(keys.job("j1"), mapping=before)
    put_back(scripts, "w1", taken, taken.name.a)
    assert scripts.release("w1", "j1", taken.name.a)
    assert take(scripts, "w2", "fp") == ["j1"]


def test_a_lane_of_a_retired_name(store: Store, scripts: Scripts) -> None:
    """It is not put back under the name that the worker has by then: nobody would run it."""
    live(store, "new", "fp")
    job = Job(id="j1", model=MODEL, prompts=["p"], seed=1, created=1)
    lane = Lane(job, Name(5, 1), [PromptIds([1], 9)], fields={b"owner": b"old", b"status": b"started"})
    lane.outbox.append((Start(1),))
    over: queue.SimpleQueue[tuple[Lane, bool]] = queue.SimpleQueue()
    emitter = Emitter(store.url, lambda: "new", lambda lane, won: over.put((lane, won)))
    emitter.start()
    emitter.notify([lane])
    assert over.get(timeout=10) == (lane, False)
    emitter.stop()
    emitter.join(10)
    assert not store.client.exists(keys.job("j1"))


def test_a_worker_that_slept_until_its_request_was_forgotten(store: Store, scripts: Scripts) -> None:
    """Its connection is still open, and its next entry the first thing that it does: it makes no log of it."""
    live(store, "w1", "fp")
    submit(scripts, "j1")
    [taken] = scripts.take("w1", 4, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
    job = Job(id="j1", model=MODEL, prompts=["p"], seed=1, created=1)
    lane = Lane(job, taken.name, [PromptIds([1], 9)], fields=taken.fields)
    over: queue.SimpleQueue[tuple[Lane, bool]] = queue.SimpleQueue()
    emitter = Emitter(store.url, lambda: "w1", lambda lane, won: over.put((lane, won)))
    emitter.start()
    lane.outbox.append((Start(1),))
    emitter.notify([lane])
    wait_for(lambda: store.client.xlen(keys.log("j1")) == 2)
    scripts.reap("w1", "slept", proven=True, frames=REAPED)
    scripts.end("j1", "client", LATE, "failed")
    store.client.delete(keys.job("j1"), keys.log("j1"))  # their time was over
    lane.outbox.append((Delta(0, [7], "a"),))
    emitter.notify([lane])
    assert over.get(timeout=10) == (lane, False)
    emitter.stop()
    emitter.join(10)
    assert not store.client.exists(keys.job("j1"), keys.log("j1"))


def test_what_has_piled_up_goes_in_entries_of_bounded_size(store: Store, scripts: Scripts) -> None:
    """Of a lane whose store was away: whoever reads its log gets no more at once than it can ask for."""
    live(store, "w1", "fp")
    submit(scripts, "j1")
    [taken] = scripts.take("w1", 4, 4, MODEL, "fp", LATE, 60_000, NONE_CAME).jobs
    job = Job(id="j1", model=MODEL, prompts=["p"], seed=1, created=1)
    lane = Lane(job, taken.name, [PromptIds([1], 9)], fields=taken.fields)
    deltas = [(Delta(0, [512], "x" * 10_000),) for _ in range(40)]
    lane.outbox.extend(deltas)
    emitter = Emitter(store.url, lambda: "w1", lambda lane, won: None)
    emitter.start()
    emitter.notify([lane])
    wait_for(lambda: not lane.outbox and lane.inflight is None)
    emitter.stop()
    emitter.join(10)
    log = store.client.xrange(keys.log("j1"))
    assert max(len(fields[b"f"]) for _, fields in log) < ENTRY_BYTES + 20_000
    assert [frame for _, fields in log for frame in decode_entry(fields[b"f"])][1:] == [delta for (delta,) in deltas]
    assert log[-1][0].decode() == f"{taken.name.a}-41"


def at_work(store: Store) -> set[bytes]:
    found: set[bytes] = store.client.smembers(keys.work(MODEL))
    return found


def test_what_waits_or_runs_is_counted_and_nothing_else(store: Store, scripts: Scripts) -> None:
    """Autoscalers read it: too many would keep workers, too few would end one that has work."""
    live(store, "w1", "fp")
    store.client.sadd(keys.CARDS, MODEL)
    for job_id in ("j1", "j2", "j3"):
        submit(scripts, job_id)
    assert at_work(store) == {b"j1", b"j2", b"j3"}
    ended_by(scripts, "w1", "j1")
    assert at_work(store) == {b"j2", b"j3"}
    scripts.end("j2", "cancel", GONE, "canceled")
    assert at_work(store) == {b"j3"}
    store.client.srem(keys.work(MODEL), "j3")
    store.client.sadd(keys.work(MODEL), "deleted", "j1")
    sweep(store, scripts, 60_000)
    assert at_work(store) == {b"j3"}, "what was lost or left over is put right"
    ended_by(scripts, "w1", "j3")
    assert not store.client.exists(keys.work(MODEL))


def test_a_long_wait_counts_from_when_the_last_worker_went(store: Store, scripts: Scripts) -> None:
    live(store, "w1", "fp")
    store.client.sadd(keys.CARDS, MODEL)
    submit(scripts, "j1")
    store.client.hset(keys.job("j1"), "queued", 1)
    sweep(store, scripts, 60_000)
    scripts.leave("worker", "w1")
    assert sweep(store, scripts, 60_000) == 0
    store.client.incrby(f"sluice:alone:{MODEL}", -60_001)
    assert sweep(store, scripts, 60_000) == 1


def test_who_waits_for_a_model_that_cannot_be_loaded_is_told(store: Store, scripts: Scripts) -> None:
    store.client.sadd(keys.CARDS, MODEL)
    submit(scripts, "j1")
    store.client.set(keys.starter(MODEL), "up a", ex=60)
    assert sweep(store, scripts, 60_000) == 0
    store.client.set(keys.starter(MODEL), "failed a", ex=60)
    live(store, "w1", "fp")
    assert sweep(store, scripts, 60_000) == 0, "another machine can"
    scripts.leave("worker", "w1")
    assert sweep(store, scripts, 60_000) == 1
    assert b"cannot be loaded" in store.client.xrevrange(keys.log("j1"), count=1)[0][1][b"f"]


def test_the_load_of_a_dead_worker_is_not_told(store: Store, scripts: Scripts) -> None:
    submit(scripts, "j1")
    scripts.loading("w1", MODEL, 40)
    scripts.loading("w2", MODEL, 70)
    place = scripts.place("j1")
    assert place is not None and (place.position, place.served, place.loading) == (1, False, 70)
    store.client.hset(keys.loading(MODEL), "w2", "70 1")  # long ago
    place = scripts.place("j1")
    assert place is not None and place.loading == 40
    scripts.loading("w1", MODEL, None)
    place = scripts.place("j1")
    assert place is not None and place.loading is None
    scripts.loading("w1", MODEL, 99)
    live(store, "w3", "fp")
    place = scripts.place("j1")
    assert place is not None and place.served and place.loading is None, "the queue is what counts"
