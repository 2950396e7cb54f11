"""Starts and ends this machine's workers by what waits for them, and tells the store that something here does.

Looks at the store and at the supervisor's children, and says which of these are wanted; the supervisor does the rest. The
rules are in `scripts/scaling.py`. As long as it is told that something here starts workers, the API accepts requests for a
model that has none.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from scripts.child import Child, Ended
from scripts.scaling import Loads, Range, Scale, Seen
from scripts.supervisor import Supervisor
from shared import keys
from shared.connection import connect
from shared.scripts import Busy, Demand, Scripts

#: Between two looks, s.
LOOK_S = 0.25
#: How long the word holds that workers can be started, and how often it is renewed, s.
HOLDS_S, RENEWED_S = 15, 5.0


@dataclass
class ScaledPool:
    """The workers of one engine and model. `children`: as many as there may be; `source`: changes with whatever makes the
    model another one (`source_of`)."""

    model: str
    range: Range
    children: Sequence[Child]
    source: str


@dataclass
class _State:
    """What is remembered of a pool between two looks. `live`: runs that have been seen serving; `ends`: the last end of each
    child that was looked at; `told`: what the store was told, and when."""

    scale: Scale
    loads: Loads = field(default_factory=Loads)
    known: bool = False
    live: set[str] = field(default_factory=set)
    ends: dict[str, Ended | None] = field(default_factory=dict)
    told: tuple[str, float] = ("", 0.0)


def source_of(*parts: str) -> str:
    """A digest of what a model is served from."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Scaler(threading.Thread):
    """Runs until the supervisor stops. `say`: a line for the log."""

    def __init__(
        self,
        url: str,
        pools: Sequence[ScaledPool],
        supervisor: Supervisor,
        *,
        idle_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(daemon=True, name="scaler")
        self._store: Any = connect(url, max_connections=1)
        self._scripts = Scripts(self._store)
        self._pools = [(pool, _State(Scale(pool.range, idle_s))) for pool in pools]
        self._supervisor = supervisor
        self._say = say
        self._clock = clock
        self._name = secrets.token_hex(4)
        self._pause = threading.Event()

    def run(self) -> None:
        while self._pools and not self._supervisor.stopping:
            for pool, state in self._pools:
                try:
                    self._look(pool, state)
                except redis.RedisError:
                    pass  # the store is away; the supervisor says so, and the next look is soon
            self._pause.wait(LOOK_S)

    def _look(self, pool: ScaledPool, state: _State) -> None:
        now = self._clock()
        self._note_ends(pool, state, now)
        self._tell(pool, state, now)
        seen = self._seen(pool, state, self._scripts.demand(pool.model), now)
        if state.loads.failing(now) and not seen.waiting:
            self._give_up(pool, state)
            return
        change = state.scale.decide(seen, known=state.known)
        if change is None:
            return
        if change.start:
            self._start(pool, seen)
        else:
            self._end(pool, change.end)
        self._supervisor.wake()

    def _seen(self, pool: ScaledPool, state: _State, demand: Demand, now: float) -> Seen:
        own: list[Busy] = []
        starting, ours = 0, set[str]()
        for child in pool.children:
            found = [worker for worker in demand.workers if _is_run(worker.name, child.run_name)]
            ours.update(worker.name for worker in found)
            if not child.wanted:
                continue
            if found and child.pid is not None and child.asked is None:
                own += found[:1]
                self._note_live(pool, state, child, now)
            else:
                starting += 1
        others = [worker for worker in demand.workers if worker.name not in ours]
        return Seen(now, demand.waiting, demand.wait_s, own, starting, others)

    def _note_live(self, pool: ScaledPool, state: _State, child: Child, now: float) -> None:
        if child.run_name in state.live:
            return
        state.live.add(child.run_name)
        state.scale.load_s = max(0.0, now - child.started)
        state.loads.succeeded()
        self._store.hset(keys.card(pool.model), "source", pool.source)
        state.known, state.told = True, ("", 0.0)

    def _note_ends(self, pool: ScaledPool, state: _State, now: float) -> None:
        """A process that ended by itself before it served has failed to load. (One that was killed may do better next time.)"""
        for child in pool.children:
            end = child.last_end
            if end is None or end is state.ends.get(child.name):
                continue
            state.ends[child.name] = end
            if end.run_name not in state.live and not end.asked and end.status >= 0:
                state.loads.failed(now)
            state.live.discard(end.run_name)

    def _tell(self, pool: ScaledPool, state: _State, now: float) -> None:
        """Whether workers can be started here. Says no only where nobody else says yes."""
        word = "failed" if state.loads.failing(now) else "up"
        told, at = state.told
        if word == told and now - at < RENEWED_S:
            return
        key = keys.starter(pool.model)
        if word == "up" or (said := self._store.get(key)) is None or said.endswith(self._name.encode()):
            self._store.set(key, f"{word} {self._name}", ex=HOLDS_S)
        if word == "failed" != told:
            self._say(f"!!! {pool.model} cannot be loaded: whoever asks for it is refused for now")
        card, source = self._store.hmget(keys.card(pool.model), "card", "source")
        state.known = card is not None and source == pool.source.encode()
        state.told = (word, now)

    def _start(self, pool: ScaledPool, seen: Seen) -> None:
        idle = [child for child in pool.children if not child.wanted]
        free = [child for child in idle if child.pid is None] or idle  # else one that is about to end starts again
        if free:
            self._say(f"{pool.model}: {seen.waiting} waiting, {seen.running} workers: starting {free[0].name}")
            free[0].wanted = True

    def _end(self, pool: ScaledPool, name: str | None) -> None:
        """Unless it has got something to do since."""
        for child in pool.children:
            if name is not None and _is_run(name, child.run_name) and not self._store.hlen(keys.lanes(name)):
                child.wanted = False

    def _give_up(self, pool: ScaledPool, state: _State) -> None:
        """Nobody waits for what cannot be loaded; the next who asks starts it again. What must run is tried on."""
        low = pool.range.low if state.known else max(1, pool.range.low)
        for child in list(pool.children)[low:]:
            if child.wanted and child.pid is None:
                child.wanted = False


def _is_run(worker: str, run_name: str) -> bool:
    """Whether this is the worker of that run; one that was retired has gone on under a longer name."""
    return worker == run_name or worker.startswith(f"{run_name}~")
