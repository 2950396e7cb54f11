"""Strict JSON, for request bodies and for what models write: what two parsers could read differently is refused.

Refused besides malformed text: anything but UTF-8 (a byte order mark too), duplicate keys (RFC 8259 section 4),
NaN, Infinity and numbers beyond a double, lone surrogates, nesting over 64; in bodies, a root that is no object. Knows
nothing of fields, HTTP or models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from shared.errors import InvalidJson

#: Deepest nesting of arrays and objects.
MAX_DEPTH = 64
#: Integers of more digits are cut to this many: still far outside every range, and int() stays fast (CVE-2020-10735).
MAX_DIGITS = 300

#: A string that never closes reaches to the end: to try again behind each of its quotes would take quadratic time.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP = [1 if byte in b"[{" else -1 for byte in range(256)]
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(body: bytes, what: str = "body") -> dict[str, Any]:
    """The object in `body`, which errors call `what`. Raises InvalidJson; its `param` names the top-level field where one is at fault."""
    text, value = _parse(body, what)
    if not isinstance(value, dict):
        raise InvalidJson(f"The {what} must be a JSON object, not {_kind(value)}.")
    _refuse_odd(text, value)
    return value


def parse_value(raw: bytes) -> Any:
    """The value in `raw`, whatever it is. Raises InvalidJson."""
    text, value = _parse(raw, "body")
    _refuse_odd(text, {"it": value})
    return value


def _parse(body: bytes, what: str) -> tuple[str, Any]:
    """The text, and the value before a last look at its numbers and strings."""
    text = _decode(body, what)
    _check_depth(body, what)
    try:
        value = (_decoder_of_long if _LONG_NUMBER.search(text) else _decoder).decode(text)
    except json.JSONDecodeError as error:
        raise InvalidJson(
            f"The {what} is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise InvalidJson(f"The {what} is nested deeper than {MAX_DEPTH} levels.") from None
    return text, value


def _refuse_odd(text: str, value: dict[str, Any]) -> None:
    if _odd_numbers_possible(text):
        _refuse_odd_numbers(value)
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)


def _decode(body: bytes, what: str) -> str:
    if not body.strip():
        raise InvalidJson(f"The {what} is empty; it must be a JSON object.")
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidJson(f"The {what} begins with a byte order mark; send plain UTF-8.")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The {what} is not valid UTF-8 (byte {error.start}).") from None


def _check_depth(body: bytes, what: str) -> None:
    """Before parsing, since the parser recurses; at C speed, since bodies have megabytes."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InvalidJson(f"The {what} is nested deeper than {MAX_DEPTH} levels.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidJson(f"The key {_shown(key)} occurs twice in one object.")
            seen.add(key)
    return result


def _cut_integer(digits: str) -> int:
    return int(digits[:MAX_DIGITS])


#: NaN, Infinity and 1e999 all become non-finite floats here and are refused afterwards, with the field's name.
_decoder = json.JSONDecoder(object_pairs_hook=_unique)
_decoder_of_long = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_cut_integer)

_ODD = re.compile(r"NaN|Infinity|[eE]\+?\d{3}|\d{200}")


def _odd_numbers_possible(text: str) -> bool:
    """A double overflows only with an exponent of three digits or with very many digits."""
    return _ODD.search(text) is not None


def _refuse_odd_numbers(value: dict[str, Any]) -> None:
    for field, item in value.items():
        for leaf in _leaves(item):
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise InvalidJson(
                    f"{_shown(field)} holds a number that is not finite; JSON has no NaN or Infinity.",
                    param=_param(field),
                )


def _refuse_lone_surrogates(value: dict[str, Any]) -> None:
    for field, item in value.items():
        for leaf in _leaves({field: item}):
            if isinstance(leaf, str) and _SURROGATE.search(leaf):
                raise InvalidJson(
                    f"{_shown(field)} holds half of a surrogate pair, which is no character.", param=_param(field)
                )


def _leaves(value: Any) -> Iterator[Any]:
    """Scalars and keys below `value`; not recursive."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        else:
            yield item


def _param(field: str) -> str | None:
    return field if _shown(field) == field else None


def _shown(key: str) -> str:
    """A client's key as it may stand in a message: short and printable."""
    if len(key) <= 64 and key.isascii() and key.isprintable():
        return key
    return ascii(key[:40])


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "an array"
