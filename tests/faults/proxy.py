"""Between a process and the store: can swallow what goes through without closing anything. Knows nothing of commands."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """`path`: of the store's socket. Each connection to `url` gets one to the store.

    `forgets`: once a connection has sent these bytes, no answer comes back on it. `cuts`: what a connection has sent before
    these bytes gets through, then it ends."""

    def __init__(self, path: str, *, forgets: bytes = b"", cuts: bytes = b"") -> None:
        self._path, self._forgets, self._cuts = path, forgets, cuts
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}"
        self._silent: set[int] = set()
        self._forgetful: set[int] = set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                store = socket.socket(socket.AF_UNIX)
                store.connect(self._path)
                self._pairs.append((client, store))
                number = len(self._pairs) - 1
                threading.Thread(target=self._carry, args=(number, client, store, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(number, store, client, False), daemon=True).start()

    def _carry(self, number: int, a: socket.socket, b: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                if asks and self._cuts and self._cuts in data:
                    b.sendall(data.partition(self._cuts)[0])
                    break
                if asks and self._forgets and self._forgets in data:
                    self._forgetful.add(number)
                if number not in self._silent and (asks or number not in self._forgetful):
                    b.sendall(data)
            b.shutdown(socket.SHUT_RDWR)  # the other thread still reads from it

    def swallow(self) -> None:
        """All of today's connections; later ones work."""
        self._silent.update(range(len(self._pairs)))

    def close(self) -> None:
        self._listening.close()
        for pair in self._pairs:
            for end in pair:
                end.close()
