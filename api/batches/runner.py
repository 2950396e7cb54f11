"""The runner: takes unfinished batches from the store and carries several on at one time, a thread each.

Any number of runners may work on one store; a batch is one runner's as long as that one renews its lease, and another's
after. Also sends webhooks, and sees to files whose time is over and to what dead processes left in the file store.
"""

from __future__ import annotations

import threading
import time

import redis
import structlog

from api.batches.records import PER_RUNNER, BatchRecords, Lost
from api.batches.run import BatchRun, Pulse, Stopping
from api.chat_prompt import ChatPrompts
from api.constraints import Constraints
from api.file_records import FileRecords
from api.file_store import FileStore
from api.gateway import Gateway
from api.templating import Renderer
from api.thinking import Shapes
from api.tokenizers import Tokenizers
from api.webhooks.courier import Courier
from shared.errors import EngineOverloaded, NotFound, StoreUnavailable
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds between two beats, each of which renews the leases and looks for batches.
BEAT = 0.5
#: How often the same batch may fail for a reason that is none of its own, before it is ended.
TRIES = 3
#: Pause before a batch is carried on after the store or the file store did not answer, s.
PAUSE = 1.0
#: How long the batches' threads have, together, once the runner is told to stop, s.
FAREWELL = 5.0
#: Seconds between two looks for files whose time is over; for what nobody knows of any more, and how old that is.
SWEEP, SCOUR, FORGOTTEN = 60.0, 3600.0, 86_400.0


class Runner:
    """Runs until `stopping` is set. Has itself what reading a request needs (`api/kinds.py`), as an API process has
    it."""

    def __init__(self, store: redis.Redis, settings: Settings, stopping: threading.Event) -> None:
        self.settings = settings
        self.gateway = Gateway(store, settings)
        self.tokenizers = Tokenizers(self.gateway.tokenizer)
        self._renderer = Renderer()
        self.chats = ChatPrompts(self._renderer, Shapes(self._renderer.render_all), self.tokenizers)
        self.constraints = Constraints()
        self._files = FileStore.of(settings)
        self._records = BatchRecords(store, settings.lease_s)
        self._file_records = FileRecords(store, self._files)
        self._stopping = stopping
        self._runs: dict[str, BatchRun] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._courier = Courier(store, settings, stopping)
        self._pulse = Pulse(settings.lease_s)

    def run(self) -> None:
        """In the end the batches are given back for other runners."""
        self._courier.start()
        threading.Thread(target=self._housekeeping, name="housekeeping", daemon=True).start()
        while not self._stopping.is_set():
            try:
                self._beat()
                self._take()
            except StoreUnavailable as error:
                log.warning("runner_beat_failed", error=str(error))
            except Exception:
                log.exception("runner_beat_failed")
            self._stopping.wait(BEAT)
        until = time.monotonic() + FAREWELL
        for thread in list(self._threads.values()):
            thread.join(max(0.0, until - time.monotonic()))
        try:
            self._records.beat([run.held for run in self._runs.values()], leave=True)
        except StoreUnavailable as error:
            log.warning("leases_not_given_back", error=str(error))
        self._renderer.close()
        self.constraints.close()

    def _beat(self) -> None:
        for batch_id, thread in list(self._threads.items()):
            if not thread.is_alive():
                del self._threads[batch_id], self._runs[batch_id]
        runs = list(self._runs.values())
        now, statuses = self._records.beat([run.held for run in runs])
        self._pulse.heard(now)
        for run, status in zip(runs, statuses, strict=True):
            run.status = status

    def _take(self) -> None:
        for held in self._records.take(PER_RUNNER - len(self._runs)):
            log.info("batch_taken", batch=held.id, fence=held.fence)
            run = BatchRun(
                held,
                self,
                self._records,
                self._file_records,
                self._files,
                stopping=self._stopping,
                pulse=self._pulse,
            )
            self._runs[held.id] = run
            thread = threading.Thread(target=self._carry_on, args=(run,), name=held.id, daemon=True)
            self._threads[held.id] = thread
            thread.start()

    def _carry_on(self, run: BatchRun) -> None:
        """The top of a batch's thread."""
        failed = 0
        while True:
            try:
                if failed < TRIES:
                    run.work()
                else:
                    run.fail()
                return
            except Stopping:
                return
            except (Lost, NotFound) as error:
                log.warning("batch_lost", batch=run.held.id, why=str(error))
                return
            except (StoreUnavailable, EngineOverloaded) as error:
                log.warning("batch_waits", batch=run.held.id, error=str(error))
            except Exception:
                failed += 1
                log.exception("batch_stumbled", batch=run.held.id, times=failed)
            self._stopping.wait(PAUSE)

    # -- files

    def _housekeeping(self) -> None:
        scoured = time.monotonic()
        while not self._stopping.wait(SWEEP):
            try:
                if count := self._file_records.delete_expired():
                    log.info("files_expired", count=count)
                if time.monotonic() - scoured > SCOUR:
                    scoured = time.monotonic()
                    self.scour(FORGOTTEN)
            except StoreUnavailable as error:
                log.warning("housekeeping_failed", error=str(error))
            except Exception:
                log.exception("housekeeping_failed")

    def scour(self, age: float) -> int:
        """Removes what lies in the file store for `age` seconds and is nobody's: of uploads that broke off, and of
        runners that died. How many files."""
        count, oldest = 0, time.time() - age
        for name, changed in self._files.changed("files").items():
            if changed < oldest and not self._known_file(name):
                self._files.remove([name])
                count += 1
        for name, changed in self._files.changed("batches").items():
            if changed < oldest and not self._runs_still(name.split("/")[1]):
                self._files.remove([name])
                count += 1
        if count:
            log.info("file_store_scoured", removed=count)
        return count

    def _known_file(self, name: str) -> bool:
        """By the name in the file store, `files/{id}` or `files/{id}-{fence}`."""
        file_id = "-".join(name.removeprefix("files/").split("-")[:2])
        try:
            return self._file_records.find(file_id, "*").path in (name, "")
        except NotFound:
            return False

    def _runs_still(self, batch_id: str) -> bool:
        try:
            return not self._records.find(batch_id, "*").over
        except NotFound:
            return False
