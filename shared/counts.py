"""What one process has counted and tells the store once in a while: each number once, however often it has to be told.

Counting costs no round trip. Any thread may add; histograms are observed without a lock, by the greenlets of one thread. What a killed process had not
told yet is lost, a second's worth. Knows how numbers are named (`shared/measures.py`), not what they mean.
"""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import redis

from shared.measures import MEASURES, SUM, field
from shared.scripts import Scripts


class Histogram:
    """What was observed and not told yet. `labels` as in its measure."""

    __slots__ = ("bounds", "counts", "labels", "measure", "total")

    def __init__(self, measure: str, labels: tuple[str, ...]) -> None:
        self.measure = measure
        self.labels = labels
        self.bounds = MEASURES[measure].bounds
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def take(self) -> dict[str, int]:
        """The numbers by field, which are taken out."""
        taken = {}
        for bucket, count in enumerate(self.counts):
            if count:
                self.counts[bucket] -= count
                taken[field(self.measure, str(bucket), *self.labels)] = count
        if taken:
            total, self.total = self.total, 0.0
            taken[field(self.measure, SUM, *self.labels)] = round(total * 1e6)
        return taken


class Counts:
    """`store` None: nobody is told (tests)."""

    def __init__(self, store: redis.Redis | None) -> None:
        self._scripts = None if store is None else Scripts(store)
        self._name = secrets.token_hex(8)
        self._told = 0
        self._lock = threading.Lock()
        self._tells = threading.Lock()
        self._new: dict[str, int] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        #: What was told without an answer: it must be told again as it was.
        self._telling: list[str | int] | None = None

    def add(self, measure: str, labels: Sequence[str] = (), by: int = 1) -> None:
        name = field(measure, *labels)
        with self._lock:
            self._new[name] = self._new.get(name, 0) + by

    def histogram(self, measure: str, *labels: str) -> Histogram:
        """The one of these labels, to be observed with; whoever observes often keeps it."""
        known = self._histograms.get((measure, labels))
        if known is None:
            known = self._histograms[measure, labels] = Histogram(measure, labels)
        return known

    def tell(self) -> None:
        """Tells the store what is new. Raises redis.RedisError; then it is told the next time."""
        if self._scripts is None:
            return
        with self._tells:
            while (telling := self._telling or self._take()) is not None:
                self._telling = telling
                self._scripts.call("count", self._name, *telling)
                self._telling = None

    def _take(self) -> list[str | int] | None:
        """Arguments of count.lua; None: there is nothing new."""
        observed: dict[str, int] = {}
        for histogram in list(self._histograms.values()):
            observed.update(histogram.take())
        with self._lock:
            counted, self._new = self._new, {}
        if not (observed or counted):
            return None
        self._told += 1
        pairs: list[Any] = [part for pair in (*observed.items(), *counted.items()) for part in pair]
        return [self._told, len(observed), *pairs]
