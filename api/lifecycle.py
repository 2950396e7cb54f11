"""What a process has under way, and whether it is on its way out. Knows nothing of gunicorn and of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        self._at_drain: set[Callable[[], None]] = set()
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

    def at_drain(self, call: Callable[[], None]) -> None:
        """`call`, which must not block, is called when the process begins to drain: for connections that stay open with no
        request on them."""
        self._at_drain.add(call)

    def not_at_drain(self, call: Callable[[], None]) -> None:
        self._at_drain.discard(call)

    def drain(self) -> None:
        self.draining = True
        for call in list(self._at_drain):
            call()

    def wait_idle(self, timeout: float) -> bool:
        """True once no request is under way; False after `timeout` seconds."""
        return self._idle.wait(timeout)

    def give_up(self) -> bool:
        """Ends what still waits for a job. True if there was anything."""
        waiting = list(self._waiting)
        for item in waiting:
            item.give_up()
        return bool(waiting)
