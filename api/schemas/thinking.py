"""The switches that turn a model's thinking on or off.

Every spelling in use is read; an explicit off wins over any other switch. Knows nothing of templates.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from api.schemas.strict import StrictRequest
from shared.errors import InvalidRequest, UnsupportedParameter

EFFORT_OFF = frozenset({"none", "off", "minimal", "disabled"})
EFFORT_ON = frozenset({"low", "medium", "high", "xhigh", "max"})
#: What of chat_template_kwargs reaches a template. A misspelt switch must not go unnoticed.
TEMPLATE_KWARGS = ("enable_thinking", "thinking")
TYPE_ON = frozenset({"enabled", "adaptive", "auto"})


def _one_of(known: frozenset[str]) -> dict[str, Any]:
    return {"enum": sorted(known)}


def _object_with(**properties: dict[str, Any]) -> Any:
    """The JSON schema of an object of which only these keys are looked at."""
    nullable = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in properties.items()}
    return WithJsonSchema({"type": "object", "properties": nullable})


_BOOL: dict[str, Any] = {"type": "boolean"}
_EFFORT = _one_of(EFFORT_OFF | EFFORT_ON)
_TYPE = _one_of(TYPE_ON | {"disabled"})


class ThinkingFields(StrictRequest):
    """Mixed into the request models of both completion endpoints."""

    #: Known only to be refused: a template is a program, and comes with the model (CVE-2025-61620).
    chat_template: Any = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], _object_with(enable_thinking=_BOOL, thinking=_BOOL)] = Field(
        default_factory=dict
    )
    reasoning_effort: Annotated[str | None, WithJsonSchema(_EFFORT)] = None
    reasoning: Annotated[dict[str, Any], _object_with(effort=_EFFORT)] = Field(default_factory=dict)
    thinking: Annotated[dict[str, Any], _object_with(type=_TYPE)] = Field(default_factory=dict)

    def thinking_switch(self) -> tuple[bool | None, str | None]:
        """(on, off or nothing said; the field that said so). Raises InvalidRequest for unknown values."""
        if self.chat_template is not None:
            raise UnsupportedParameter("A request cannot bring a chat template.", param="chat_template")
        for key, value in self.chat_template_kwargs.items():
            if key not in TEMPLATE_KWARGS and value is not None:
                raise UnsupportedParameter(
                    f"chat_template_kwargs takes {' and '.join(TEMPLATE_KWARGS)}, not {key[:64]!a}.",
                    param="chat_template_kwargs",
                )
        said: list[tuple[bool, str]] = []
        if self.enable_thinking is not None:
            said.append((self.enable_thinking, "enable_thinking"))
        for key in TEMPLATE_KWARGS:
            value = self.chat_template_kwargs.get(key)
            if value is not None:
                if not isinstance(value, bool):
                    raise InvalidRequest(
                        f"chat_template_kwargs.{key} must be true or false.", param="chat_template_kwargs"
                    )
                said.append((value, "chat_template_kwargs"))
        for field, effort in (("reasoning_effort", self.reasoning_effort), ("reasoning", self.reasoning.get("effort"))):
            if effort is not None:
                said.append((_effort_on(field, effort), field))
        kind = self.thinking.get("type")
        if kind is not None:
            if not isinstance(kind, str) or kind not in TYPE_ON | {"disabled"}:
                raise InvalidRequest(
                    f"thinking.type must be disabled or one of {', '.join(sorted(TYPE_ON))}.", param="thinking"
                )
            said.append((kind in TYPE_ON, "thinking"))
        return min(said, default=(None, None), key=lambda item: item[0])


def _effort_on(field: str, effort: object) -> bool:
    if not isinstance(effort, str) or effort not in EFFORT_OFF | EFFORT_ON:
        known = ", ".join(sorted(EFFORT_OFF) + sorted(EFFORT_ON))
        raise InvalidRequest(f"{field}: the effort must be one of {known}.", param=field)
    return effort in EFFORT_ON
