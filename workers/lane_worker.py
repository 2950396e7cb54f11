"""The RQ worker that runs many jobs at once on one engine.

To RQ and its tools it is a worker like any other: registered, listening to a queue, with executions, results and
counters. Inside, jobs are lanes: the taker brings them, the engine's thread runs them, the emitter writes what they
say, a finaliser books them out. This file wires the threads and keeps the list of lanes.

Not used of RQ: forking, death penalties (a deadline in the engine's loop instead; signals cannot hit one lane),
its dequeueing, and its registry cleaning, which would fail running jobs.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import redis
import structlog
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty
from rq.worker import SimpleWorker, WorkerStatus

from shared import cards, connection, keys, results, scripts
from shared.cards import ModelCard
from shared.counts import Counts
from shared.errors import Cancelled
from shared.frames import End, Error
from shared.reaper import Reaper, reap_worker
from shared.scripts import Scripts
from shared.settings import Settings
from shared.tracing import make_tracer
from workers.attempts import Attempts
from workers.control import Control
from workers.emitter import Emitter
from workers.engine_loop import EngineLoop
from workers.lane import Lane
from workers.preemption import Preemption
from workers.taker import Taker

log = structlog.get_logger(__name__)

#: Seconds between two renewals of the lease.
BEAT = 2.0
#: Seconds between two looks at the figures that others see.
STAT = 0.25
#: Seconds that figures stay readable.
STAT_TTL = 30
#: Lanes booked out in one round trip, at most.
BOOKED_AT_ONCE = 64
#: How long an ended lane is kept, s: if the store comes back without its end, the lane puts it back.
KEPT = 30.0
#: How long a dying process tries to give back what it ran, s.
LAST_WORDS = 2.0
#: Longest wait at the end for what is still to be written, s.
FLUSH = 5.0


class _Rate:
    """How fast a count grows, between two measurements."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._seen, self._at = count, count(), time.monotonic()
        self.per_second = 0.0

    def measure(self) -> None:
        count, now = self._count(), time.monotonic()
        self.per_second = round((count - self._seen) / max(now - self._at, 0.1), 1)
        self._seen, self._at = count, now


class NoDeathPenalty(BaseDeathPenalty):
    """Deadlines are kept in the engine's loop; an exception thrown into a thread would hit every lane."""

    def setup_death_penalty(self) -> None: ...

    def cancel_death_penalty(self) -> None: ...


