"""stream_options: which chunks of a stream carry usage. Knows nothing of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from api.schemas.strict import only_keys
from shared.errors import InvalidRequest

_FIELDS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
#: What `read_stream_options` takes, as a JSON schema.
STREAM_OPTIONS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {name: {"type": ["boolean", "null"]} for name in _FIELDS},
}


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`include_usage` None: the last finish chunk carries it; True: an extra chunk; False: none.

    `continuous_usage`: every chunk carries the usage so far.
    """

    include_usage: bool | None = None
    continuous_usage: bool = False


def read_stream_options(value: dict[str, Any] | None, stream: bool) -> StreamOptions:
    """Raises InvalidRequest for other keys, other types, and for options without a stream."""
    field = "stream_options"
    given = {key: item for key, item in (value or {}).items() if item is not None}
    if not given:
        return StreamOptions()
    if not stream:
        raise InvalidRequest("stream_options is only allowed with stream: true.", param=field)
    only_keys(field, given, _FIELDS)
    for key, item in given.items():
        if not isinstance(item, bool):
            raise InvalidRequest(f"{field}.{key} must be true or false.", param=field)
    return StreamOptions(given.get("include_usage"), given.get("continuous_usage_stats", False))
