"""Notices at once that a client hung up, without reading from its socket.

One epoll descriptor per process holds every waiting client's socket and reports EPOLLRDHUP (half-closed, also behind
unread data), EPOLLHUP and EPOLLERR; gevent's loop watches that one descriptor. No MSG_PEEK, and no polling but for those
whom nothing reports: peers that vanished without a word. Knows sockets and callbacks only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gevent
import structlog
from gevent import monkey

log = structlog.get_logger(__name__)

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
#: Reports taken from the kernel at once.
_BATCH = 256
#: A peer that has acknowledged nothing of what was sent to it for so long is gone, s; seconds between two looks. The kernel
#: itself would try for 15 minutes, and its keep-alive only asks where nothing is under way.
UNHEARD, LOOK = 60.0, 10.0
#: Where struct tcp_info (linux/tcp.h) has tcpi_unacked, packets, and tcpi_last_ack_recv, ms ago.
_UNACKED, _LAST_ACK = 24, 56


class Watch(NamedTuple):
    """A registration. Descriptors are used again by the kernel; the serial is not."""

    fd: int
    serial: int


class Watcher:
    """Made in the process and the thread whose gevent loop shall watch (after the fork). `unheard`, `look`: as above, s."""

    def __init__(self, *, unheard: float = UNHEARD, look: float = LOOK) -> None:
        epoll: Any = monkey.get_original("select", "epoll")  # gevent's patching takes it out of the module
        self._epoll = epoll(-1)
        self._serial = 0
        self._watched: dict[int, tuple[Watch, Callable[[], None]]] = {}
        self._io = gevent.get_hub().loop.io(self._epoll.fileno(), 1)
        self._io.start(self._report)
        self._looking = gevent.spawn(self._look_for_unheard, unheard, look)

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
        self._looking.kill()
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

    def _look_for_unheard(self, limit: float, look: float) -> None:
        since: dict[Watch, float] = {}
        while True:
            gevent.sleep(look)
            now, before, since = time.monotonic(), since, {}
            for fd, (watch, _) in list(self._watched.items()):
                with contextlib.suppress(OSError), _borrowed(fd) as peer:  # it may be closed by now, or not TCP
                    unheard = _unheard(peer)
                    if unheard is None:
                        continue
                    began = before.get(watch, now)
                    since[watch] = began if unheard >= now - began else now
                    if now - since[watch] >= limit:
                        peer.shutdown(socket.SHUT_RDWR)  # the loop reports that like any other end

    def _drop(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # closed: the kernel has dropped it
            self._epoll.unregister(fd)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[Any]:
    """The socket of a descriptor that stays open."""
    peer = monkey.get_original("socket", "socket")(fileno=fd)
    try:
        yield peer
    finally:
        peer.detach()


def _unheard(peer: Any) -> float | None:
    """How long nothing has been acknowledged, s; None: nothing is due. (A peer that only does not read acknowledges what
    there was room for, and gets nothing more.)"""
    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
    [unacked], [last_ack] = struct.unpack_from("I", info, _UNACKED), struct.unpack_from("I", info, _LAST_ACK)
    return last_ack / 1000 if unacked else None


def _call(gone: Callable[[], None]) -> None:
    try:
        gone()
    except Exception:
        log.exception("hang_up_failed")
