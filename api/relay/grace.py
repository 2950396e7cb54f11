"""Requests whose client hung up and may come back: each is kept for its grace, then let go of.

Knows ids and times only. The process keeps such an id among those it follows; if the process dies, others let go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


class Graces:
    """`let_go(id)` is called when the time of an id is over, in a thread of this object; it decides whether somebody
    follows the request by now."""

    def __init__(self, let_go: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._let_go = let_go
        self._clock = clock
        self._until: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def keep(self, job_id: str, seconds: float) -> None:
        """Lets go of the request in so many seconds, or later if it is kept for longer already."""
        with self._changed:
            self._until[job_id] = max(self._clock() + seconds, self._until.get(job_id, 0.0))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="graces", daemon=True)
                self._thread.start()
            self._changed.notify()

    def kept(self) -> set[str]:
        """Ids that are kept now."""
        with self._changed:
            return set(self._until)

    def _run(self) -> None:
        while True:
            with self._changed:
                due = [job_id for job_id, until in self._until.items() if until <= self._clock()]
                if not due:
                    self._changed.wait(min(self._until.values()) - self._clock() if self._until else None)
                    continue
                for job_id in due:
                    del self._until[job_id]
            for job_id in due:
                try:
                    self._let_go(job_id)
                except Exception:  # the heartbeat lets go of what is left
                    log.exception("letting_go_failed", job=job_id)
