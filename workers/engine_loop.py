"""The thread that owns the engine: feeds it jobs, steps it, hands its events to the lanes.

It never talks to Redis and never waits for it: what lanes say goes into their outboxes, and when those are full
the engine pauses. Deadlines are kept here, between steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from shared.cards import ModelCard
from shared.errors import DeadlineExceeded, InternalError, SluiceError
from workers.engines.base import Engine, EngineDied, Progress, Token
from workers.lane import Lane, Outcome

log = structlog.get_logger(__name__)

#: Frames in one lane's outbox beyond which the engine waits for the store. One store takes the frames of all
#: lanes, so all of them pause together.
OUTBOX_LIMIT = 256
#: Longest sleep of an idle loop, s; commands wake it.
IDLE = 0.5


class EngineLoop(threading.Thread):
    """Start it, `wait_loaded`, `attach`; then it takes lanes."""

    def __init__(self, engine: Engine, progress: Progress) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self._progress = progress
        self._lanes: dict[str, Lane] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._loaded = threading.Event()
        self._card: ModelCard | None = None
        self._load_error: Exception | None = None
        #: Tokens sampled since the start.
        self.tokens = 0
        #: When the engine last got somewhere, or had nothing to do (monotonic, s).
        self.progressed_at = time.monotonic()
        self._computed = 0
        #: How often the engine ran out of memory since the start.
        self.out_of_memory = 0

    def attach(self, emit: Callable[[Iterable[Lane]], None], died: Callable[[Exception], None]) -> None:
        """Before the first lane: `emit` gets the lanes that have something to say, after each step; `died` is called,
        once, from the loop's thread, when the engine is beyond repair."""
        self._emit, self._died = emit, died

    # -- from any thread

    def wait_loaded(self) -> ModelCard:
        """The model's card, once it is loaded. Raises what loading raised."""
        while not self._loaded.wait(0.2):  # short waits let the main thread see signals
            pass
        if self._load_error is not None:
            raise self._load_error
        assert self._card is not None
        return self._card

    def add(self, lane: Lane) -> None:
        self._tell(lambda: self._add(lane))

    def drop(self, job_id: str, attempt: int | None = None) -> None:
        """Stops a lane whose request has ended or moved elsewhere; with `attempt`, only that one."""
        self._tell(lambda: self._drop(job_id, attempt))

    def fail(self, job_id: str, error: SluiceError, outcome: Outcome = "failed") -> None:
        """Ends a lane's request with an error."""
        self._tell(lambda: self._fail(job_id, error, outcome))

    def hand_over(self, job_id: str) -> None:
        """Stops a lane here; once what it said is written, another worker goes on with it."""
        self._tell(lambda: self._hand_over(job_id))

    @property
    def has_lanes(self) -> bool:
        """Something runs in the engine, or did when it last got to its commands."""
        return bool(self._lanes)

    def stop(self) -> None:
        """Ends the thread after the step under way and frees the model."""
        self._stopping.set()
        self._wake.set()

    def _tell(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    # -- the thread

    def run(self) -> None:
        try:
            self._card = self.engine.load(self._progress)
        except Exception as error:  # noqa: BLE001 - whatever it is, the main thread raises it
            self._load_error = error
            return
        finally:
            self._loaded.set()
        try:
            while not self._stopping.is_set():
                self._round()
            self.engine.close()
        except Exception as error:
            log.exception("engine_died")
            self._died(error)

    def _round(self) -> None:
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        if not self._lanes:
            self.progressed_at = time.monotonic()
            self._wake.wait(IDLE)
            return
        self._check_deadlines()
        if any(len(lane.outbox) > OUTBOX_LIMIT for lane in self._lanes.values()):
            self.progressed_at = time.monotonic()  # it is the store that is slow
            self._wake.wait(0.01)
            return
        self._step()

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except EngineDied:
            raise
        except Exception:  # a bug of ours: this step's state is unknown, so is every lane's
            log.exception("engine_step_failed")
            self._fail_all(InternalError())
            return
        stats = self.engine.stats()
        self.out_of_memory = stats.out_of_memory
        if events or stats.computed != self._computed:
            self._computed, self.progressed_at = stats.computed, time.monotonic()
        touched: dict[str, Lane] = {}
        for event in events:
            job_id, _, index = event.id.rpartition("/")
            lane = self._lanes.get(job_id)
            if lane is None:
                continue
            touched[job_id] = lane
            self.tokens += isinstance(event, Token)
            try:
                if lane.on_event(int(index), event):
                    self.engine.cancel(event.id)
            except Exception:  # a bug of ours, on one lane: the others go on
                log.exception("lane_failed", job=job_id)
                self._fail(job_id, InternalError(), "failed")
        for lane in touched.values():
            lane.flush()
            if lane.over:
                self._let_go(lane)
        if touched:
            self._emit(touched.values())

    def _add(self, lane: Lane) -> None:
        self._drop(lane.job.id, None)  # an older attempt of the same job: it has been overtaken
        self._lanes[lane.job.id] = lane
        try:
            for request in lane.requests():
                self.engine.add(request)
        except SluiceError as error:
            self._fail(lane.job.id, error, "failed")
        except Exception:  # a bug of ours, on one lane: the others go on
            log.exception("lane_failed", job=lane.job.id)
            self._fail(lane.job.id, InternalError(), "failed")

    def _fail(self, job_id: str, error: SluiceError, outcome: Outcome) -> None:
        lane = self._lanes.get(job_id)
        if lane is not None:
            self._cancel(lane)
            lane.fail(error, outcome)
            self._let_go(lane)
            self._emit([lane])

    def _fail_all(self, error: SluiceError) -> None:
        for job_id in list(self._lanes):
            self._fail(job_id, error, "failed")

    def _hand_over(self, job_id: str) -> None:
        lane = self._lanes.get(job_id)
        if lane is not None:
            self._cancel(lane)
            lane.hand_over()
            self._let_go(lane)
            self._emit([lane])

    def _drop(self, job_id: str, attempt: int | None) -> None:
        lane = self._lanes.get(job_id)
        if lane is not None and attempt in (None, lane.attempt):
            self._cancel(lane)
            lane.drop()
            self._let_go(lane)
            self._emit([lane])

    def _cancel(self, lane: Lane) -> None:
        for request_id in lane.open_requests():
            self.engine.cancel(request_id)

    def _let_go(self, lane: Lane) -> None:
        self._cancel(lane)
        if self._lanes.get(lane.job.id) is lane:
            del self._lanes[lane.job.id]

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            if now > lane.deadline:
                self._fail(
                    lane.job.id, DeadlineExceeded("The request's deadline passed while it was running."), "failed"
                )
