"""One batch, from its input file to its results, by the runner that has it.

Whoever takes a batch over sends what is not done yet: requests that were running or had ended are found by their ids
(`flights.py`), and what is done is counted (`results.py`). So a runner may die at any place, and no line runs twice or
stands in the results twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import BinaryIO

import structlog

from api.batches import rows
from api.batches.endpoints import ENDPOINTS
from api.batches.flights import Flight, Flights, Prepared, Waiting
from api.batches.input_file import Line, Plan, check, read_line
from api.batches.records import COMPLETED, FAILED, OPEN, Batch, BatchRecords, Held, LineError, Lost
from api.batches.results import Results, folder
from api.batches.rows import Row
from api.file_records import FileRecords, Part
from api.file_store import FileStore
from api.kinds import Parts
from api.known_jobs import Ended
from shared.errors import (
    EngineOverloaded,
    ModelNotFound,
    NotFound,
    RateLimited,
    SluiceError,
    StoreUnavailable,
    Unavailable,
)
from shared.frames import Error

log = structlog.get_logger(__name__)

#: Pause between two looks at what runs, s: short while requests end, longer while none do.
SHORTEST, LONGEST = 0.02, 0.5
#: Requests that are sent in one round trip, or looked for when the batch ends.
AT_ONCE = 64
#: How often a request is sent again that failed for a reason that may pass, and the pause before, s: doubled each time.
RETRIES = 5
FIRST_RETRY, LAST_RETRY = 1.0, 60.0
#: What says nothing about the request: it is sent again for as long as the batch has time.
NOT_ITS_FAULT = frozenset({"no_worker", "worker_shutdown", "store_unavailable", "job_lost", "log_lost"})

#: States of lines that are done.
COUNTED = (COMPLETED, FAILED)

WORDS = {
    "batch_cancelled": "The batch was cancelled before this request was completed.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}


class Stopping(Exception):
    """This runner is told to stop."""


class Pulse:
    """What the runner last heard from the store, which believes it for `lease_s`."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._offset = 0.0
        self._heard = time.monotonic()

    def heard(self, now: float) -> None:
        """The store answered a beat; `now`: its time, s."""
        self._heard = time.monotonic()
        self._offset = now - self._heard

    def now(self) -> float:
        """The store's time, s."""
        return time.monotonic() + self._offset

    @property
    def weak(self) -> bool:
        """The leases are about to run out, or have: another runner may have the batches."""
        return time.monotonic() - self._heard > self._lease_s / 2


