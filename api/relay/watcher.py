"""Notices at once that a client hung up, without reading from its socket.

One epoll descriptor per process holds every waiting client's socket and reports EPOLLRDHUP (half-closed, also behind
unread data), EPOLLHUP and EPOLLERR; gevent's loop watches that one descriptor. No polling, no MSG_PEEK. Knows sockets
and callbacks only.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import Any, NamedTuple

import gevent
import structlog
from gevent import monkey

log = structlog.get_logger(__name__)

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
#: Reports taken from the kernel at once.
_BATCH = 256


class Watch(NamedTuple):
    """A registration. Descriptors are used again by the kernel; the serial is not."""

    fd: int
    serial: int


class Watcher:
    """Made in the process and the thread whose gevent loop shall watch (after the fork)."""

    def __init__(self) -> None:
        epoll: Any = monkey.get_original("select", "epoll")  # gevent's patching takes it out of the module
        self._epoll = epoll(-1)
        self._serial = 0
        self._watched: dict[int, tuple[Watch, Callable[[], None]]] = {}
        self._io = gevent.get_hub().loop.io(self._epoll.fileno(), 1)
        self._io.start(self._report)

    def watch(self, fd: int, gone: Callable[[], None]) -> Watch:
        """Calls `gone` once, in a greenlet of its own, when the peer of the socket closes, half-closes or resets.

        A socket that is closed already counts. Registering a descriptor again replaces what was there."""
        self._serial += 1
        watch = Watch(fd, self._serial)
        self._watched[fd] = (watch, gone)
        try:
            self._epoll.register(fd, _GONE)
        except FileExistsError:
            self._epoll.modify(fd, _GONE)
        return watch

    def forget(self, watch: Watch) -> None:
        """Ends a registration; one that has ended, or whose descriptor belongs to another by now, is left alone."""
        if self._watched.get(watch.fd, (None,))[0] == watch:
            del self._watched[watch.fd]
            self._drop(watch.fd)

    def close(self) -> None:
        self._io.stop()
        self._io.close()
        self._epoll.close()
        self._watched.clear()

    def __len__(self) -> int:
        return len(self._watched)

    def _report(self) -> None:
        """Runs in the loop, so it must not block."""
        for fd, _ in self._epoll.poll(0, _BATCH):
            self._drop(fd)
            watched = self._watched.pop(fd, None)
            if watched is not None:
                gevent.spawn(_call, watched[1])

    def _drop(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # closed: the kernel has dropped it
            self._epoll.unregister(fd)


def _call(gone: Callable[[], None]) -> None:
    try:
        gone()
    except Exception:
        log.exception("hang_up_failed")
