"""The store's side of the API in memory: a hub and a gateway that answer from a script.

Only for tests of what a client sees; the real ones have tests of their own.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from api.relay.hub import ClientGone
from shared.cards import ModelCard
from shared.errors import ModelNotFound, SluiceError
from shared.frames import End, Error, Frame, Name
from shared.jobs import Job, Placement
from shared.scripts import Place

CARD = ModelCard(
    id="scripted", engine="scripted", context=1000, vocab_size=65536, lanes=4, fingerprint="fp", aliases=("alias",)
)
SLASHED = ModelCard(id="org/model", engine="x", context=100, vocab_size=10, lanes=1, fingerprint="f2", created=5)

#: What the store says to a submitted job: frames (one entry each), lists of frames (one entry), exceptions.
Script = Callable[[Job], Iterator[Frame | list[Frame] | Exception]]

_GONE = object()


class FakeSubscription:
    def __init__(self) -> None:
        self._items: queue.Queue[Any] = queue.Queue()
        self._last = Name(5, 0)
        self.closed = False
        self.pushed = True
        self.ready_at = time.monotonic()

    def push(self, item: Frame | list[Frame] | Exception) -> None:
        if isinstance(item, Exception):
            self._items.put(item)
            return
        frames = item if isinstance(item, list) else [item]
        a = self._last.a + 1 if isinstance(frames[-1], End | Error) else self._last.a
        self._last = Name(a, self._last.s + len(frames))
        self._items.put((self._last, frames))

    def get(self, timeout: float) -> tuple[Name, list[Frame]] | None:
        try:
            item = self._items.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None
        if item is _GONE:
            raise ClientGone
        if isinstance(item, Exception):
            raise item
        got: tuple[Name, list[Frame]] = item
        return got

    def hang_up(self) -> None:
        self._items.put(_GONE)

    def fail(self, error: SluiceError) -> None:
        self._items.put(error)

    def close(self) -> None:
        self.closed = True


class FakeStore:
    """Hub and gateway in one. `script` runs at submission, in the submitter's thread."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.placements: list[Placement] = []
        self.detached: list[str] = []
        self.open_subscriptions: dict[str, FakeSubscription] = {}
        self.places: list[Place | None] = []
        self.alive = True
        self.calls: list[str] = []
        self.tokenizers: dict[str, str] = {}

    # hub
    def open(self, job_id: str) -> FakeSubscription:
        self.calls.append("open")
        self.open_subscriptions[job_id] = FakeSubscription()
        return self.open_subscriptions[job_id]

    def following(self) -> set[str]:
        return {job_id for job_id, subscription in self.open_subscriptions.items() if not subscription.closed}

    def stop(self) -> None:
        self.calls.append("stop")

    # gateway
    def submit(self, job: Job, placement: Placement = Placement(), *, followed: bool = True) -> str:  # noqa: B008
        self.calls.append("submit")
        self.jobs.append(job)
        self.placements.append(placement)
        for item in self.script(job) if self.script else ():
            self.open_subscriptions[job.id].push(item)
        return job.id

    def detach(self, job_id: str) -> None:
        self.detached.append(job_id)

    def leave(self) -> None:
        self.calls.append("leave")

    def position(self, job_id: str) -> Place | None:
        return self.places.pop(0) if self.places else None

    def cards(self) -> list[ModelCard]:
        return [CARD, SLASHED]

    def tokenizer(self, sha: str) -> str | None:
        return self.tokenizers.get(sha)

    def card(self, model: str | None, *, unserved: bool = False) -> ModelCard:
        for card in self.cards():
            if model is None or model == card.id or model in card.aliases:
                return card
        raise ModelNotFound(f"The model {model!r} does not exist.", param="model")

    def status(self) -> dict[str, Any]:
        return {"models": [], "workers": [], "queues": [], "nodes": []}

    def ping(self) -> bool:
        return self.alive
