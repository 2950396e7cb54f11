"""Traces of requests: OpenTelemetry's, where it is configured and installed; else none, and nothing of it is imported.

A request's trace context travels in its job, as a W3C `traceparent`; a client's is passed on also where nothing is
recorded. Knows nothing of HTTP, of the store and of how spans are exported (`shared/opentelemetry_tracer.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Literal

import structlog

log = structlog.get_logger(__name__)

Value = str | bool | int | float | Sequence[str]
Kind = Literal["server", "consumer", "internal"]

#: W3C Trace Context, section 3.2: version, trace id, parent id, flags, and from version 01 on maybe more.
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


def read_traceparent(text: str) -> str:
    """The `traceparent` of a header, as version 00; "" for one that is none."""
    found = _TRACEPARENT.fullmatch(text.strip()) if text else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return ""
    if not (found["trace"].strip("0") and found["span"].strip("0")):
        return ""
    return f"00-{found['trace']}-{found['span']}-{found['flags']}"


def attempt_span_id(job_id: str, attempt: int) -> str:
    """The span id of a job's attempt: whoever goes on after it can tell which it was, also when its worker is dead."""
    return sha256(f"{job_id} {attempt}".encode()).hexdigest()[:16]


class Span:
    """One that is not recorded. `traceparent`: what those called from here get as their parent; "" = none."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def tell(self, **attributes: Value) -> None:
        """Adds attributes; a double underscore in a name is a dot."""

    def end(self, error: str = "") -> None:
        """Once. `error`: why what it stands for failed."""


class Tracer:
    """One that records nothing. `on`: whether spans are recorded at all; what only they need need not be worked out."""

    on = False

    def begin(
        self,
        name: str,
        parent: str = "",
        *,
        kind: Kind = "internal",
        ago_s: float = 0.0,
        span_id: str | None = None,
        links: Sequence[tuple[str, Mapping[str, Value]]] = (),
    ) -> Span:
        """A span that began `ago_s` seconds ago, below `parent` (a `traceparent`), or in a trace of its own. `links`: the
        `traceparent` of others it belongs to, with attributes."""
        return Span(parent)

    def close(self) -> None:
        """Sends what is not sent yet."""


def make_tracer(service: str) -> Tracer:
    """As the standard `OTEL_*` variables of the environment say. `service`: the service's name, if they give none."""
    if not _wanted():
        return Tracer()
    try:
        from shared.opentelemetry_tracer import OpenTelemetryTracer
    except ImportError as error:
        log.warning(
            "tracing_not_installed",
            message="OTEL_* variables ask for traces: pip install 'sluice-server[otel]', or the lines with the extra otel in "
            "requirements.txt.",
            error=str(error),
        )
        return Tracer()
    return OpenTelemetryTracer(service)


def _wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return exporter == "otlp" or (not exporter and bool(endpoint))
