"""Spans by the OpenTelemetry SDK, sent by OTLP over HTTP. Needs the extra `otel`; only `shared/tracing.py` imports it.

Where to, how many and under which name is the environment's to say: the SDK reads the `OTEL_*` variables itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shared.tracing import Kind, Span, Tracer, Value, read_traceparent

#: Longest wait for the last spans to be sent, ms.
LAST_WORDS_MS = 3000


class OpenTelemetryTracer(Tracer):
    """Made after the fork: it has a thread."""

    on = True

    def __init__(self, service: str) -> None:
        self._ids = _Ids()
        resource = Resource.create({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("sluice")

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
        above = _context_of(parent)
        with self._ids.given(span_id):
            span = self._tracer.start_span(
                name,
                Context() if above is None else trace.set_span_in_context(NonRecordingSpan(above), Context()),
                kind=SpanKind[kind.upper()],
                start_time=time.time_ns() - int(ago_s * 1e9),
                links=[Link(other, attributes) for text, attributes in links if (other := _context_of(text))],
            )
        return _Recorded(span)

    def close(self) -> None:
        self._provider.force_flush(LAST_WORDS_MS)
        self._provider.shutdown()


class _Recorded(Span):
    def __init__(self, span: trace.Span) -> None:
        context = span.get_span_context()
        super().__init__(
            f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}-{context.trace_flags:02x}"
        )
        self._span = span

    def tell(self, **attributes: Value) -> None:
        self._span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _Ids(RandomIdGenerator):
    """Random ids, but for the span that is begun under `given`."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def given(self, span_id: str | None) -> Iterator[None]:
        self._local.span_id = span_id
        try:
            yield
        finally:
            self._local.span_id = None

    def generate_span_id(self) -> int:
        span_id = getattr(self._local, "span_id", None)
        return super().generate_span_id() if span_id is None else int(span_id, 16)


def _context_of(traceparent: str) -> SpanContext | None:
    if not (checked := read_traceparent(traceparent)):
        return None
    _, trace_id, span_id, flags = checked.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
