"""Metrics and the monitor on a real stack of two API processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.recent import MOST
from shared import keys
from shared.counts import Counts
from tests.conftest import ROOT, Store, script, wait_for
from tests.stack import ANSWER_S, SCRIPTED, Chat, Stack, endless

SECRET = "sk-sluice-" + "0a" * 32


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("watched"), options=["--api-workers", "2"], request_monitor=True) as watched:
        yield watched


def samples(stack: Stack) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a scrape, which must be whole."""
    answer = stack.call("GET", "/metrics")
    assert answer.status == 200, answer
    families = text_string_to_metric_families(answer.raw.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """The sum over what has these labels."""
    return sum(n for (known, has), n in found.items() if known == name and labels.items() <= set(has))


def events(stack: Stack) -> Iterator[dict[str, Any]]:
    connection = stack.connect(ANSWER_S)
    try:
        connection.request("GET", "/monitor/events")
        response = connection.getresponse()
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_scrapes_over_two_processes_add_up_to_the_load(watched: Stack) -> None:
    before = samples(watched)
    answers: list[int] = []
    load = [lambda: watched.complete(script("a", "b", "c"), max_tokens=10).status] * 30
    load += [lambda: watched.complete(script("a", "b", "c"), max_tokens=2).status] * 10
    load += [lambda: watched.complete(script("a"), model="nope").status] * 4
    threads = [
        threading.Thread(target=lambda some=some: answers.extend(one() for one in some))
        for some in (load[::2], load[1::2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200] * 40 + [404] * 4

    def grown(name: str, **labels: str) -> float:
        now = samples(watched)
        return value(now, name, **labels) - value(before, name, **labels)

    route = {"endpoint": "/v1/completions"}
    wait_for(lambda: grown("sluice_http_requests_total", status="2xx", **route) == 40, 15)
    wait_for(lambda: grown("sluice_time_to_first_token_seconds_count", model=SCRIPTED) == 40, 15)
    wait_for(lambda: grown("sluice_finish_reasons_total", reason="stop", model=SCRIPTED) == 30, 15)
    wait_for(lambda: grown("sluice_generated_tokens_total", model=SCRIPTED) == 30 * 4 + 10 * 2, 15)
    assert grown("sluice_http_requests_total", status="4xx", model="", **route) == 4
    assert grown("sluice_requests_total", outcome="completed", model=SCRIPTED) == 40
    assert grown("sluice_completion_tokens_total", model=SCRIPTED) == 30 * 4 + 10 * 2
    assert grown("sluice_finish_reasons_total", reason="length", model=SCRIPTED) == 10
    assert grown("sluice_queue_time_seconds_count", model=SCRIPTED) == 40
    assert grown("sluice_request_duration_seconds_count", model=SCRIPTED) == 40
    now = samples(watched)
    assert value(now, "sluice_api_processes") == 2
    assert value(now, "sluice_lanes", state="free") == 64
    assert value(now, "sluice_store_up") == 1
    assert not [labels for name, labels in now if ("model", "nope") in labels]


def test_events_show_a_request_from_its_start_to_its_cancellation(watched: Stack) -> None:
    with watched.open(endless(delay_ms=20)) as stream:
        stream.goes_on(3)
        seen = events(watched)
        row = next(row for state in seen for row in state["running"] if row["id"] == stream.id)
        assert (row["kind"], row["model"], row["class"]) == ("completion", SCRIPTED, "interactive")
        assert next(state for state in seen if any(r["tokens"] > row["tokens"] for r in state["running"]))
        assert watched.cancel(row["id"]).status == 200
        stream.read()
        assert stream.error and stream.error["code"] == "cancelled"
        assert next(state for state in seen if not any(r["id"] == stream.id for r in state["running"]))
        seen.close()


def test_the_ring_is_bounded_and_has_no_keys(watched: Stack) -> None:
    watched.call("POST", "/v1/completions", {"model": SCRIPTED, "prompt": f"my key {SECRET} " + "x" * 9000})
    watched.complete(Chat([{"role": "user", "content": "a chat"}]))
    watched.complete(script("private"), store=False)
    for _ in range(MOST):
        watched.complete(script("a"))

    def ring() -> list[dict[str, Any]]:
        recent: list[dict[str, Any]] = watched.call("GET", "/monitor/state").json["recent"]
        return recent

    with watched.store() as store:
        wait_for(lambda: store.xlen(keys.RECENT) == MOST == len(ring()), 15)
    watched.call("POST", "/v1/completions", {"model": SCRIPTED, "prompt": f"my key {SECRET} " + "x" * 9000})
    watched.complete(Chat([{"role": "user", "content": "a chat"}]))
    watched.complete(script("private"), store=False)
    wait_for(lambda: any(row["prompt"] is None for row in ring()) and any(row["kind"] == "chat" for row in ring()), 15)
    shown = ring()
    assert len(shown) == MOST
    assert SECRET not in json.dumps(shown)
    assert any((row["prompt"] or "").startswith("my key sk-") for row in shown)
    assert all(len(row[field] or "") <= 501 for row in shown for field in ("prompt", "text"))
    assert "private" not in json.dumps(shown)


def test_top_prints_the_same(watched: Stack) -> None:
    def top(option: str) -> str:
        command = [sys.executable, "-m", "scripts.cli", "top", option, "--url", f"http://127.0.0.1:{watched.port}"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "COLUMNS": "140"}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(top("--json")).keys() >= {"workers", "queues", "latencies", "running", "totals"}
    shown = top("--once")
    assert "running requests" in shown and SCRIPTED in shown


def test_a_number_is_told_once_however_often(store: Store) -> None:
    counts = Counts(store.client)
    counts.add("failovers", ["m"], 2)
    counts.histogram("queue_time", "batch", "m").observe(0.3)
    telling = counts._take()
    assert telling is not None
    for _ in range(2):  # as if the first answer had been lost
        counts._telling = telling
        counts.tell()
    assert store.client.hget(keys.COUNTS, "failovers|m") == b"2"
    [lately] = store.client.keys("sluice:lately:*")
    assert store.client.hget(lately, "queue_time|us|batch|m") == b"300000"
    assert 0 < store.client.ttl(lately) <= 600


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt-get install prometheus)")
def test_promtool_has_no_complaints() -> None:
    for arguments in (
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    ):
        subprocess.run(["promtool", *arguments], cwd=ROOT / "deploy/prometheus", check=True, timeout=60)


def test_a_scrape_does_not_hold_up_streams(watched: Stack) -> None:
    with watched.open(script("t ", repeat=300, delay_ms=5), max_tokens=300) as stream:
        scraping = threading.Event()

        def scrape() -> None:
            while not scraping.is_set():
                samples(watched)
                time.sleep(0.1)

        thread = threading.Thread(target=scrape)
        thread.start()
        stream.read()
        scraping.set()
        thread.join()
    assert max(b - a for a, b in zip(stream.times, stream.times[1:], strict=False)) < 1.0
