"""The process that renders chat templates for `templating.py`; run as a script, it imports nothing of ours.

Asked over the socket that is its standard input: four bytes of length, then JSON, both ways. It arms an alarm before
each rendering, whose default action ends the process: nothing a template does can hold that up, and no process is
left behind that burns a core if the asking one is gone. Its memory is limited, so is what it writes.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import socket
import struct
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Address space of the process, bytes.
MEMORY = 768 << 20
#: Longest rendered text, characters.
LONGEST = 16 << 20


class Generation(Extension):
    """`{% generation %}` marks assistant text for training; here its content just passes."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RaisedByTemplate(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise(message: str) -> None:
    raise RaisedByTemplate(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers' apply_chat_template."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def render(template: str, variables: dict[str, Any]) -> str:
    parts, length = [], 0
    for part in compiled(template).generate(**variables):
        parts.append(part)
        length += len(part)
        if length > LONGEST:
            raise jinja2.TemplateError("it writes too much")
    text = "".join(parts)
    text.encode()  # refuses half of a surrogate pair, which is no character
    return text


def answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"rendered": [render(question["template"], variables) for variables in question["variables"]]}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def serve(asker: socket.socket) -> None:
    send(asker, {"ready": True})
    while True:
        head = exactly(asker, 4)
        if not head:
            return
        question = json.loads(exactly(asker, struct.unpack(">I", head)[0]))
        signal.setitimer(signal.ITIMER_REAL, question["limit"])
        found = answer(question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(asker, found)


def send(asker: socket.socket, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    asker.sendall(struct.pack(">I", len(data)) + data)


def exactly(asker: socket.socket, count: int) -> bytes:
    """So many bytes, or none at the end."""
    data = bytearray()
    while len(data) < count:
        part = asker.recv(count - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; this ends with the one that asks
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection:
        connection.setblocking(True)  # it came from a process whose sockets may all be non-blocking
        serve(connection)
