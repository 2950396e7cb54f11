"""The process that renders chat templates for `templating.py`, in a sandbox; run as a script.

Its time and memory are limited (`child_process.py`), and so is what it writes.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from api.child_process import run

    run(answer)
