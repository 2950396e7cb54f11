"""The head of a GGUF file: its key-value pairs, as many as are asked for.

The `gguf` package maps and parses the file whole, which takes seconds at every start; a vocabulary and its merges
are read here in a tenth of one. Format: ggml/docs/gguf.md, version 2 and 3. Knows no key.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

#: GGUF's value types: number formats by their id, then string and array.
_NUMBERS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: Longest string and largest array that are believed.
_MOST = 1 << 28


def read_head(path: Path, wanted: Collection[str]) -> dict[str, Any]:
    """The values of those of the keys that the file has; arrays as lists. Raises ValueError or OSError."""
    found: dict[str, Any] = {}
    with path.open("rb", buffering=1 << 20) as file:
        magic, version, _, pairs = struct.unpack("<4sIQQ", _read(file, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path.name} is no GGUF file of version 2 or 3")
        for _ in range(pairs):
            key = _text(file)
            value = _value(file, _number(file, "<I"))
            if key in wanted:
                found[key] = value
                if len(found) == len(wanted):
                    break
    return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        item, count = _number(file, "<I"), _number(file, "<Q")
        if count > _MOST:
            raise ValueError("an array that cannot be that large")
        if item in _NUMBERS:
            code = _NUMBERS[item].lstrip("<")
            return list(struct.unpack(f"<{count}{code}", _read(file, count * struct.calcsize(code))))
        return _texts(file, count) if item == _STRING else [_value(file, item) for _ in range(count)]
    if kind not in _NUMBERS:
        raise ValueError(f"a value of the unknown type {kind}")
    return _number(file, _NUMBERS[kind])


def _texts(file: BinaryIO, count: int) -> list[str]:
    """Without a call per number: vocabularies have hundreds of thousands."""
    read, length_of = file.read, int.from_bytes
    return [read(_believed(length_of(read(8), "little"))).decode("utf-8") for _ in range(count)]


def _believed(count: int) -> int:
    if count > _MOST:
        raise ValueError("a string that cannot be that long")
    return count


def _text(file: BinaryIO) -> str:
    return _read(file, _number(file, "<Q")).decode("utf-8")


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(code, _read(file, struct.calcsize(code)))[0]


def _read(file: BinaryIO, count: int) -> bytes:
    if count > _MOST or len(data := file.read(count)) != count:
        raise ValueError("the file ends too early")
    return data
