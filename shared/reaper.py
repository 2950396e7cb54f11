"""Finds dead processes and gives back what they had; ends what waits in vain. Runs in every process.

A lease that is missing is not yet a death: the store may have been away, or this process may have slept. So a name
counts as dead when this reaper has seen it without a lease for a while, with every command answered and no gap in its
own rounds. Each act is a script that looks again, so that any number of reapers may act at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import redis
import structlog

from shared import connection, keys, results
from shared.errors import Cancelled, DeadlineExceeded, NoWorker, PoisonRequest, WorkerLost
from shared.frames import ending_with
from shared.scripts import ReapFrames, Scripts
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between two looks.
ROUND = 1.0
#: How long a lease must be seen missing, s: the beat that renews it may be under way.
MISSING = 2.0
#: Seconds between two looks at what waits in vain, over all processes.
SWEEP = 2.0
#: Waiting requests looked at in each list.
SWEPT = 200


REAPED = ReapFrames(
    deadline=ending_with(DeadlineExceeded("The request's deadline passed.")),
    poison=ending_with(
        PoisonRequest("Workers died while they ran this request, without a new token of it. It is not tried again.")
    ),
    tried=ending_with(WorkerLost("The workers that ran this request died, one after the other.")),
)
LATE = ending_with(DeadlineExceeded("The request's deadline passed while it was waiting."))
NONE_CAME = ending_with(NoWorker("No worker for the model came in time."))
NOT_TAKEN_UP = ending_with(WorkerLost("The worker that had this request is gone, and no other came in time."))
NOT_LOADED = ending_with(NoWorker("The model cannot be loaded at the moment. The server's log says why."))
ORPHANED = ending_with(Cancelled("The client's server is gone, and nobody came back for the request."))


class Reaper(threading.Thread):
    """`clock` is monotonic, s. Stop it with `stop()`."""

    def __init__(self, store: redis.Redis, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name="reaper", daemon=True)
        self._store: Any = store
        self._scripts = Scripts(store)
        self._settings = settings
        self._clock = clock
        self._stopping = threading.Event()
        #: When each name was first seen without its lease.
        self._missing: dict[str, float] = {}
        self._looked = clock()
        self._failed = -1e9
        self._swept = -1e9

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.wait(ROUND):
            try:
                self.look()
            except redis.RedisError as error:
                self._doubt()
                log.debug("reaper_failed", error=str(error))
            except Exception:
                self._doubt()
                log.exception("reaper_failed")

    def look(self) -> None:
        """One round. Raises redis.RedisError."""
        now = self._clock()
        if now - self._looked > self._settings.lease_s / 2:  # this process slept; so may the others have
            self._missing.clear()
        self._looked = now
        dead = self._dead(now)
        for kind, name in dead:
            self._missing.pop(name, None)
            try:
                self._reap(kind, name)
            except redis.ResponseError as error:
                connection.unless_another_type(
                    error
                )  # else: something lies where its keys belong, and the others go on
                log.warning("not_reaped", name=name, error=str(error))
        if now - self._swept > SWEEP:
            self._swept = now
            swept = self._scripts.sweep(
                int(self._settings.cold_start_s * 1000),
                late=LATE,
                no_worker=NONE_CAME,
                lost=NOT_TAKEN_UP,
                not_loaded=NOT_LOADED,
                most=SWEPT,
                batch_age_ms=int(self._settings.batch_age_s * 1000),
            )
            if swept.ended:
                log.warning("waited_in_vain", ended=len(swept.ended))
            results.keep(self._store, [*swept.ended, *swept.unkept])

    def _reap(self, kind: str, name: str) -> None:
        if kind == "worker":
            reap_worker(self._store, name, "its lease ran out")
        elif (ended := self._scripts.reap_proc(name, ORPHANED)) is not None:
            log.warning("api_process_reaped", proc=name, cancelled=len(ended))
            results.keep(self._store, ended)

    def _doubt(self) -> None:
        """A command failed: what was seen before counts for nothing, and what comes now needs longer."""
        self._failed = self._clock()
        self._missing.clear()

    def _dead(self, now: float) -> list[tuple[str, str]]:
        pipeline = self._store.pipeline(transaction=False)
        pipeline.smembers(keys.WORKERS)
        pipeline.smembers(keys.PROCS)
        workers, procs = pipeline.execute()
        names = [("worker", name.decode(errors="replace")) for name in workers]
        names += [("proc", name.decode(errors="replace")) for name in procs]
        pipeline = self._store.pipeline(transaction=False)
        for kind, name in names:
            pipeline.exists(keys.lease(name) if kind == "worker" else keys.alive(name))
        alive = {name for (_, name), exists in zip(names, pipeline.execute(), strict=True) if exists}
        known = {name for _, name in names}
        self._missing = {name: at for name, at in self._missing.items() if name in known - alive}
        lease = self._settings.lease_s
        patience = lease if now - self._failed < 2 * lease else MISSING
        return [
            (kind, name)
            for kind, name in names
            if name not in alive and now - self._missing.setdefault(name, now) >= patience
        ]


def reap_worker(store: redis.Redis, name: str, why: str, *, proven: bool = False) -> None:
    """Gives back what a worker ran. `proven`: its process has been waited for. Raises redis.RedisError."""
    reaped = Scripts(store).reap(name, why, proven=proven, frames=REAPED)
    if reaped is not None:
        given_back, ended = reaped
        log.warning("worker_reaped", worker=name, why=why, given_back=given_back, ended=len(ended))
        results.keep(store, ended)
