"""Renders chat templates, which come with model files and are programs: in a sandbox, in a process that can be killed
(`template_process.py`, `children.py`).

Knows templates and variables, nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from api.children import AllBusy, Children, Ended
from shared.errors import EngineOverloaded, InternalError, InvalidRequest

log = structlog.get_logger(__name__)

#: Longest rendering, s.
LIMIT = 2.0

_CHILD = Path(__file__).with_name("template_process.py")


class TemplateFailed(InvalidRequest):
    """The template raised, is none, or went beyond its limits; the message is for the client."""

    code = "template_error"


class Renderer:
    """`limit`: longest rendering, s."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._children = Children(_CHILD, limit=limit)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Raises TemplateFailed, or EngineOverloaded if all children are busy for too long."""
        return self.render_all(template, [variables])[0]

    def render_all(self, template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """The template rendered once for each set of variables."""
        try:
            answer = self._children.ask({"template": template, "variables": list(variables)})
        except AllBusy:
            raise EngineOverloaded("Too many chat templates are being rendered.") from None
        except Ended:
            raise TemplateFailed(
                f"The model's chat template took more than {self._limit:g} s or too much memory."
            ) from None
        except OSError as error:
            log.error("template_process_failed", error=str(error))
            raise InternalError from None
        if "rendered" in answer:
            rendered: list[str] = answer["rendered"]
            return rendered
        raise TemplateFailed(f"The model's chat template fails: {answer.get('error')}")

    def close(self) -> None:
        self._children.close()
