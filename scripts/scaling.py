"""How many workers a model should have: the rules, as a function of what is seen of its queue and its workers.

Starts nothing and asks nobody: `scripts/scaler.py` looks and acts. docs/scaling.md says why the rules are these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.scripts import Busy

#: How long requests must be waiting before another worker is started beside those that serve, s: they may be about to be taken.
SETTLE_S = 0.5
#: So many loads in a row that fail, and the model counts as one that cannot be loaded, for so long, s.
TRIES, FAILING_S = 3, 30.0


@dataclass(frozen=True)
class Range:
    """The fewest and the most workers of a pool."""

    low: int
    high: int


@dataclass(frozen=True)
class Seen:
    """A pool at one moment. `now`: monotonic, s; `own`: its live workers, `starting`: those it has begun to start;
    `others`: live workers of its model that are not the pool's; `wait_s`: until what waits will have been taken, if known."""

    now: float
    waiting: int = 0
    wait_s: float | None = None
    own: Sequence[Busy] = ()
    starting: int = 0
    others: Sequence[Busy] = ()

    @property
    def running(self) -> int:
        return len(self.own) + self.starting


@dataclass(frozen=True)
class Change:
    """What to do now: start a worker, or end the one named `end`."""

    start: bool = False
    end: str | None = None


class Scale:
    """Decides for one pool, one step at a time. `idle_s`: how long a worker must have been too many. `load_s`: what the last
    load took, 0 before there was one."""

    def __init__(self, range_: Range, idle_s: float) -> None:
        self.range = range_
        self.load_s = 0.0
        self._idle_s = idle_s
        self._waiting_since: float | None = None
        self._spare_since: float | None = None

    def decide(self, seen: Seen, *, known: bool) -> Change | None:
        """`known`: the store has the model's card; else a worker is started to write it, whatever waits."""
        low = self.range.low if known else max(1, self.range.low)
        if seen.running < low or self._is_short(seen):
            self._waiting_since = self._spare_since = None
            return Change(start=True)
        name = self._spare(seen, low)
        return None if name is None else Change(end=name)

    def _is_short(self, seen: Seen) -> bool:
        """One at a time: what is loading is waited for."""
        if not seen.waiting or seen.starting or seen.running >= self.range.high:
            self._waiting_since = None
            return False
        if not seen.own and not seen.others:
            return True
        if self._waiting_since is None:
            self._waiting_since = seen.now
        waited = seen.now - self._waiting_since
        if waited < SETTLE_S:
            return False
        return seen.wait_s is None or max(seen.wait_s, waited) > self.load_s

    def _spare(self, seen: Seen, low: int) -> str | None:
        """A worker that has nothing to do and that the others could do without for `idle_s`."""
        if not self._is_spare(seen, low):
            self._spare_since = None
            return None
        if self._spare_since is None:
            self._spare_since = seen.now
        idle = [worker.name for worker in seen.own if not worker.used]
        if not idle or seen.now - self._spare_since < self._idle_s:
            return None
        self._spare_since = seen.now  # the next one is not too many since then
        return idle[-1]

    @staticmethod
    def _is_spare(seen: Seen, low: int) -> bool:
        if seen.waiting or seen.starting or seen.running <= low:
            return False
        workers = [*seen.own, *seen.others]
        left = sum(worker.lanes for worker in workers) - max(worker.lanes for worker in seen.own)
        return sum(worker.used for worker in workers) <= left


class Loads:
    """Whether a model can be loaded, by how the last tries ended."""

    def __init__(self) -> None:
        self._failed = 0
        self._failing_until = 0.0

    def succeeded(self) -> None:
        self._failed, self._failing_until = 0, 0.0

    def failed(self, now: float) -> None:
        self._failed += 1
        if self._failed >= TRIES:
            self._failing_until = now + FAILING_S

    def failing(self, now: float) -> bool:
        """For a while after so many tries; then the next one counts again."""
        return now < self._failing_until
