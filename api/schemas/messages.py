"""The messages of a chat, as a template gets them. Knows no template."""

from __future__ import annotations

from typing import Any

from api.strict_json import parse
from shared.errors import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
#: Whose words are the model's own: what they say is taken as the model wrote it, control tokens too.
OWN_ROLE = "assistant"
#: Further texts of a message that templates know.
_TEXTS = ("name", "tool_call_id")
#: How the reasoning of an earlier answer comes back, the first that is there counts; templates know the first name.
_REASONING = ("reasoning_content", "reasoning")

_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CALL: dict[str, Any] = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


#: What `read_messages` takes, as a JSON schema.
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
            **{name: _nullable({"type": "string"}) for name in (*_TEXTS, *_REASONING)},
            "tool_calls": _nullable({"type": "array", "items": _CALL}),
        },
    },
}


def read_messages(value: list[Any]) -> list[dict[str, Any]]:
    """Each with its role, its content as one string, and what else templates know of it; arguments of tool calls as
    objects, as templates want them, where they are JSON. Raises InvalidRequest."""
    if not value:
        raise _wrong("messages must not be empty.")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(item: Any, place: str) -> dict[str, Any]:
    role = item.get("role") if isinstance(item, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{place} must be an object whose role is one of {', '.join(ROLES)}.")
    made: dict[str, Any] = {"role": ROLES[role], "content": _content(item.get("content"), place)}
    for name in (*_TEXTS, *_REASONING):
        if not isinstance(item.get(name), str | None):
            raise _wrong(f"{place}.{name} must be a string.")
    made |= {name: item[name] for name in _TEXTS if item.get(name) is not None}
    return made | _own(item, place) if role == OWN_ROLE else made


def _own(item: dict[str, Any], place: str) -> dict[str, Any]:
    """What only the assistant's messages have."""
    made: dict[str, Any] = {}
    reasoning = next((item[name] for name in _REASONING if item.get(name) is not None), None)
    if reasoning is not None:
        made[_REASONING[0]] = reasoning
    calls = item.get("tool_calls")
    if not isinstance(calls, list | None):
        raise _wrong(f"{place}.tool_calls must be an array.")
    if calls:
        made["tool_calls"] = [_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return made


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{place}.content must be a string or an array of text parts.")
    return "".join(_part(part, f"{place}.content[{number}]") for number, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _wrong(f"{place} must be a part of type text; this server takes text alone, no images, audio or files.")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{place}.text must be a string.")
    return str(part["text"])


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(f"{place} must be the call of a function, with its name.")
    if not isinstance(function.get("arguments"), str | None) or not isinstance(call.get("id"), str | None):
        raise _wrong(f"{place}: id and function.arguments must be strings.")
    made: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        made["id"] = call["id"]
    return {**made, "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))}}


def _arguments(written: str | None) -> Any:
    """Models write them as JSON, but need not have written it well."""
    try:
        return parse((written or "{}").encode())
    except (InvalidRequest, UnicodeEncodeError):
        return written


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
