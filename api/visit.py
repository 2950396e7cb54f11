"""One HTTP request from its arrival to its last byte: its line in the log, and its span if requests are traced.

What is logged in between, in the same greenlet, carries its ids. Knows no resource.
"""

from __future__ import annotations

import time

import structlog
from flask import g

from shared.jobs import Job
from shared.tracing import Span, Tracer, read_traceparent

log = structlog.get_logger(__name__)

#: Where the WSGI layer around the app finds it.
VISIT = "sluice.visit"
#: Who looks after the system asks for these all the time.
PROBES = frozenset({"/health", "/ready", "/metrics"})


class Visit:
    """`route`: the path of the rule that matched, "" if none did. (The path itself may hold anything.)"""

    def __init__(self, tracer: Tracer, method: str, route: str, traceparent: str, request_id: str) -> None:
        self.request_id = request_id
        self.began = time.perf_counter()
        self.tracer = tracer
        self._method, self._route = method, route
        self._status = 0
        self._job = ""
        above = read_traceparent(traceparent)
        probe = route in PROBES
        self.span = Span(above) if probe else tracer.begin(f"{method} {route}".strip(), above, kind="server")
        self._say = log.debug if probe else log.info
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if tracer.on and not probe:
            self.span.tell(http__request__method=method, http__route=route, sluice__request_id=request_id)
            structlog.contextvars.bind_contextvars(trace_id=self.span.traceparent.split("-")[1])

    def of_job(self, job_id: str) -> None:
        """It is about this job."""
        self._job = job_id
        structlog.contextvars.bind_contextvars(job=job_id)
        self.span.tell(sluice__job=job_id)

    def asks(self, job: Job) -> None:
        self.span.tell(
            gen_ai__request__model=job.model,
            gen_ai__operation__name="chat" if job.kind == "chat" else "text_completion",
        )

    def relaying(self) -> Span:
        """What the frames of a job become for the client, from the first one on."""
        span = self.tracer.begin("relay", self.span.traceparent)
        span.tell(sluice__job=self._job)
        return span

    def answered(self, status: int) -> None:
        self._status = status

    def close(self) -> None:
        """The last byte is out, or never will be."""
        self.span.tell(http__response__status_code=self._status)
        self.span.end("" if self._status < 500 else f"status {self._status}")
        ms = round((time.perf_counter() - self.began) * 1000, 1)
        self._say("request", method=self._method, route=self._route, status=self._status, ms=ms)
        structlog.contextvars.unbind_contextvars("request_id", "job", "trace_id")


def visit() -> Visit:
    """The current one."""
    current: Visit = g.visit
    return current