class LaneWorker(SimpleWorker):
    """`loop` has its model loaded. `tokenizer`: the file that the card's `tokenizer_sha` names. `work()` returns after
    a drain; its result is the process's exit status."""

    death_penalty_class = NoDeathPenalty
    log_result_lifespan = False
    log_job_description = False

    def __init__(
        self,
        loop: EngineLoop,
        card: ModelCard,
        settings: Settings,
        url: str,
        *,
        name: str,
        tokenizer: str | None = None,
    ) -> None:
        store = connection.connect(url, max_connections=8)
        own = Queue(card.id, connection=store, serializer=JSONSerializer)
        super().__init__([own], name=name, connection=store, serializer=JSONSerializer)
        self._store: Any = store
        self._scripts = Scripts(store)
        self._settings = settings
        self._card = card
        self._tokenizer = tokenizer
        self._loop = loop
        self._attempts = Attempts(make_tracer("sluice-worker"), self._name, card.id)
        self._lanes: dict[str, Lane] = {}
        #: Lanes whose end was the request's, and until when they are kept.
        self._ended: dict[str, tuple[Lane, float]] = {}
        self._lock = threading.Lock()
        self._renaming = threading.Lock()
        self._draining = threading.Event()
        self._signalled = 0
        self._over: queue.SimpleQueue[tuple[Lane, bool, str] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._stat: dict[str, Any] = {}
        self._counts = Counts(store)
        #: Of the engine's figures, what was counted.
        self._counted = {"generated_tokens": 0, "out_of_memory": 0}
        self._emitter = Emitter(url, self._name, self._lane_over)
        loop.attach(self._emitter.notify, self.engine_died)
        self._control = Control(
            url, self._name, cancelled=self._cancelled, command=self._rq_command, resubscribed=self._compare_lanes
        )
        self._reaper = Reaper(store, settings)
        self._taker = Taker(
            url,
            self._name,
            card,
            loop.engine,
            timeout_s=settings.request_timeout_s,
            reserve=card.lanes // 16 if settings.batch_reserve is None else settings.batch_reserve,
            free=self._free_lanes,
            accept=self._accept,
            retired=self._retire,
            make_room=Preemption(
                Scripts(store),
                card,
                worker=self._name,
                running=self._running,
                free=self._free_lanes,
                hand_over=loop.hand_over,
            ).make_room,
        )

    def _name(self) -> str:
        return str(self.name)

    # -- life

    def work(self) -> int:  # type: ignore[override]
        """Serves until SIGTERM or SIGINT, then drains. To be called from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.request_stop)
        if self._card.constraints:
            self._taker.warm_up()
        self._beat(register=True)  # first: what RQ books of a worker that dies right after, the reaper takes back
        self.register_birth()  # type: ignore[no-untyped-call]
        self._publish_card()
        finaliser = threading.Thread(target=self._finalise, name="finaliser", daemon=True)
        heartbeat = threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True)
        self._write_stat()
        self._scripts.loading(self.name, self._card.id, None)
        for thread in (self._emitter, finaliser, heartbeat, self._control, self._taker, self._reaper):
            thread.start()
        log.info("worker_ready", worker=self.name, model=self._card.id, lanes=self._card.lanes)
        while not (self._signalled or self._draining.is_set()):
            time.sleep(0.05)
        self._draining.set()
        log.info("worker_stopping", worker=self.name, signal=self._signalled)
        self._reaper.stop()
        self._drain()
        self._done.set()
        heartbeat.join(connection.SOCKET_TIMEOUT)
        self._over.put(None)
        finaliser.join(FLUSH)
        self._tell_counts()
        self._emitter.stop()
        self._control.stop()
        self._leave()
        self._loop.stop()
        self._loop.join(FLUSH)
        self._attempts.close()
        return 0

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: leave at once, as kill -9 would.

        Takes no lock, not even a log's: the main thread may be holding it just now."""
        if self._signalled:
            os._exit(128 + signum)
        self._signalled = signum

    def engine_died(self, error: Exception) -> None:
        """The engine is beyond repair: what runs here can only go on in another process. It gives that back itself, as
        nobody else would before its lease runs out."""
        log.error("worker_dies", worker=self.name, error=str(error))
        why = f"{type(error).__name__}: {error}"
        burial = threading.Thread(target=self._bury, args=(why,), name="burial", daemon=True)
        burial.start()
        burial.join(LAST_WORDS)
        os._exit(70)

    def _bury(self, why: str) -> None:
        try:
            reap_worker(self._store, self.name, why, proven=True)
        except redis.RedisError as error:  # somebody else does it when the lease has run out
            log.warning("burial_failed", error=str(error))

    def _drain(self) -> None:
        self._taker.stop()
        self._taker.join(connection.SOCKET_TIMEOUT)
        self._taker.finish_preparing()
        end = time.monotonic() + self._settings.drain_s
        self._wait_for_lanes(end)
        if self._lanes:
            with self._lock:
                left = list(self._lanes)
            log.info("handing_over", lanes=len(left))
            for job_id in left:
                self._loop.hand_over(job_id)
            self._wait_for_lanes(time.monotonic() + FLUSH)

    def _wait_for_lanes(self, until: float) -> None:
        while self._lanes and time.monotonic() < until:
            self._taker.freed.clear()
            if self._lanes:
                self._taker.freed.wait(0.2)

    def _leave(self) -> None:
        try:
            self._scripts.leave("worker", self.name)
            self.register_death()  # type: ignore[no-untyped-call]
        except redis.RedisError as error:
            log.warning("leave_failed", error=str(error))

    def _publish_card(self) -> None:
        pipeline = self._store.pipeline()
        if self._card.tokenizer_sha is not None and self._tokenizer is not None:
            pipeline.set(keys.tokenizer(self._card.tokenizer_sha), self._tokenizer, nx=True)
        pipeline.hset(keys.card(self._card.id), "card", cards.encode(self._card))
        pipeline.sadd(keys.CARDS, self._card.id)
        pipeline.sadd(keys.RQ_QUEUES, keys.queue(self._card.id))  # `rq info` lists the workers of the queues it knows
        pipeline.execute()

    # -- lanes

    def _free_lanes(self) -> int:
        if self._draining.is_set():
            return 0
        with self._lock:
            running = sum(min(lane.job.choices, self._card.lanes) for lane in self._lanes.values())
            running += sum(min(taken.needs, self._card.lanes) for taken in self._taker.preparing.copy().values())
            return self._card.lanes - running

    def _running(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())

    def _accept(self, lane: Lane) -> None:
        self._attempts.begun(lane)
        with self._lock:
            self._lanes[lane.job.id] = lane
        if lane.terminal is None:
            self._loop.add(lane)
        else:
            self._emitter.notify([lane])

    def _lane_over(self, lane: Lane, won: bool) -> None:
        """The lane has said its last; may be called more than once."""
        with self._lock:
            if self._lanes.get(lane.job.id) is not lane:
                return
            del self._lanes[lane.job.id]
            if won:
                self._ended[lane.job.id] = (lane, time.monotonic() + KEPT)
        self._attempts.over(lane, won)
        self._loop.drop(lane.job.id, lane.attempt)
        self._over.put((lane, won, self.name))
        self._taker.freed.set()

    # -- told from outside

    def _cancelled(self, job_id: str) -> None:
        if self._store.hget(keys.job(job_id), "terminal"):  # anybody may publish
            self._loop.drop(job_id)

    def _rq_command(self, payload: dict[str, Any]) -> None:
        if payload["command"] in ("stop-job", "stop-execution"):
            self._loop.fail(str(payload.get("job_id")), Cancelled("The job was stopped."), "stopped")
        elif payload["command"] == "shutdown":
            self._draining.set()

    def _compare_lanes(self) -> None:
        """Commands may have been missed: drops the lanes whose request has ended, is gone, or has another owner.

        A job that RQ's own `Job.cancel()` or `delete()` took away is ended here. `delete()` leaves the log; where that is
        gone too, the store has lost the request, and gets it back."""
        with self._lock:
            lanes = list(self._lanes.values())
        if not lanes:
            return
        pipeline = self._store.pipeline(transaction=False)
        for lane in lanes:  # the log first: a request that is put back meanwhile must not look like one without a job
            pipeline.exists(keys.log(lane.job.id))
            pipeline.hmget(keys.job(lane.job.id), "terminal", "a", "status")
        answers = [*map(connection.unless_another_type, pipeline.execute(raise_on_error=False))]
        for lane, logged, fields in zip(lanes, answers[::2], answers[1::2], strict=True):
            terminal, attempt, status = fields or (None, None, None)
            if attempt is None:
                over = bool(logged) or fields is None
                if not over:
                    lane.lost = True
                    self._emitter.notify([lane])
            else:
                over = bool(terminal) or not attempt.isdigit() or int(attempt) > lane.attempt
            if over:
                self._loop.drop(lane.job.id, lane.attempt)
            elif status in (b"canceled", b"stopped"):
                self._loop.fail(lane.job.id, Cancelled("The job was cancelled."), "canceled")

    # -- heartbeat and figures

    def _heartbeat(self) -> None:
        next_beat, strays, rate = 0.0, dict[str, str](), _Rate(lambda: self._loop.tokens)
        while not self._done.wait(STAT):
            due = time.monotonic() >= next_beat
            try:
                self._check_stall()
                if due:
                    strays = self._reconcile(self._beat(), strays)
                    next_beat = time.monotonic() + BEAT
                    self._compare_lanes()
                    rate.measure()
                    self._tell_counts()
                self._write_stat(rate.per_second, renew=due)
            except redis.RedisError as error:
                log.warning("heartbeat_failed", error=str(error))
            except Exception:
                log.exception("heartbeat_failed")

    def _check_stall(self) -> None:
        """An engine that gets nowhere while lanes run, in a step or over many, never will: the process is worth nothing. So it
        is when others have taken those lanes over meanwhile."""
        if self._loop.has_lanes and time.monotonic() - self._loop.progressed_at > self._settings.stall_s:
            self.engine_died(TimeoutError(f"no progress for {self._settings.stall_s:g} s"))

    def _beat(self, *, register: bool = False) -> dict[str, str]:
        """Renews the lease; the ids and attempts that the store thinks run here."""
        answer = self._scripts.beat("worker", self.name, int(self._settings.lease_s * 1000), register=register)
        if answer is None:
            self._retire()
            return {}
        return dict(zip(answer[::2], answer[1::2], strict=True))

    def _reconcile(self, theirs: dict[str, str], strays: dict[str, str]) -> dict[str, str]:
        """Gives back what the store thinks runs here and does not, two beats in a row: a take whose answer was lost, or,
        if it had ended here, an end that the store has lost."""
        now = time.monotonic()
        with self._lock:
            mine = {job_id: str(lane.attempt) for job_id, lane in self._lanes.items()}
            self._ended = {job_id: kept for job_id, kept in self._ended.items() if kept[1] > now}
            ended = {job_id: lane for job_id, (lane, _) in self._ended.items()}
        mine |= {job_id: str(taken.name.a) for job_id, taken in self._taker.preparing.copy().items()}
        unknown = {job_id: a for job_id, a in theirs.items() if mine.get(job_id) != a}
        for job_id, a in unknown.items():
            if strays.get(job_id) != a:
                continue
            lane = ended.get(job_id)
            if lane is not None and str(lane.attempt) == a:
                self._end_again(lane)
            else:
                log.warning("stray_job_released", job=job_id, attempt=a)
                self._scripts.release(self.name, job_id, int(a))
        return unknown

    def _end_again(self, lane: Lane) -> None:
        """The store has lost the end of a request, or has not been told that it is booked."""
        with self._lock:
            del self._ended[lane.job.id]
            self._lanes[lane.job.id] = lane
        lane.dropped, lane.epoch = False, -1
        self._emitter.notify([lane])

    def _retire(self) -> None:
        """The store does not know this worker any more: nothing that runs here is its own. Goes on under a new name."""
        lease = int(self._settings.lease_s * 1000)
        with self._renaming:
            if self._draining.is_set():
                return
            if self._scripts.beat("worker", self.name, lease, register=False) is not None:
                return  # another thread has noticed first
            self._rename(lease)

    def _rename(self, lease_ms: int) -> None:
        log.warning("worker_retired", worker=self.name)
        self._scripts.leave("worker", self.name)  # RQ may have heard of it after it was reaped
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            self._loop.drop(lane.job.id, lane.attempt)
        self.name = f"{self.name.split('~')[0]}~{os.urandom(3).hex()}"
        self._scripts.beat("worker", self.name, lease_ms, register=True)
        self._be_born()

    def _be_born(self) -> None:
        """Has RQ list this worker, and all know its model, whatever of it is there already."""
        self._store.delete(self.key)
        self.register_birth()  # type: ignore[no-untyped-call]
        self._publish_card()

    def _tell_counts(self) -> None:
        """By one thread at a time: the heartbeat, and after its end the main thread."""
        for measure, now in (("generated_tokens", self._loop.tokens), ("out_of_memory", self._loop.out_of_memory)):
            if new := now - self._counted[measure]:
                self._counted[measure] = now
                self._counts.add(measure, [self._card.id], new)
        try:
            self._counts.tell()
        except redis.RedisError as error:
            log.warning("counts_not_told", error=str(error))

    def _write_stat(self, tokens_per_second: float = 0.0, *, renew: bool = True) -> None:
        """Writes what others see of this worker, if it has changed; `renew`: also if not, and RQ's heartbeat with it."""
        busy = len(self._lanes)
        state = WorkerStatus.BUSY if busy else WorkerStatus.IDLE
        stat = {
            "model": self._card.id,
            "fp": self._card.fingerprint,
            "lanes": self._card.lanes,
            "draining": int(self._draining.is_set()),
            "pid": os.getpid(),
        }
        stat["free"] = max(0, self._free_lanes())
        stat["tokens_per_second"] = tokens_per_second
        stat["out_of_memory"] = self._loop.out_of_memory
        if stat == self._stat and not renew:
            return
        pipeline = self._store.pipeline(transaction=False)
        pipeline.hexists(self.key, "birth")
        pipeline.hset(keys.stat(self.name), mapping=stat)
        pipeline.expire(keys.stat(self.name), STAT_TTL)
        if self.get_state() != state:
            self.set_state(state, pipeline=pipeline)
        if renew:
            self.heartbeat(pipeline=pipeline)
        born = pipeline.execute()[0]
        self._stat = stat
        if (
            renew and not born and not self._done.is_set()
        ):  # the store was full, or has lost it; the name was valid just now
            self._be_born()

    # -- RQ's books

    def _finalise(self) -> None:
        """Books lanes out until None comes; what lies ready goes in one round trip."""
        last = False
        while not last:
            batch = [self._over.get()]
            while len(batch) < BOOKED_AT_ONCE and not self._over.empty():
                batch.append(self._over.get())
            last = None in batch
            try:
                self._book([item for item in batch if item is not None])
            except Exception:  # the heartbeat books out what is left
                log.exception("booking_failed", lanes=len(batch))

    def _book(self, batch: list[tuple[Lane, bool, str]]) -> None:
        results.keep(self._store, [lane.job.id for lane, won, _ in batch if won], worker=self.name)
        with self._store.pipeline(transaction=False) as pipeline:
            pipeline.script_load(scripts.text("book"))
            for lane, won, name in batch:
                if won:
                    self._count(lane, pipeline)
                pipeline.evalsha(scripts.sha("book"), 0, name, lane.job.id, lane.attempt)
            pipeline.execute()

    def _count(self, lane: Lane, pipeline: Any) -> None:
        """RQ's counters, for the worker whose end was the request's."""
        if isinstance(lane.terminal, End):
            self.increment_successful_job_count(pipeline=pipeline)
            for reason in lane.finish_reasons:
                self._counts.add("finish_reasons", [reason, self._card.id])
        elif isinstance(lane.terminal, Error):
            self.increment_failed_job_count(pipeline=pipeline)

    def clean_registries(self) -> None:
        """Not by workers: RQ fails what it thinks abandoned, and would fail running lanes."""
