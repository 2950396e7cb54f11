"""Batch work gives way: when interactive requests wait and no lane is free, the youngest lanes with batch work are handed
over through their logs, to go on when there is room.

Knows lanes and the store's answer how many are wanted; nothing of engines. What is waiting is judged in wanted.lua.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.cards import ModelCard
from shared.scripts import Scripts
from workers.lane import Lane

log = structlog.get_logger(__name__)


class Preemption:
    """`running`: this worker's lanes; `free`: how many more it could hold. `hand_over` gets the id of each job that is to
    go on later."""

    def __init__(
        self,
        scripts: Scripts,
        card: ModelCard,
        *,
        worker: Callable[[], str],
        running: Callable[[], list[Lane]],
        free: Callable[[], int],
        hand_over: Callable[[str], None],
    ) -> None:
        self._scripts, self._card = scripts, card
        self._worker, self._running, self._free, self._hand_over = worker, running, free, hand_over
        #: Told to give way, and not gone yet: the engine may be in the middle of a step.
        self._leaving: set[Lane] = set()

    def make_room(self) -> bool:
        """Hands over as many lanes with batch work as are wanted. True if there are any that might be wanted later.

        Raises redis.RedisError."""
        lanes = self._running()
        self._leaving &= set(lanes)
        batch = sorted(
            (lane for lane in lanes if lane.gives_way and not lane.over and lane not in self._leaving),
            key=lambda lane: lane.attempt,
        )
        if not batch:
            return bool(self._leaving)
        wanted = self._scripts.wanted(
            self._worker(),
            self._card.id,
            self._card.fingerprint,
            free=max(0, self._free()),
            batch=sum(map(self._width, batch)),
            yielding=sum(map(self._width, self._leaving)),
            lanes=self._card.lanes,
        )
        while wanted > 0 and batch:
            lane = batch.pop()
            log.info("batch_gives_way", job=lane.job.id)
            self._leaving.add(lane)
            self._hand_over(lane.job.id)
            wanted -= self._width(lane)
        return True

    def _width(self, lane: Lane) -> int:
        return min(lane.job.choices, self._card.lanes)
