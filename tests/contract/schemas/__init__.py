"""The shapes of the HTTP contract as JSON Schemas, written from the contract and not from the code.

`check_completion`, `check_chunk` and `check_error` raise jsonschema.ValidationError.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

_FOLDER = Path(__file__).parent


def check_completion(value: Any) -> None:
    _validator("completion.json").validate(value)
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [choice["index"] for choice in value["choices"]] == list(range(len(value["choices"])))


def check_chunk(value: Any) -> None:
    _validator("completion_chunk.json").validate(value)


def check_error(value: Any) -> None:
    _validator("error.json").validate(value)


@cache
def _validator(name: str) -> Draft202012Validator:
    registry: Registry[Any] = Registry().with_resources(
        (path.name, Resource.from_contents(json.loads(path.read_text()))) for path in _FOLDER.glob("*.json")
    )
    return Draft202012Validator(json.loads((_FOLDER / name).read_text()), registry=registry)
