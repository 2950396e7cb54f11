"""Requests that somebody comes back to by their id: looking, following on, cancelling.

Knows the store's side of them; nothing of HTTP. What it finds belongs to the tenant that asks, or is not found.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import msgspec
import redis
import structlog

from api.relay.view import View
from shared import jobs, keys, results
from shared.errors import Cancelled, InvalidRequest, NotFound, StoreUnavailable, StreamExpired
from shared.frames import End, Error, Frame, Name, ending_with
from shared.jobs import Job
from shared.scripts import Looked, Scripts

log = structlog.get_logger(__name__)

Status = Literal["queued", "running", "completed", "failed", "cancelled"]
#: RQ's words for how a job stands -> ours.
_STATUS: dict[str, Status] = {
    "started": "running",
    "finished": "completed",
    "failed": "failed",
    "canceled": "cancelled",
    "stopped": "cancelled",
}
#: Requests in one call, which holds up the store for a millisecond or two.
FORGOTTEN_AT_ONCE = 500

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A request as the store has it. `end`: its terminal frame, if it has ended; `logged`: its log is there; `home`: the
    process that gets its frames pushed; `grace_s`: for its clients that hang up."""

    job: Job
    view: View
    status: Status
    ended: bool
    end: End | Error | None
    logged: bool
    home: str
    grace_s: int
    background: bool

    @classmethod
    def queued(cls, job: Job, view: View) -> Self:
        """One that was queued for the background just now."""
        return cls(job, view, "queued", False, None, False, "", 0, True)


class Ended(NamedTuple):
    """A request that has ended, and all that it said, folded. `known` None and no `frames`: what is left of it cannot be read. `there`
    False: the store does not have it."""

    job_id: str
    known: KnownJob | None = None
    frames: Sequence[Frame] = ()
    there: bool = True


class KnownJobs:
    """Methods raise StoreUnavailable when the store does not answer."""

    def __init__(self, store: Any, proc: str) -> None:
        self._store = store
        self._scripts = Scripts(store)
        self._proc = proc

    def find(self, job_id: str, tenant: str, *, follow: bool = False) -> KnownJob:
        """The request; with `follow`, this process follows it from now on. Raises NotFound."""
        looked = None
        if _ID.fullmatch(job_id):
            try:
                looked = self._scripts.attach(job_id, self._proc if follow else "", tenant)
            except redis.ResponseError as error:  # something else lies at that key
                log.warning("job_unreadable", job=job_id, error=str(error))
            except redis.RedisError as error:
                raise StoreUnavailable("The store does not answer.") from error
        if looked is None:
            raise _unknown()
        return _known(looked)

    def told(self, known: KnownJob) -> tuple[Name, list[Frame]]:
        """All that an ended request said, from its log or its result: (name of the last frame, frames).

        Names of folded frames are new ones: their order is right, but no cursor fits them. Raises StreamExpired if
        neither is left."""
        job_id = known.job.id
        try:
            pipeline = self._store.pipeline(transaction=False)
            pipeline.xrevrange(keys.results(job_id), "+", "-", count=1)
            pipeline.xrange(keys.log(job_id), "-", "+")
            answers = pipeline.execute(raise_on_error=False)
        except redis.RedisError as error:
            raise StoreUnavailable("The store does not answer.") from error
        result, raw = ([] if isinstance(answer, redis.RedisError) else answer for answer in answers)
        folded = results.read(result)
        if not folded:
            try:
                folded = results.fold([frame for _, entry in results.entries(raw) for frame in entry])
            except ValueError as error:
                log.warning("log_unreadable", job=job_id, error=str(error))
        if not folded and isinstance(known.end, Error):
            folded = [known.end]
        if not folded:
            raise StreamExpired("Nothing is left of this request.")
        return Name(1, len(folded)), folded

    def ended(self, job_ids: Sequence[str], most: int) -> list[Ended]:
        """Those of many requests that have ended or are not there any more, `most` at one time; one round trip."""
        try:
            answers = self._scripts.call("ended", most, *job_ids)
        except redis.RedisError as error:
            raise StoreUnavailable("The store does not answer.") from error
        return [_ended(answer[0].decode(), answer[1:]) for answer in answers]

    def forget(self, job_ids: Sequence[str], *, all_of_them: bool = False) -> list[str]:
        """Removes requests that have ended, with all they said. Those whose result is still being written stay, unless `all_of_them`
        go: their ids."""
        left: list[bytes] = []
        try:
            for start in range(0, len(job_ids), FORGOTTEN_AT_ONCE):
                some = job_ids[start : start + FORGOTTEN_AT_ONCE]
                left += self._scripts.call("forget", "1" if all_of_them else "", *some)
        except redis.RedisError as error:
            raise StoreUnavailable("The store does not answer.") from error
        return [job_id.decode() for job_id in left]

    def cancel(self, job_id: str) -> None:
        """Ends the request, unless it has ended. Its worker is told at once."""
        frame = ending_with(Cancelled("The request was cancelled."))
        try:
            if self._scripts.end(job_id, "cancel", frame, "canceled")[0] == 1:
                results.keep(self._store, [job_id])
        except redis.RedisError as error:
            raise StoreUnavailable("The store does not answer.") from error


def _ended(job_id: str, rest: Sequence[Any]) -> Ended:
    """Out of ended.lua's answer."""
    if not rest:
        return Ended(job_id, there=False)
    status, data, view, fingerprint, end, result, log_entries = rest
    try:
        known = _known(
            Looked(status.decode(), "ended", "", data, view, fingerprint.decode(), "", True, end, bool(log_entries))
        )
    except (NotFound, UnicodeDecodeError):
        return Ended(job_id)
    folded = results.read([(b"", {b"return_value": result})]) if result else []
    if not folded:
        with contextlib.suppress(ValueError, KeyError, RecursionError):
            raw = [(name, dict(zip(fields[::2], fields[1::2], strict=True))) for name, fields in log_entries]
            folded = results.fold([frame for _, entry in results.entries(raw) for frame in entry])
    if not folded and isinstance(known.end, Error):
        folded = [known.end]
    return Ended(job_id, known, folded)


def _known(looked: Looked) -> KnownJob:
    """Raises NotFound for what is no completion of ours."""
    try:
        job = jobs.from_rq(looked.data)
        end = msgspec.json.decode(looked.end, type=Frame) if looked.end else None
    except (InvalidRequest, msgspec.MsgspecError):
        raise _unknown() from None
    return KnownJob(
        job=job,
        view=View.read(looked.view, looked.fingerprint),
        status=_STATUS.get(looked.status, "queued"),
        ended=bool(looked.terminal),
        end=end if isinstance(end, End | Error) else None,
        logged=looked.logged,
        home=looked.home,
        grace_s=int(looked.grace) if looked.grace.isdigit() else 0,
        background=looked.background,
    )


def _unknown() -> NotFound:
    return NotFound("There is no such request, or it ended too long ago.")
