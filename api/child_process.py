"""The child's side of `children.py`: the loop of a process that answers questions.

Asked over the socket that is its standard input: four bytes of length, then JSON, both ways. It arms an alarm before each
answer, whose default action ends the process: nothing it does can hold that up, and no process is left behind that burns a
core if the asking one is gone. The alarm counts processor time: that a machine is busy makes no answer wrong. Its memory is
limited.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

#: Address space of the process, bytes.
MEMORY = 768 << 20


def run(answer: Callable[[dict[str, Any]], dict[str, Any]], memory: int = MEMORY) -> None:
    """Answers until nobody asks any more. `memory`: address space, bytes."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; this ends with the one that asks
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection:
        connection.setblocking(True)  # it came from a process whose sockets may all be non-blocking
        with contextlib.suppress(ConnectionError):  # the one that asked is gone
            _serve(connection, answer)


def _serve(asker: socket.socket, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    _send(asker, {"ready": True})
    while True:
        head = _exactly(asker, 4)
        if not head:
            return
        question = json.loads(_exactly(asker, struct.unpack(">I", head)[0]))
        signal.setitimer(signal.ITIMER_PROF, question["limit"])
        found = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(asker, found)


def _send(asker: socket.socket, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    asker.sendall(struct.pack(">I", len(data)) + data)


def _exactly(asker: socket.socket, count: int) -> bytes:
    """So many bytes, or none at the end."""
    data = bytearray()
    while len(data) < count:
        part = asker.recv(count - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
