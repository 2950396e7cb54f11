"""Progress of a model load: a bar on a terminal, a log line each tenth elsewhere; and in the store, where those who wait for
the model find it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import redis
import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shared.connection import connect
from shared.scripts import Scripts
from workers.engines.base import Progress as Report

log = structlog.get_logger(__name__)

#: Between two looks whether there is something to tell, and between two tellings of the same, s.
LOOK, RENEW = 0.25, 3.0


@contextmanager
def load_progress() -> Iterator[Report]:
    """Yields the function that an engine calls with the part done (0..1) and what is being done."""
    if not sys.stderr.isatty():
        yield _logged()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0)

        def report(done: float, what: str) -> None:
            bar.update(task, completed=done, description=what)

        yield report


def _logged() -> Report:
    said = ("", -1)

    def report(done: float, what: str) -> None:
        nonlocal said
        now = (what, int(done * 10))
        if now != said:
            said = now
            log.info("loading", what=what, percent=round(done * 100))

    return report


class ToldProgress(threading.Thread):
    """Tells the store how far `worker` has loaded `model`. A context manager: with an error, it tells that it does not load any
    more; else the worker does, once it serves.

    A thread, so that an engine never waits for the store. What the store could not be told is told with the next round."""

    def __init__(self, url: str, worker: str, model: str) -> None:
        super().__init__(name="told-progress", daemon=True)
        self._scripts = Scripts(connect(url, max_connections=1))
        self._worker, self._model = worker, model
        self._percent = 0
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join(RENEW)
        if error[0] is not None:
            self._tell(None)

    def report(self, done: float) -> None:
        """The part done, 0 to 1."""
        self._percent = min(100, max(0, int(done * 100)))

    def run(self) -> None:
        told, age = None, 0.0
        while not self._over.is_set():
            percent = self._percent
            if (percent != told or age >= RENEW) and self._tell(percent):
                told, age = percent, 0.0
            self._over.wait(LOOK)
            age += LOOK

    def _tell(self, percent: int | None) -> bool:
        try:
            self._scripts.loading(self._worker, self._model, percent)
        except redis.RedisError:
            return False
        return True
