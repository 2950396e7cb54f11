"""Tells the API, through the store, that something here starts workers for a model.

As long as it is told, a request for a model whose only worker just died waits for the next one instead of being refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import redis

from shared import keys
from shared.connection import connect

#: How long the word holds, and how often it is renewed, s.
HOLDS_S, RENEWED_S = 15, 5


class Starter(threading.Thread):
    """Renews `starter:{model}` for `models` until `stopping()`; what was said last then runs out by itself."""

    def __init__(self, url: str, models: Iterable[str], stopping: Callable[[], bool]) -> None:
        super().__init__(daemon=True, name="starter")
        self._client = connect(url, max_connections=1)
        self._models = list(models)
        self._stopping = stopping
        self._pause = threading.Event()

    def run(self) -> None:
        while self._models and not self._stopping():
            try:
                for model in self._models:
                    self._client.set(keys.starter(model), "up", ex=HOLDS_S)
            except redis.RedisError:
                pass  # the store is away; the supervisor says so, and the next round tells it again
            self._pause.wait(RENEWED_S)
