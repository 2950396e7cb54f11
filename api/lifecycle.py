"""What a process has under way, and whether it is on its way out. Knows nothing of gunicorn and of requests."""

from __future__ import annotations

import threading
from typing import Protocol


class Waiting(Protocol):
    """A request that waits for its job."""

    def give_up(self) -> None: ...


class Lifecycle:
    """Counts requests from their first byte in to their last byte out. One per process."""

    def __init__(self) -> None:
        #: The process finishes what it has and takes nothing new.
        self.draining = False
        self._requests = 0
        self._waiting: set[Waiting] = set()
        self._idle = threading.Event()
        self._idle.set()

    def begin(self) -> None:
        self._requests += 1
        self._idle.clear()

    def end(self) -> None:
        self._requests -= 1
        if not self._requests:
            self._idle.set()

    def follow(self, waiting: Waiting) -> None:
        self._waiting.add(waiting)

    def unfollow(self, waiting: Waiting) -> None:
        self._waiting.discard(waiting)

    def drain(self) -> None:
        self.draining = True

    def wait_idle(self, timeout: float) -> bool:
        """True once no request is under way; False after `timeout` seconds."""
        return self._idle.wait(timeout)

    def give_up(self) -> bool:
        """Ends what still waits for a job. True if there was anything."""
        waiting = list(self._waiting)
        for item in waiting:
            item.give_up()
        return bool(waiting)
