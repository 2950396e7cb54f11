"""The client's socket as simple-websocket may use it: whole messages out, bounded time and memory.

simple-websocket 1.1 writes with `send`, which under load writes a part only, from two threads without a lock, and keeps all
that a client sends. Knows nothing of WebSocket, requests or JSON.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from api.body import STEP_SECONDS, TURN, linger

#: Bytes read at once.
STEP = 64 * 1024
#: Bytes that the kernel keeps for a client: a ping waits behind them, and one that does not read holds no more.
UNSENT = 64 * 1024


class Wire:
    """`patience`: longest time for one message to go out, s; a client that takes longer is gone.

    After each read it waits until `taken` was called, if something came of it that nobody has taken yet (`kept`)."""

    def __init__(self, connection: Any, patience: float) -> None:
        #: Messages that came in and were not taken yet; simple-websocket's own list.
        self.kept: list[Any] = []
        self._connection = connection
        self._patience = patience
        self._sending = threading.Lock()
        self._taken = threading.Event()
        self._turn = time.monotonic()
        connection.settimeout(patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)

    def fileno(self) -> int:
        found: int = self._connection.fileno()
        return found

    def send(self, data: bytes) -> None:
        """All of it, or OSError."""
        if not self._sending.acquire(timeout=self._patience):
            raise TimeoutError
        try:
            self._connection.sendall(data)
        finally:
            self._sending.release()

    def recv(self, size: int) -> bytes:
        """Raises OSError if what came before is not taken for as long as a send may take."""
        if time.monotonic() - self._turn > STEP_SECONDS:
            time.sleep(TURN)  # gevent lets nobody else run while there is something to read
            self._turn = time.monotonic()
        if self.kept:
            self._taken.clear()
            if self.kept and not self._taken.wait(2 * self._patience):
                raise TimeoutError
        found: bytes = self._connection.recv(size)
        return found

    def taken(self) -> None:
        if not self.kept:
            self._taken.set()

    def close(self) -> None:
        """simple-websocket's last word, from its own thread. What the client still sends is read and dropped, so that it
        gets the close frame; the server closes the socket itself."""
        linger(self._connection)

    def cut(self) -> None:
        """Wakes whoever reads or writes."""
        self._taken.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
