"""A batch's requests that wait or run: sent, looked after, cancelled. Knows jobs, nothing of files.

A request's id follows from the batch's secret, the line and the attempt, so that sending it once more changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import structlog

from api.batches import rows
from api.batches.endpoints import Endpoint
from api.batches.input_file import Line
from api.batches.records import Batch
from api.batches.rows import Row
from api.kinds import Parts
from api.known_jobs import Ended
from shared.errors import InternalError, RateLimited, SluiceError, Unavailable
from shared.jobs import Job, Placement

log = structlog.get_logger(__name__)

#: Requests of a batch that wait or run at one time, at least, where the setting leaves it open.
LEAST_WINDOW = 64
#: Results that are fetched at once.
FETCHED = 128
#: How long the result of a line is kept beyond its batch's time, s, if no runner fetches it.
KEPT_BEYOND = 3600


class Waiting(NamedTuple):
    """A line that is to be sent. `line`: its number from 0; `offset`, `length`: where it is, bytes; `attempt` counts
    those that failed before, from 0; `due`: not before that, monotonic, s."""

    line: int
    offset: int
    length: int
    attempt: int = 0
    due: float = 0.0


class Flight(NamedTuple):
    """A line whose request was sent."""

    waiting: Waiting
    custom_id: str
    job_id: str


class Prepared(NamedTuple):
    """A line whose request is ready to be sent."""

    waiting: Waiting
    custom_id: str
    job: Job
    placement: Placement


class Flights:
    """`clock`: the store's time, s."""

    def __init__(self, batch: Batch, endpoint: Endpoint, parts: Parts, clock: Callable[[], float]) -> None:
        self._batch, self._endpoint, self._parts, self._clock = batch, endpoint, parts, clock
        self._known = parts.gateway.known
        self._sent: dict[str, Flight] = {}
        self._model = ""

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def window(self) -> int:
        """How many may wait or run at one time."""
        return self._parts.settings.batch_window or max(LEAST_WINDOW, 4 * self._parts.gateway.lanes(self._model))

    def prepare(self, waiting: Waiting, line: Line) -> Prepared | Row:
        """A line's request, to be sent; if it is none that could be sent, what to write for it.

        Raises Unavailable or RateLimited if that cannot be said now, whatever the line says."""
        try:
            checked = self._endpoint.read(self._parts, line.body)
        except (Unavailable, RateLimited):
            raise
        except SluiceError as error:
            return rows.refused_by(self.row_name(waiting.line), line.custom_id, error)
        except Exception:  # a bug of ours, on one line: the others go on
            log.exception("line_failed", batch=self._batch.id, line=waiting.line)
            return rows.refused_by(self.row_name(waiting.line), line.custom_id, InternalError())
        call = checked.call
        job = msgspec.structs.replace(call.job, id=self.job_id(waiting.line, waiting.attempt))
        self._model = job.model
        left = max(1.0, self._batch.expires - self._clock())
        placement = Placement(
            tenant=self._batch.tenant,
            klass="batch",
            ahead=call.placement.ahead,
            fanout=call.placement.fanout,
            background=True,
            view=checked.view.encode(),
            deadline_s=left,
            result_ttl_s=int(left) + KEPT_BEYOND,
        )
        return Prepared(waiting, line.custom_id, job, placement)

    def send(self, prepared: Sequence[Prepared]) -> list[tuple[Prepared, SluiceError]]:
        """Sends requests, all in one round trip: those that could not be sent, and why."""
        if not prepared:
            return []
        told = self._parts.gateway.submit_all([(item.job, item.placement) for item in prepared])
        refused = []
        for item, error in zip(prepared, told, strict=True):
            if error is None:
                self._sent[item.job.id] = Flight(item.waiting, item.custom_id, item.job.id)
            else:
                refused.append((item, error))
        return refused

    def adopt(self, waiting: Waiting, custom_id: str) -> None:
        """Looks after a line's request as if it had been sent just now: whoever had the batch before may have."""
        job_id = self.job_id(waiting.line, waiting.attempt)
        self._sent[job_id] = Flight(waiting, custom_id, job_id)

    def fetch(self) -> Iterator[tuple[Flight, Ended]]:
        """Those that have ended, or that the store does not have any more, each once; they are in flight no longer, unless
        they are adopted meanwhile."""
        left = dict.fromkeys(self._sent)
        while left:
            found = self._known.ended(list(left), FETCHED)
            for ended in found:
                del left[ended.job_id]
                yield self._sent.pop(ended.job_id), ended
            if len(found) < FETCHED:
                return

    def cancel(self) -> None:
        """Ends all of them."""
        for job_id in self._sent:
            self._known.cancel(job_id)

    def ids_of(self, waiting: Waiting) -> list[str]:
        """The ids of a line's request and of those that failed before it."""
        return [self.job_id(waiting.line, attempt) for attempt in range(waiting.attempt + 1)]

    def job_id(self, line: int, attempt: int = 0) -> str:
        """Of a line's request."""
        return f"{self._endpoint.prefix}-{self._name(f'{line}:{attempt}')}"

    def row_name(self, line: int) -> str:
        """What a line's row in the results is called."""
        return f"batch_req_{self._name(f'row {line}')}"

    def _name(self, of: str) -> str:
        """128 bits that nobody can guess who does not know the batch's secret."""
        return hmac.digest(self._batch.secret.encode(), of.encode(), hashlib.sha256).hex()[:32]
