"""The messages of a chat, as a template gets them. Knows no template."""

from __future__ import annotations

from typing import Any

from shared.errors import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def read_messages(value: list[Any]) -> list[dict[str, Any]]:
    """Each with its role and its content as one string. Raises InvalidRequest."""
    if not value:
        raise _wrong("messages must not be empty.")
    return [_message(item, index) for index, item in enumerate(value)]


def _message(item: Any, index: int) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise _wrong(f"messages[{index}] must be an object whose role is one of {', '.join(ROLES)}.")
    kept = {key: item[key] for key in _KEPT if item.get(key) is not None}
    return {"role": ROLES[item["role"]], "content": _content(item.get("content"), index), **kept}


def _content(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise _wrong(f"messages[{index}].content must be a string or a list of text parts.")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
