"""Processes for what cannot be interrupted in this one, and must be: a client's pattern, a model's template.

A loop in either would stop every stream of a gevent process. Each child answers one question at a time, has limits on its
time and memory (`child_process.py`), and is replaced when it went beyond them. Works with threads and with greenlets: it
waits on a socket. Knows nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

import structlog

log = structlog.get_logger(__name__)

#: Until a fresh child is ready, s.
START = 20.0
#: The longest wait for an answer, in limits: a child ends itself by its processor time, unless it does not even run.
PATIENCE = 5.0


class AllBusy(Exception):
    """No child became free in time."""


class Ended(Exception):
    """The child went beyond its limits, or died."""


class Children:
    """Starts its children when they are first needed, `count` at once. `script`: what they run; `limit`: processor time
    of an answer, s; `wait`: the longest wait for a child, s."""

    def __init__(self, script: Path, *, limit: float, count: int = 2, wait: float = 5.0) -> None:
        self._script = script
        self._limit = limit
        self._wait = wait
        self._count = count
        self._idle: LifoQueue[_Child | None] = LifoQueue()
        for _ in range(count):
            self._idle.put(None)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a child. Raises AllBusy, Ended, or OSError where no child can be started."""
        try:
            child = self._idle.get(timeout=self._wait)
        except Empty:
            raise AllBusy from None
        try:
            if child is None or child.gone:
                child = None
                child = _Child(self._script)
        except BaseException:
            self._idle.put(None)
            raise
        try:
            return child.ask({**question, "limit": self._limit}, self._limit)
        except OSError as error:  # also TimeoutError
            child.kill()
            log.warning("child_killed", script=self._script.stem, error=str(error) or type(error).__name__)
            raise Ended from None
        except BaseException:  # its answer is still to come, and must not be the next one's
            child.kill()
            raise
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """Ends the children that are idle; the others end with the sockets of this process."""
        for _ in range(self._count):
            with contextlib.suppress(Empty):
                child = self._idle.get_nowait()
                if child is not None:
                    child.kill()


class _Child:
    """One process, and the socket on which it is asked: four bytes of length, then JSON, both ways."""

    def __init__(self, script: Path) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # -P: its folder is not where it looks for modules
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, close_fds=True
            )
        self._socket.settimeout(START)
        try:
            if self._receive() != {"ready": True}:
                raise ConnectionError("the child says something else than that it is ready")
        except BaseException:
            self.kill()
            raise

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Raises OSError, TimeoutError among them, if no answer comes."""
        self._socket.settimeout(limit * PATIENCE)
        data = json.dumps(question).encode()
        self._socket.sendall(struct.pack(">I", len(data)) + data)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self._exactly(4))
        answer: dict[str, Any] = json.loads(self._exactly(length))
        return answer

    def _exactly(self, count: int) -> bytes:
        parts, end = [], time.monotonic() + (self._socket.gettimeout() or START)
        while count:
            part = self._socket.recv(min(count, 1 << 20))
            if not part or time.monotonic() > end:
                raise ConnectionError("the process ended")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
