"""The shapes of the HTTP contract as JSON Schemas, written from the contract and not from the code.

`check_completion`, `check_chunk` and `check_error` raise jsonschema.ValidationError. Without that package they look no further
than at what every one of these objects has.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

try:
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource
except ImportError:
    Draft202012Validator = None

_FOLDER = Path(__file__).parent


def check_completion(value: Any) -> None:
    """Of either kind."""
    check("chat_completion.json" if _is_chat(value) else "completion.json", value)
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [choice["index"] for choice in value["choices"]] == list(range(len(value["choices"])))


def check_chunk(value: Any) -> None:
    """Of either kind."""
    check("chat_chunk.json" if _is_chat(value) else "completion_chunk.json", value)


def check_error(value: Any) -> None:
    check("error.json", value)


def check(name: str, value: Any) -> None:
    """By the schema of that file."""
    if Draft202012Validator is not None:
        _validator(name).validate(value)
    assert value.keys() >= set(json.loads((_FOLDER / name).read_text())["required"])


def _is_chat(value: Any) -> bool:
    return str(value.get("object")).startswith("chat.")


@cache
def _validator(name: str) -> Any:
    registry: Registry[Any] = Registry().with_resources(
        (path.name, Resource.from_contents(json.loads(path.read_text()))) for path in _FOLDER.glob("*.json")
    )
    return Draft202012Validator(json.loads((_FOLDER / name).read_text()), registry=registry)
