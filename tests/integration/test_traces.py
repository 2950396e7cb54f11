"""Traces over API and workers, read as a collector gets them: OTLP over HTTP, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared import jobs
from shared.jobs import Job
from shared.tracing import Span, Tracer, attempt_span_id, make_tracer, read_traceparent
from tests.conftest import ROOT, script, wait_for
from tests.stack import Stack, endless

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLER = CLIENT.split("-")[1:3]


class Got(NamedTuple):
    """A span as it arrived. `service`: of the process that sent it; `links`: span ids."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: list[str]
    failed: bool


class Collector:
    """Takes spans at `url`."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        self.spans: list[Got] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                """Silent."""

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    raw = gzip.decompress(raw)
                sent = trace_service_pb2.ExportTraceServiceRequest.FromString(raw)
                collector.spans += list(_spans(sent))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, trace: str, count: int, name: str = "") -> list[Got]:
        """The spans of a trace in the order of their beginnings, once there are so many, of that name if one is given."""

        def found() -> list[Got] | None:
            got = [span for span in self.spans if span.trace == trace and name in ("", span.name)]
            return sorted(got, key=lambda span: span.start) if len(got) >= count else None

        return wait_for(found, 30)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(sent: Any) -> Iterator[Got]:
    for resource in sent.resource_spans:
        service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
            yield Got(
                service,
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                values,
                [link.span_id.hex() for link in span.links],
                span.status.code == 2,
            )


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")
    collector = Collector()
    yield collector
    collector.close()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_BSP_SCHEDULE_DELAY="100"):
        stack = Stack(tmp_path_factory.mktemp("traced"), options=("--workers", "2:2"), drain_s=0)
    with stack:
        yield stack


def test_one_trace_from_the_clients_span_over_both_processes(traced: Stack, collector: Collector) -> None:
    with traced.open(script("a", "b"), headers={"traceparent": CLIENT}) as stream:
        stream.read()
    assert stream.text == "ab"
    spans = {span.name: span for span in collector.of(TRACE, 4)}
    request, queue, attempt, relay = (spans[n] for n in ("POST /v1/completions", "queue", "attempt", "relay"))
    assert (request.service, request.parent) == ("sluice-api", CALLER)
    assert (relay.service, relay.parent) == ("sluice-api", request.id)
    assert (queue.service, queue.parent) == (attempt.service, attempt.parent) == ("sluice-worker", request.id)
    assert {span.attributes.get("sluice.job") for span in spans.values()} == {stream.id}
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["sluice.request_id"] == stream.headers["x-request-id"]
    assert attempt.attributes["sluice.outcome"] == "completed"
    assert attempt.attributes["gen_ai.usage.output_tokens"] == stream.usage["completion_tokens"]  # type: ignore[index]
    assert request.start <= attempt.start <= attempt.end and relay.end <= request.end
    assert not any(span.failed or span.links for span in spans.values())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_attempt_after_another_links_to_it(traced: Stack, collector: Collector, how: signal.Signals) -> None:
    trace = f"{how.value:032x}"
    with traced.open(endless(delay_ms=20), headers={"traceparent": f"00-{trace}-{CALLER}-01"}) as stream:
        stream.goes_on(3)
        owner = next(w["name"] for w in traced.status()["workers"] if w["busy"])
        with traced.store() as store:
            pid = int(store.hget(f"sluice:stat:{owner}", "pid"))
        os.kill(pid, how)
        wait_for(lambda: stream.goes_on() and len({name.split("-")[0] for name in stream.ids if name}) > 1)
        stream.leave()
    if how == signal.SIGTERM:
        first, second = collector.of(trace, 2, "attempt")
        assert first.attributes["sluice.outcome"] == "handed_over" and first.attributes["sluice.worker"] == owner
        assert second.links == [first.id]
    else:  # it could not send its span, but its id is known
        [second] = collector.of(trace, 1, "attempt")
        [dead] = second.links
        attempts = {int(name.split("-")[0]) for name in stream.ids if name}
        assert dead == attempt_span_id(stream.id, min(attempts))
    assert second.attributes["sluice.worker"] != owner
    assert second.attributes["sluice.outcome"] == "taken_away"
    [request] = collector.of(trace, 1, "POST /v1/completions")
    sent = 2 if how == signal.SIGTERM else 1
    assert {span.parent for span in collector.of(trace, sent, "queue")} == {second.parent} == {request.id}


def test_refusals_and_unsampled_requests(traced: Stack, collector: Collector) -> None:
    refused, unsampled = "1" * 32, "2" * 32
    header = {"traceparent": f"00-{unsampled}-{CALLER}-00"}
    assert traced.call("POST", "/v1/completions", {"prompt": script("a")}, headers=header).status == 200
    header = {"traceparent": f"00-{refused}-{CALLER}-01"}
    assert traced.call("POST", "/v1/completions", {"n": 0}, headers=header).status == 400
    [span] = collector.of(refused, 1)
    assert span.attributes["http.response.status_code"] == 400
    assert not [span for span in collector.spans if span.trace == unsampled]


def test_nothing_is_imported_where_nothing_is_configured() -> None:
    """Not by us: redis-py looks whether there is an SDK."""
    program = (
        "import sys, api.app, workers.lane_worker; from shared.tracing import Tracer, make_tracer\n"
        "assert type(make_tracer('x')) is Tracer\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.exporter', 'shared.opentelemetry'))])"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_configured_and_not_installed_is_said(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()  # comes first, and is empty
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    program = (
        "from shared import logs; logs.configure('INFO', process='test')\n"
        "from shared.tracing import Tracer, make_tracer\n"
        "assert type(make_tracer('x')) is Tracer"
    )
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert "tracing_not_installed" in done.stderr and "sluice-server[otel]" in done.stderr


@pytest.mark.parametrize(
    ("header", "read"),
    [
        (CLIENT, CLIENT),
        (f" {CLIENT} ", CLIENT),
        (f"cc-{TRACE}-{CALLER}-01-what-will-come", CLIENT),
        (f"{CLIENT}-more", ""),
        (f"ff-{TRACE}-{CALLER}-01", ""),
        (f"00-{'0' * 32}-{CALLER}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (CLIENT.upper(), ""),
        ("nonsense", ""),
        ("", ""),
    ],
)
def test_traceparent_is_read_as_the_specification_says(header: str, read: str) -> None:
    assert read_traceparent(header) == read


def test_the_context_travels_in_the_job_and_needs_no_newer_worker() -> None:
    job = Job(id="cmpl-1", model="m", prompts=["a"], seed=1, created=1, trace=CLIENT, request_id="req-1")
    assert jobs.from_rq(jobs.to_rq(job)) == job
    assert job.version == 1
    assert Tracer().begin("x", CLIENT).traceparent == CLIENT


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_it_can_be_switched_off(variable: str) -> None:
    name, _, value = variable.partition("=")
    with environment(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", **{name: value}):
        assert type(make_tracer("x")) is Tracer
        assert type(make_tracer("x").begin("y")) is Span
