"""What Sluice measures about itself: names, labels, and how they lie in the store.

Counters and histograms are counted up in two places: by the Lua scripts, where something happens in the store (an end, a
take, a failover), and by processes, which tell the store what they have counted (`shared/counts.py`). So they are those of
the whole system, whichever process is asked, and outlive every process. The store's hash `sluice:counts` has a field a
number: `{measure}|{label}|...` of a counter; of a histogram `{measure}|{bucket}|{label}|...`, where the bucket is a number
from 0, or `us`, the sum in microseconds. `sluice:lately:{minute}` has the same of the histograms, of that minute.
Knows nothing of Prometheus; `api/metrics.py` makes its text of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

#: Upper bounds of buckets, s. SECONDS is also in lua/_prelude.lua.
SECONDS = (
    *(0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0),
    *(1.5, 2.5, 4.0, 6.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
GAPS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
LAGS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
CALLS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Between the parts of a field's name. Only the last label may hold it.
DIVIDER = "|"
#: The bucket of a histogram's sum.
SUM = "us"


class Measure(NamedTuple):
    """A counter, or with `bounds` (s, ascending) a histogram. Its last label may hold anything; values of the others are
    words of ours."""

    name: str
    words: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


OF_MODEL = ("model",)
OF_CLASS = ("class", "model")

MEASURES = {
    measure.name: measure
    for measure in (
        Measure("requests", "Requests that have ended, by how.", ("outcome", "class", "model")),
        Measure("prompt_tokens", "Prompt tokens of requests that have ended.", OF_CLASS),
        Measure("completion_tokens", "Sampled tokens of requests that have ended.", OF_CLASS),
        Measure("generated_tokens", "Tokens sampled by workers so far, of running requests too.", OF_MODEL),
        Measure("finish_reasons", "Choices that have ended well, by finish_reason.", ("reason", "model")),
        Measure("out_of_memory", "How often an engine ran out of memory.", OF_MODEL),
        Measure("failovers", "Requests taken back from a worker that died.", OF_MODEL),
        Measure("handovers", "Requests that a live worker gave back, to stop or to make room.", OF_MODEL),
        Measure("put_backs", "Requests that a worker put back after the store had lost of them.", OF_MODEL),
        Measure("workers_lost", "Workers that died.", OF_MODEL),
        Measure("gap_repairs", "Streams completed from the log after frames had not arrived."),
        Measure(
            "http_requests",
            "HTTP requests answered, by route, class of status and, where one was asked for, model.",
            ("endpoint", "status", "model"),
        ),
        Measure("queue_time", "From submission to the first take by a worker.", OF_CLASS, SECONDS),
        Measure("request_duration", "From submission to the end.", OF_CLASS, SECONDS),
        Measure("time_to_first_token", "From the arrival of a request to its first token.", OF_MODEL, SECONDS),
        Measure("inter_token_latency", "Between a choice's tokens, as they go to the client.", OF_MODEL, GAPS),
        Measure("relay_lag", "From a frame's arrival in an API process to its way to the client.", (), LAGS),
        Measure("http_request_duration", "From an HTTP request's arrival to its last byte out.", ("endpoint",), CALLS),
    )
}

#: What a label is if it is none that is known: of models, those that have no card.
OTHER = "other"


def field(measure: str, *parts: str) -> str:
    """The name of a number in the store: `parts` are the bucket, of a histogram, and the labels."""
    return DIVIDER.join((measure, *parts))


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's numbers: how many were in each bucket, the last of which has no upper bound; `total`: their sum, s."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """About the value, s, below which the share `q` lies: linear within its bucket. None: there is nothing; beyond the
        last bound, that bound."""
        wanted, below = q * self.count, 0
        if not self.count:
            return None
        for count, (low, high) in zip(self.counts, pairwise((0.0, *self.bounds)), strict=False):
            if count and below + count >= wanted:
                return low + (high - low) * (wanted - below) / count
            below += count
        return self.bounds[-1]


class Numbers(NamedTuple):
    """What the store has counted: measure -> labels -> number, or distribution."""

    counters: dict[str, dict[tuple[str, ...], int]]
    histograms: dict[str, dict[tuple[str, ...], Distribution]]


def read(hashes: Sequence[Mapping[bytes, bytes]]) -> Numbers:
    """The sums of hashes out of the store. What is no number of ours is left out: anybody may have written there."""
    counters: dict[str, dict[tuple[str, ...], int]] = {}
    histograms: dict[str, dict[tuple[str, ...], Distribution]] = {}
    for raw in (item for each in hashes for item in each.items()):
        try:
            name, _, rest = raw[0].decode().partition(DIVIDER)
            measure, number = MEASURES[name], int(raw[1])
            parts = tuple(rest.split(DIVIDER, len(measure.labels) - (not measure.bounds))) if rest else ()
            labels = parts[bool(measure.bounds) :]
            if len(labels) != len(measure.labels):
                continue
            if not measure.bounds:
                rows = counters.setdefault(name, {})
                rows[labels] = rows.get(labels, 0) + number
                continue
            empty = Distribution(measure.bounds, [0] * (len(measure.bounds) + 1))
            known = histograms.setdefault(name, {}).setdefault(labels, empty)
            if parts[0] == SUM:
                histograms[name][labels] = replace(known, total=known.total + number / 1e6)
            else:
                known.counts[int(parts[0])] += number
        except (KeyError, ValueError, IndexError):
            continue
    return Numbers(counters, histograms)