class BatchRun:
    """`status`, "lost" among them, is set by the runner, which hears it from the store."""

    def __init__(
        self,
        held: Held,
        parts: Parts,
        records: BatchRecords,
        file_records: FileRecords,
        files: FileStore,
        *,
        stopping: threading.Event,
        pulse: Pulse,
    ) -> None:
        self.held = held
        self.status = ""
        self._parts, self._records, self._file_records, self._files = parts, records, file_records, files
        self._stopping, self._pulse = stopping, pulse
        #: Lines whose requests are to be sent again.
        self._again: deque[Waiting] = deque()
        self._hold_until = 0.0
        self._open = 0
        #: Lines were sent before, until the store or the file store failed.
        self._begun = False

    def work(self) -> None:
        """Carries the batch on to its end. Raises Lost, Stopping, StoreUnavailable."""
        batch = self._records.find(self.held.id, "*")
        if batch.over:  # and only the answer to that was lost
            return
        self.status = self.status or batch.status
        results = Results(self.held, self._records, self._file_records, self._files, self._parts.gateway.known)
        try:
            file = self._file_records.find(batch.input, "*")
            with self._files.opened(file.path, file.bytes) as source:
                plan = self._plan(batch, source)
                if plan is None:
                    return
                self._lines(batch, plan, source, results)
        except (NotFound, FileNotFoundError):
            self._end(batch, "failed", errors=[LineError("file_missing", "The input file is gone.")])
            return
        self._records.finalize(self.held)
        results.forget()
        self._end(batch, "completed", files=results.join(batch))

    def fail(self) -> None:
        """Ends a batch that this code cannot carry on."""
        batch = self._records.find(self.held.id, "*")
        self._end(
            batch,
            "failed",
            errors=[LineError("internal_error", "Internal error. The details are in the server's log.")],
        )

    def _end(self, batch: Batch, how: str, *, files: Sequence[Part] = (), errors: Sequence[LineError] = ()) -> None:
        self._check()
        log.info("batch_ends", batch=batch.id, how=how, errors=len(errors))
        ttl_s = self._parts.settings.file_ttl_s
        output_ttl_s = batch.output_ttl_s or ttl_s
        self._records.end(self.held, how, ttl_s=ttl_s, output_ttl_s=output_ttl_s, files=files, errors=errors)
        self._files.remove_folder(folder(batch.id))

    def _check(self) -> None:
        if self.status == "lost":
            raise Lost("lost")
        if self._stopping.is_set():
            raise Stopping
        if self._pulse.weak:
            raise StoreUnavailable("The store has not been heard of for a while.")

    # -- the input file

    def _plan(self, batch: Batch, source: BinaryIO) -> Plan | None:
        """The order in which the lines run; None: something is wrong with the file, and the batch has ended."""
        name, settings = f"{folder(batch.id)}/plan", self._parts.settings
        if batch.checked:
            try:
                return Plan.decode(b"".join(self._files.read(name, 0, 24 * settings.max_batch_lines)))
            except (FileNotFoundError, ValueError):
                log.warning("plan_lost", batch=batch.id)
        plan, model, errors = check(
            source,
            batch.endpoint,
            beginning=ENDPOINTS[batch.endpoint].beginning,
            max_lines=settings.max_batch_lines,
            max_length=settings.max_body_bytes,
            going_on=self._check,
        )
        if not errors and model is not None:
            errors = self._check_model(model)
        if errors:
            self._end(batch, "failed", errors=errors)
            return None
        self._files.put(name, plan.encode())
        self._records.begin(self.held, len(plan), model or "")
        return plan

    def _check_model(self, model: str) -> list[LineError]:
        try:
            self._parts.gateway.card(model)
        except ModelNotFound as error:
            return [LineError("model_not_found", error.message, 1, "body.model")]
        except Unavailable:  # its requests will wait
            pass
        return []

    # -- the lines

    def _lines(self, batch: Batch, plan: Plan, source: BinaryIO, results: Results) -> None:
        """Has all lines run that are not done yet."""
        states = self._records.lines(self.held)
        self._open = states.count(OPEN)
        self._again.clear()
        still = (Waiting(*where) for where in plan if states[where[0]] == OPEN)
        flights = Flights(batch, ENDPOINTS[batch.endpoint], self._parts, self._pulse.now)
        if self.held.fence > 1 or self._begun:  # it may have ended between counting and forgetting
            results.forget_later([flights.job_id(line) for line, state in enumerate(states) if state in COUNTED])

        self._begun = True

        def read(waiting: Waiting) -> Line:
            source.seek(waiting.offset)
            return read_line(source.read(waiting.length), batch.endpoint)

        pause = SHORTEST
        while self._open:
            self._check()
            reason = self._reason(batch)
            if reason is not None:
                self._drain(reason, flights, chain(self._again, still), read, results)
                break
            self._send(flights, still, read, results)
            fetched = 0
            for flight, ended in flights.fetch():
                self._take(flight, ended, flights, results)
                fetched += 1
            results.write()
            pause = SHORTEST if fetched else min(LONGEST, pause * 1.3)
            self._stopping.wait(pause)
        results.write(at_once=True)

    def _reason(self, batch: Batch) -> str | None:
        """Why no more requests are to be sent."""
        if self.status == "cancelling":
            return "batch_cancelled"
        return "batch_expired" if self._pulse.now() >= batch.expires else None

    def _send(
        self, flights: Flights, still: Iterator[Waiting], read: Callable[[Waiting], Line], results: Results
    ) -> None:
        """Fills the window."""
        room = flights.window - len(flights)
        while room > 0 and not results.crowded and time.monotonic() >= self._hold_until:
            ready: list[Prepared] = []
            hold: SluiceError | None = None
            while len(ready) < min(room, AT_ONCE) and not results.crowded:
                waiting = self._due() or next(still, None)
                if waiting is None:
                    break
                try:
                    prepared = flights.prepare(waiting, read(waiting))
                except (Unavailable, RateLimited) as not_now:
                    hold = not_now
                    self._again.appendleft(waiting)
                    break
                if isinstance(prepared, Prepared):
                    ready.append(prepared)
                else:
                    self._add(results, waiting.line, prepared)
            for item, error in flights.send(ready):
                self._again.append(item.waiting)
                hold = error
            if hold is not None:
                self._hold_until = time.monotonic() + min(hold.retry_after_s or FIRST_RETRY, LAST_RETRY)
            if len(ready) < AT_ONCE:
                return
            room -= len(ready)

    def _due(self) -> Waiting | None:
        for at, waiting in enumerate(self._again):
            if waiting.due <= time.monotonic():
                del self._again[at]
                return waiting
        return None

    def _take(
        self, flight: Flight, ended: Ended, flights: Flights, results: Results, reason: str | None = None
    ) -> None:
        """Writes down what came of a request, or has it sent again. `reason`: why not, if the batch is ending."""
        waiting, custom_id, job_id = flight
        name = flights.row_name(waiting.line)
        if not ended.there and reason is None:  # the store has lost it
            self._again.append(waiting)
            return
        try:
            body, error = rows.outcome(ended, self._parts.constraints.holds) if ended.there else (None, None)
        except EngineOverloaded:  # its text can be checked later
            flights.adopt(waiting, custom_id)
            return
        except SluiceError as failed:
            body, error = None, Error.of(failed)
        if body is not None:
            row = rows.answered(name, custom_id, job_id, body)
        elif error is not None and error.retryable and reason is not None:
            # it may have been sent again
            flights.adopt(waiting._replace(attempt=waiting.attempt + 1), custom_id)
            return
        elif error is None or _cut_off(error, reason):
            code = reason or "batch_expired"
            row = rows.not_run(name, custom_id, code, WORDS[code])
        elif error.retryable and (waiting.attempt < RETRIES or error.error.get("code") in NOT_ITS_FAULT):
            pause = min(FIRST_RETRY * 2 ** min(waiting.attempt, 10), LAST_RETRY)
            self._again.append(waiting._replace(attempt=waiting.attempt + 1, due=time.monotonic() + pause))
            return
        else:
            row = rows.refused(name, custom_id, job_id, error.status, error.error)
        self._add(results, waiting.line, row, flights.ids_of(waiting))

    def _add(self, results: Results, line: int, row: Row, job_ids: Sequence[str] = ()) -> None:
        results.add(line, row, job_ids)
        self._open -= 1

    def _drain(
        self,
        reason: str,
        flights: Flights,
        still: Iterator[Waiting],
        read: Callable[[Waiting], Line],
        results: Results,
    ) -> None:
        """Ends what runs and writes a row for every line that has none: what was completed before stays so, also if it
        was another runner that had sent it."""
        if reason == "batch_expired":
            self._records.expire(self.held)
        self._land(reason, flights, results)
        while some := list(islice(still, AT_ONCE)):
            self._check()
            for waiting in some:
                flights.adopt(waiting, read(waiting).custom_id)
            self._land(reason, flights, results)
            results.write()

    def _land(self, reason: str, flights: Flights, results: Results) -> None:
        """Ends all requests in flight, and writes their rows."""
        while len(flights):
            self._check()
            for flight, ended in flights.fetch():
                self._take(flight, ended, flights, results, reason)
            flights.cancel()
            if len(flights):
                self._stopping.wait(SHORTEST)


def _cut_off(error: Error, reason: str | None) -> bool:
    """Whether the request ended because its batch does."""
    code = error.error.get("code")
    return code == "deadline_exceeded" or (reason is not None and code == "cancelled")
