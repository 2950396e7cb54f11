"""What is told of each attempt at a job that this worker makes: a line in the log, and spans where requests are traced.

A traced request gets `queue`, what it waited for this attempt, and `attempt`, what the lane did, beside each other below
the HTTP request. An attempt after another one links to it; the ids of attempts can be worked out, so also to one whose
worker died and could not send it. Knows lanes, nothing of the engine and of Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import structlog

from shared import frames
from shared.frames import End, Error, Take
from shared.jobs import Job
from shared.tracing import Span, Tracer, attempt_span_id, read_traceparent
from workers.lane import Lane

log = structlog.get_logger(__name__)

#: Most of a request id that is logged; a job may come from anybody who can write to the store.
MAX_REQUEST_ID = 128


class Attempts:
    """`worker` gives the worker's name; `model` is the id of what it runs."""

    def __init__(self, tracer: Tracer, worker: Callable[[], str], model: str) -> None:
        self._tracer = tracer
        self._worker = worker
        self._model = model
        self._began: dict[Lane, tuple[float, Span]] = {}

    def begun(self, lane: Lane) -> None:
        span = self._span(lane) if self._tracer.on else Span()
        self._began[lane] = time.monotonic(), span

    def over(self, lane: Lane, won: bool) -> None:
        """`won`: the lane's end was the request's."""
        began, span = self._began.pop(lane, (time.monotonic(), Span()))
        outcome, code, tokens = _outcome(lane, won)
        log.info(
            "attempt",
            job=lane.job.id,
            request_id=lane.job.request_id[:MAX_REQUEST_ID],
            attempt=lane.attempt,
            outcome=outcome,
            tokens=tokens,
            ms=round((time.monotonic() - began) * 1000, 1),
            **({"code": code} if code else {}),
        )
        span.tell(sluice__outcome=outcome, gen_ai__usage__output_tokens=tokens)
        if isinstance(lane.terminal, End):
            span.tell(
                gen_ai__usage__input_tokens=lane.terminal.usage["prompt_tokens"],
                sluice__first_token_ms=lane.terminal.timings.get("first_token_ms", 0.0),
            )
        span.end(code)

    def close(self) -> None:
        """At the end of the process."""
        self._tracer.close()

    def _span(self, lane: Lane) -> Span:
        job = lane.job
        if parent := read_traceparent(job.trace):
            waited = self._tracer.begin("queue", parent, ago_s=_waited_s(lane))
            waited.tell(sluice__job=job.id, sluice__class=_field(lane, b"class"), sluice__attempt=lane.attempt)
            waited.end()
        links = (
            [(_attempt(job, parent, a), {"sluice.worker": worker}) for a, worker in _earlier(lane)] if parent else []
        )
        span = self._tracer.begin(
            "attempt", parent, kind="consumer", span_id=attempt_span_id(job.id, lane.attempt), links=links
        )
        span.tell(
            sluice__job=job.id,
            sluice__attempt=lane.attempt,
            sluice__worker=self._worker(),
            gen_ai__request__model=self._model,
        )
        return span


def _attempt(job: Job, parent: str, attempt: int) -> str:
    version, trace_id, _, flags = parent.split("-")
    return f"{version}-{trace_id}-{attempt_span_id(job.id, attempt)}-{flags}"


def _outcome(lane: Lane, won: bool) -> tuple[str, str, int]:
    """(what became of the attempt, the code of its error or "", tokens of the request so far)."""
    tokens = lane.tokens
    if isinstance(lane.terminal, Error) and won:
        return "failed", str(lane.terminal.error.get("code")), tokens
    if lane.terminal is not None and won:
        return "completed", "", tokens
    if lane.handing_over and lane.terminal is None:
        return "handed_over", "", tokens
    return "taken_away", "", tokens  # cancelled, ended by somebody else, or another worker's by now


def _waited_s(lane: Lane) -> float:
    """By the store's clock."""
    queued, taken = _field(lane, b"queued"), _field(lane, b"taken")
    return max(0, int(taken) - int(queued)) / 1000 if queued.isdigit() and taken.isdigit() else 0.0


def _field(lane: Lane, name: bytes) -> str:
    return lane.fields.get(name, b"").decode(errors="replace")


def _earlier(lane: Lane) -> Iterator[tuple[int, str]]:
    """(number, worker) of the attempt before this one, if there was one; its take is an entry of the log."""
    for name, entry in reversed(lane.log):
        if name.a >= lane.attempt:
            continue
        for frame in frames.decode_entry(entry):
            if isinstance(frame, Take):
                yield name.a, frame.worker
                return
