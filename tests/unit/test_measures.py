"""What is measured: names in code, documents, alerts and dashboard agree; distributions, and numbers that are told once."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.gateway import Gateway
from api.metrics import GAUGES, PREFIX, Metrics, exposed, names
from api.relay.observer import Observer
from shared import measures
from shared.counts import Counts
from shared.frames import Delta
from shared.jobs import Job
from shared.measures import MEASURES, SECONDS, Distribution
from tests.conftest import ROOT
from tests.unit.fakes import FakeStore

TABLE_ROW = re.compile(r"\| `(sluice_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|")
METRIC = re.compile(r"\bsluice_[a-z_]+\b")


def test_the_documented_metrics_are_those_of_the_code() -> None:
    rows = TABLE_ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    written = {name: (kind, tuple(filter(None, labels.split(", "))), words) for name, kind, labels, words in rows}
    expected = {PREFIX + name: ("gauge", labels, words) for name, (words, labels) in GAUGES.items()}
    for m in MEASURES.values():
        expected[exposed(m)] = ("histogram" if m.bounds else "counter", m.labels, m.words)
    assert written == expected
    assert len(rows) == len(names())


def test_alerts_and_dashboard_use_the_metrics_that_there_are_and_all_of_them() -> None:
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    dashboard = json.loads((ROOT / "deploy/grafana/sluice.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    in_use = {
        re.sub(r"(_seconds)_(bucket|sum|count)$", r"\1", name)
        for name in METRIC.findall(alerts + " ".join(expressions))
    }
    assert in_use == names().keys()


def test_what_is_exposed_is_what_is_named() -> None:
    store = FakeStore()
    gateway: Gateway = store  # type: ignore[assignment]
    told = Metrics(None, gateway, Counts(None)).text().decode()
    shown = {f.name + ("_total" if f.type == "counter" else "") for f in text_string_to_metric_families(told)}
    assert shown == names().keys() - {"sluice_store_memory_bytes", "sluice_store_memory_limit_bytes"}


def test_the_scripts_have_the_same_buckets() -> None:
    lua = (files("shared") / "lua" / "_prelude.lua").read_text()
    found = re.search(r"local SECONDS = \{([^}]*)\}", lua)
    assert found and tuple(map(float, found[1].split(","))) == SECONDS


def test_quantiles_are_linear_within_a_bucket() -> None:
    found = Distribution((1.0, 2.0, 4.0), [10, 10, 0, 0])
    assert found.quantile(0.5) == pytest.approx(1.0)
    assert found.quantile(0.75) == pytest.approx(1.5)
    assert Distribution((1.0, 2.0), [0, 0, 5]).quantile(0.5) == 2.0
    assert Distribution((1.0,), [0, 0]).quantile(0.5) is None


def test_foreign_numbers_are_left_out() -> None:
    raw = {
        b"failovers|m|odd": b"2",
        b"failovers": b"1",
        b"nothing|m": b"1",
        b"gap_repairs": b"x",
        b"queue_time|99|interactive|m": b"1",
        b"\xff": b"1",
    }
    found = measures.read([raw])
    assert found.counters == {"failovers": {("m|odd",): 2}}
    assert all(not d.count for rows in found.histograms.values() for d in rows.values())


@pytest.mark.parametrize(("choices", "frames", "gap", "times"), [(1, 1, 1.0, 1), (1, 4, 0.25, 4), (2, 2, 1.0, 2)])
def test_gaps_are_those_between_the_tokens_of_one_choice(choices: int, frames: int, gap: float, times: int) -> None:
    now = [10.0]
    counts = Counts(None)
    job = Job(id="cmpl-1", model="m", prompts=["p"], seed=1, created=1, n=choices)
    observer = Observer(counts, job, 9.5, clock=lambda: now[0])
    observer.feed([Delta(i=i, t=[5]) for i in range(choices)], 10.0)
    now[0] = 11.0
    observer.feed([Delta(i=k % choices, t=[5]) for k in range(frames)], 10.9)
    gaps, first, lags = (
        counts.histogram(*named)
        for named in (("inter_token_latency", "m"), ("time_to_first_token", "m"), ("relay_lag",))
    )
    assert (sum(gaps.counts), gaps.total) == (times, pytest.approx(gap * times))
    assert (sum(first.counts), first.total) == (1, pytest.approx(0.5))
    assert (sum(lags.counts), lags.total) == (2, pytest.approx(0.1))
