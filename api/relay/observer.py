"""Measures one new request on its way to its client: time to the first token, between tokens, through this process.

Works once for each wake-up of the client's greenlet, with a few additions to arrays that all requests of a model share. A
request that is followed a second time is not measured again. Knows frames and the clock; nothing of the store and of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from api.relay.builder import Builder
from shared.counts import Counts
from shared.frames import Delta, Frame
from shared.jobs import Job


class Follower(Protocol):
    """Who else sees what goes to the client."""

    def feed(self, frames: Sequence[Frame], now: float) -> None:
        """`now`: monotonic, s."""

    def close(self, builder: Builder, now: float) -> None:
        """The request has ended, or its client has left."""


class Observer:
    """`began`: when the request arrived, monotonic, s."""

    __slots__ = ("_began", "_clock", "_first_token", "_follower", "_gaps", "_lags", "_last", "_several")

    def __init__(
        self,
        counts: Counts,
        job: Job,
        began: float,
        *,
        follower: Follower | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._began = began
        self._follower = follower
        self._clock = clock
        self._first_token = counts.histogram("time_to_first_token", job.model)
        self._gaps = counts.histogram("inter_token_latency", job.model)
        self._lags = counts.histogram("relay_lag")
        self._several = job.choices > 1
        #: When the last tokens went to the client; 0: none have.
        self._last = 0.0

    def feed(self, frames: Sequence[Frame], ready_at: float) -> None:
        """Frames that go to the client now; the first of them has lain here since `ready_at`, monotonic, s."""
        now = self._clock()
        self._lags.observe(now - ready_at)
        if self._follower is not None:
            self._follower.feed(frames, now)
        tokens = 0
        for frame in frames:
            if isinstance(frame, Delta):
                tokens += len(frame.t)
        if not tokens:
            return
        if self._last:
            gap = (now - self._last) / tokens
            if self._several:  # they come side by side
                gap *= len({frame.i for frame in frames if isinstance(frame, Delta)})
            self._gaps.observe(gap, tokens)
        else:
            self._first_token.observe(now - self._began)
        self._last = now

    def close(self, builder: Builder) -> None:
        """Once; later calls change nothing."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close(builder, self._clock())
