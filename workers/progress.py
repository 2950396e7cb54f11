"""Progress of a model load: a bar on a terminal, a log line each tenth elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from workers.engines.base import Progress as Report

log = structlog.get_logger(__name__)


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
