"""What `GET /metrics` says, in Prometheus's text format.

All of it comes out of the store when it is asked for: what was counted by all processes (`shared/measures.py`), and how
queues, workers and lanes stand now. So it is the truth of the whole system, whichever API process answers, and however often
processes were restarted. Knows nothing of HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import redis
import structlog
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from api.gateway import Gateway
from api.reaching import reaching_the_store
from shared import connection, keys, measures
from shared.counts import Counts
from shared.errors import StoreUnavailable
from shared.measures import MEASURES, OF_MODEL, Measure, Numbers

log = structlog.get_logger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PREFIX = "sluice_"
#: How long an answer serves others who ask, s.
FRESH = 0.5
#: What is measured when somebody asks: name -> words, labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "store_up": ("Whether the store answers. Where it does not, nothing else is told.", ()),
    "store_memory_bytes": ("Memory that the store uses.", ()),
    "store_memory_limit_bytes": (
        "Memory that the store may use; above 80 % of it requests are refused. 0: no limit.",
        (),
    ),
    "requests_waiting": ("Requests that wait for a lane.", ("model", "class")),
    "requests_running": ("Requests that workers have.", ("model", "class")),
    "workers": ("Live workers.", ("model", "state")),
    "lanes": ("Lanes of live workers.", ("model", "state")),
    "tokens_per_second": ("Tokens sampled a second, all live workers together, over the last two seconds.", OF_MODEL),
    "api_processes": ("Live API processes.", ()),
    "followed_requests": ("Requests that a client waits for, or may come back to, over all API processes.", ()),
}


def exposed(measure: Measure) -> str:
    """The metric's name."""
    return f"{PREFIX}{measure.name}{'_seconds' if measure.bounds else '_total'}"


def names() -> dict[str, tuple[str, ...]]:
    """Every metric, with its labels."""
    return {
        **{PREFIX + name: labels for name, (_, labels) in GAUGES.items()},
        **{exposed(measure): measure.labels for measure in MEASURES.values()},
    }


class Metrics(Collector):
    """`text` is what a scrape gets."""

    def __init__(self, store: redis.Redis | None, gateway: Gateway, counts: Counts) -> None:
        self._store: Any = store
        self._gateway = gateway
        self._counts = counts
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._one = threading.Lock()
        self._made: tuple[float, bytes] = (-FRESH, b"")

    def text(self) -> bytes:
        """Made once for all who ask at about the same time."""
        with self._one:
            made_at, text = self._made
            if time.monotonic() - made_at >= FRESH:
                text = generate_latest(self._registry)
                self._made = time.monotonic(), text
            return text

    def describe(self) -> Iterable[Any]:
        """Nothing: registering does not ask the store."""
        return ()

    def collect(self) -> Iterator[Any]:
        try:
            numbers, memory = self._read()
            status = self._gateway.status()
        except StoreUnavailable:
            yield _gauge("store_up", {(): 0})
            return
        yield _gauge("store_up", {(): 1})
        if memory:
            yield _gauge("store_memory_bytes", {(): memory.get("used_memory", 0)})
            yield _gauge("store_memory_limit_bytes", {(): memory.get("maxmemory", 0)})
        yield from _of_status(status)
        yield from _of_numbers(numbers, [model["id"] for model in status["models"]])

    def _read(self) -> tuple[Numbers, dict[str, Any]]:
        """What was counted, this process's own included, and the store's memory. Raises StoreUnavailable."""
        if self._store is None:
            return measures.read(()), {}
        with reaching_the_store():
            self._counts.tell()
            pipeline = self._store.pipeline(transaction=False)
            pipeline.hgetall(keys.COUNTS)
            pipeline.info("memory")
            counted, memory = pipeline.execute(raise_on_error=False)
            counted = connection.unless_another_type(counted) or {}
        return measures.read([counted]), {} if isinstance(memory, redis.RedisError) else memory


def _gauge(name: str, rows: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    words, labels = GAUGES[name]
    family = GaugeMetricFamily(PREFIX + name, words, labels=labels)
    for values, number in rows.items():
        family.add_metric(values, number)
    return family


def _of_status(status: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    queues, nodes = status["queues"], status["nodes"]
    yield _gauge("requests_waiting", {(row["model"], row["class"]): row["waiting"] for row in queues})
    yield _gauge("requests_running", {(row["model"], row["class"]): row["running"] for row in queues})
    workers, lanes, speed = (Counter[tuple[str, ...]]() for _ in range(3))
    for model in (model["id"] for model in status["models"]):
        workers.update({(model, "ready"): 0, (model, "draining"): 0})
        lanes.update({(model, "busy"): 0, (model, "free"): 0})
        speed.update({(model,): 0})
    for worker in status["workers"]:
        model = worker["model"]
        workers[model, "draining" if worker["draining"] else "ready"] += 1
        lanes[model, "busy"] += worker["lanes"] - worker["free"]
        lanes[model, "free"] += worker["free"]
        speed[model,] += worker["tokens_per_second"]
    yield _gauge("workers", workers)
    yield _gauge("lanes", lanes)
    yield _gauge("tokens_per_second", speed)
    yield _gauge("api_processes", {(): len(nodes)})
    yield _gauge("followed_requests", {(): sum(node["streams"] for node in nodes)})


def _of_numbers(numbers: Numbers, models: list[str]) -> Iterator[Any]:
    """Counters begin at 0 where that can be known, so that a first failure is an increase."""
    for measure in MEASURES.values():
        if not measure.bounds:
            counter = CounterMetricFamily(exposed(measure), measure.words, labels=measure.labels)
            begun = [()] if not measure.labels else [(m,) for m in models] if measure.labels == OF_MODEL else []
            rows = {**dict.fromkeys(begun, 0), **numbers.counters.get(measure.name, {})}
            for labels, number in rows.items():
                counter.add_metric(labels, number)
            yield counter
            continue
        histogram = HistogramMetricFamily(exposed(measure), measure.words, labels=measure.labels)
        for labels, found in numbers.histograms.get(measure.name, {}).items():
            bounds = [*(f"{bound:g}" for bound in measure.bounds), "+Inf"]
            histogram.add_metric(labels, list(zip(bounds, accumulate(found.counts), strict=True)), found.total)
        yield histogram
