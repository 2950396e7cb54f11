"""What the monitor shows of the whole system at one moment: the page, `/monitor/events` and `sluice top` have it from here.

Read from the store once for all who look at the same time. Knows nothing of HTTP; who may see what is told by the caller.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import redis

from api.gateway import Gateway
from api.reaching import reaching_the_store
from shared import connection, keys, measures
from shared.counts import Counts
from shared.measures import Distribution, Numbers

#: How long a state serves others who look, s.
FRESH = 0.4
#: Latencies are those of this minute and so many before it.
MINUTES = 5
#: Running requests shown, and looked at.
SHOWN, LOOKED_AT = 100, 500
#: Of a request's log, what is no step: its take and its start.
NO_STEPS = 2
#: What of a job's hash is shown.
_FIELDS = ("model", "class", "tenant", "description", "owner", "queued", "taken", "born", "needs", "status")
#: Name in a state -> measure.
_LATENCIES = {
    "first_token": "time_to_first_token",
    "inter_token": "inter_token_latency",
    "queue": "queue_time",
    "duration": "request_duration",
}


class Monitor:
    """Methods raise StoreUnavailable."""

    def __init__(self, store: redis.Redis | None, gateway: Gateway, counts: Counts) -> None:
        self._store: Any = store
        self._gateway = gateway
        self._counts = counts
        self._one = threading.Lock()
        self._read_at = -FRESH
        self._known: dict[str, Any] = {}

    def state(self, tenant: str) -> dict[str, Any]:
        """Everything that is to be seen; of the running requests those of a tenant, "*": everybody's."""
        with self._one:
            if time.monotonic() - self._read_at >= FRESH:
                self._known = self._read()
                self._read_at = time.monotonic()
            known = self._known
        visible = [row for row in known["running"] if tenant in ("*", row["tenant"])]
        return {**known, "running": visible[:SHOWN], "running_more": len(visible) - len(visible[:SHOWN])}

    def _read(self) -> dict[str, Any]:
        status = self._gateway.status()
        if self._store is None:
            return {"time": time.time(), **status, **_told(measures.read(()), measures.read(())), "running": []}
        with reaching_the_store():
            self._counts.tell()
            seconds, microseconds = self._store.time()
            now = seconds + microseconds / 1e6
            pipeline = self._store.pipeline(transaction=False)
            pipeline.hgetall(keys.COUNTS)
            for minute in range(int(now // 60) - MINUTES, int(now // 60) + 1):
                pipeline.hgetall(keys.lately(minute))
            for worker in status["workers"]:
                pipeline.hkeys(keys.lanes(worker["name"]))
            answers = [connection.unless_another_type(answer) for answer in pipeline.execute(raise_on_error=False)]
            ids = [job_id.decode(errors="replace") for lanes in answers[MINUTES + 2 :] for job_id in lanes or ()]
            running = self._running(ids[:LOOKED_AT], now)
        counted = measures.read([answers[0] or {}])
        lately = measures.read([answer or {} for answer in answers[1 : MINUTES + 2]])
        return {"time": round(now, 3), **status, **_told(counted, lately), "running": running}

    def _running(self, ids: list[str], now: float) -> list[dict[str, Any]]:
        """The longest running first."""
        pipeline = self._store.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hmget(keys.job(job_id), *_FIELDS)
            pipeline.xlen(keys.log(job_id))
        answers = [connection.unless_another_type(answer) for answer in pipeline.execute(raise_on_error=False)]
        rows = []
        for job_id, fields, entries in zip(ids, answers[::2], answers[1::2], strict=True):
            found = [value.decode(errors="replace") if value else "" for value in fields or ()]
            job = dict(zip(_FIELDS, found, strict=False))
            if job.get("status") == "started":  # else it has just ended, or somebody wrote over it
                rows.append(_row(job_id, job, entries or 0, now))
        return sorted(rows, key=lambda row: -row["seconds"])


def _row(job_id: str, job: dict[str, str], entries: int, now: float) -> dict[str, Any]:
    """A running request. `seconds`: since it was taken; `waited`: before that; `tokens`: about how many there are."""
    born, taken = (_seconds(job[field], now) for field in ("born", "taken"))
    choices = int(job["needs"]) if job["needs"].isdigit() and len(job["needs"]) < 6 else 1
    return {
        "id": job_id,
        "kind": "chat" if job["description"] == "chat" else "completion",
        "model": job["model"][:256],
        "class": job["class"][:64],
        "tenant": job["tenant"][:64],
        "worker": job["owner"][:256],
        "choices": choices,
        "seconds": round(max(0.0, now - taken), 1),
        "waited": round(max(0.0, taken - born), 3),
        "tokens": max(0, entries - NO_STEPS) * choices,
    }


def _seconds(ms: str, otherwise: float) -> float:
    return int(ms) / 1000 if ms.isascii() and ms.isdigit() and len(ms) < 16 else otherwise


def _told(counted: Numbers, lately: Numbers) -> dict[str, Any]:
    """Totals since the store began to count, and latencies of the last minutes."""
    outcomes = Counter[str]()
    for (outcome, *_), count in counted.counters.get("requests", {}).items():
        outcomes[outcome] += count
    one_number = (
        "prompt_tokens",
        "completion_tokens",
        "failovers",
        "handovers",
        "put_backs",
        "workers_lost",
        "gap_repairs",
    )
    totals = {name: sum(counted.counters.get(name, {}).values()) for name in one_number}
    latencies: dict[str, dict[str, Any]] = {}
    for name, measure in _LATENCIES.items():
        by_model: dict[str, Distribution] = {}
        for labels, found in lately.histograms.get(measure, {}).items():
            before = by_model.get(labels[-1])
            counts = (
                found.counts if before is None else [a + b for a, b in zip(before.counts, found.counts, strict=True)]
            )
            by_model[labels[-1]] = replace(found, counts=counts)
        for model, found in by_model.items():
            latencies.setdefault(model, {"model": model})[name] = _percentiles(found)
    return {
        "totals": {**totals, "requests": dict(outcomes)},
        "latencies": [latencies[model] for model in sorted(latencies)],
        "latencies_minutes": MINUTES,
    }


def _percentiles(found: Distribution) -> dict[str, Any]:
    """Seconds."""
    named = {"p50": found.quantile(0.5), "p95": found.quantile(0.95), "p99": found.quantile(0.99)}
    return {"count": found.count, **{name: None if s is None else round(s, 5) for name, s in named.items()}}
