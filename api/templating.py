"""Renders chat templates, which come with model files and are programs: in a sandbox, in a process that can be killed.

A loop in a template cannot be interrupted from within, and would stop every stream of a gevent process. So
`template_process.py` renders, a child with limits on its time and memory; here it is started, asked and replaced.
Works with threads and with greenlets: it waits on a socket. Knows templates and variables, nothing of models.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

import structlog

from shared.errors import EngineOverloaded, InternalError, InvalidRequest

log = structlog.get_logger(__name__)

#: Longest rendering, s.
LIMIT = 2.0
#: Until a fresh child is ready to render, s.
START = 20.0
#: Children at once; further requests wait for one.
CHILDREN = 2
#: Longest wait for a child, s.
WAIT = 5.0

_CHILD = Path(__file__).with_name("template_process.py")


class TemplateFailed(InvalidRequest):
    """The template raised, is none, or went beyond its limits; the message is for the client."""

    code = "template_error"


class Renderer:
    """Starts its children when they are first needed. `limit`: longest rendering, s."""

    def __init__(self, limit: float = LIMIT, children: int = CHILDREN) -> None:
        self._limit = limit
        self._idle: LifoQueue[_Child | None] = LifoQueue()
        for _ in range(children):
            self._idle.put(None)
        self._children = children

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Raises TemplateFailed, or EngineOverloaded if all children are busy for too long."""
        return self.render_all(template, [variables])[0]

    def render_all(self, template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """The template rendered once for each set of variables."""
        try:
            child = self._idle.get(timeout=WAIT)
        except Empty:
            raise EngineOverloaded("Too many chat templates are being rendered.") from None
        try:
            if child is None or child.gone:
                child = None
                child = _Child()
        except OSError as error:
            self._idle.put(None)
            log.error("template_process_failed", error=str(error))
            raise InternalError from None
        except BaseException:
            self._idle.put(None)
            raise
        try:
            answer = child.ask({"template": template, "variables": list(variables), "limit": self._limit}, self._limit)
        except OSError as error:  # also TimeoutError
            child.kill()
            log.warning("template_killed", error=str(error) or type(error).__name__)
            raise TemplateFailed(
                f"The model's chat template took more than {self._limit:g} s or too much memory."
            ) from None
        except BaseException:  # its answer is still to come, and must not be the next one's
            child.kill()
            raise
        finally:
            self._idle.put(child)
        if "rendered" in answer:
            rendered: list[str] = answer["rendered"]
            return rendered
        raise TemplateFailed(f"The model's chat template fails: {answer.get('error')}")

    def close(self) -> None:
        """Ends the children that are idle; the others end with the sockets of this process."""
        for _ in range(self._children):
            with contextlib.suppress(Empty):
                child = self._idle.get_nowait()
                if child is not None:
                    child.kill()


class _Child:
    """One process, and the socket on which it is asked: four bytes of length, then JSON, both ways."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, close_fds=True
            )
        self._socket.settimeout(START)
        try:
            if self._receive() != {"ready": True}:
                raise ConnectionError("the rendering process says something else than that it is ready")
        except BaseException:
            self.kill()
            raise

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Raises OSError, TimeoutError among them, if no answer comes. The child ends itself a little earlier."""
        self._socket.settimeout(limit + 1.0)
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
                raise ConnectionError("the rendering process ended")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
