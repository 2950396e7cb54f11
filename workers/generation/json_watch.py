"""What a grammar does not see of the JSON it lets through: keys that come twice, depth, and texts that would not end.

A pure function of the bytes, as they come. It follows a text that a grammar keeps well formed, and is no parser: of
anything else it says nothing useful. Knows nothing of tokens and of grammars.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import Enum

from shared.structured import (
    MAX_BLANKS,
    MAX_DEPTH,
    MAX_EXPONENT,
    MAX_NUMBER,
    MAX_PERIOD,
    MAX_ROUND,
    MAX_ROUNDS,
    MAX_STRING,
)

#: What a number is written with.
NUMBER = frozenset(b"0123456789+-.eE")
#: The end of a run inside a string: its closing quote, or an escape.
_STOP = re.compile(rb'["\\]')
_BLANKS = re.compile(rb"(?: |\\[nrt]){%d}\Z" % MAX_BLANKS)
#: Bytes by which an earlier round of a string is found.
_SIGN = 16
_EXPONENT = re.compile(rb"[eE][+-]?0*([0-9]+)")


class Full(Enum):
    """What should end as soon as the grammar allows it."""

    STRING = "string"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class JsonWatch:
    """A place in a JSON text; `after` gives the one behind further bytes.

    `open`: the arrays and objects around it, of objects the keys so far. `key`: a string that begins here is a key.
    `string`: the bytes of the string it is in, None outside. `escaped`: behind a backslash. `number`: those of the number
    it is in."""

    open: tuple[frozenset[str] | None, ...] = ()
    key: bool = False
    string: bytes | None = None
    escaped: bool = False
    number: bytes = b""

    @property
    def full(self) -> Full | None:
        if self.string is not None:
            return Full.STRING if not self.escaped and _is_full(self.string) else None
        return Full.NUMBER if len(self.number) >= MAX_NUMBER or _exponent(self.number) >= MAX_EXPONENT else None

    def after(self, piece: bytes) -> JsonWatch | None:
        """The place behind `piece`; None if the text must not go on so."""
        place: JsonWatch | None = self
        at = 0
        while place is not None and at < len(piece):
            if place.string is not None:
                place, at = place._in_string(place.string, piece, at)
            else:
                place, at = place._outside(piece[at]), at + 1
        return place

    def _in_string(self, string: bytes, piece: bytes, at: int) -> tuple[JsonWatch | None, int]:
        if self.escaped:
            return replace(self, string=string + piece[at : at + 1], escaped=False), at + 1
        stop = _STOP.search(piece, at)
        end = len(piece) if stop is None else stop.start()
        string += piece[at:end]
        if stop is None:
            return replace(self, string=string), end
        if stop[0] == b"\\":
            return replace(self, string=string + b"\\", escaped=True), end + 1
        if not self.key:
            return replace(self, string=None), end + 1
        name, keys = _read(string), self.open[-1] if self.open else None
        if keys is None or name in keys:
            return None, end
        return JsonWatch((*self.open[:-1], keys | {name})), end + 1

    def _outside(self, byte: int) -> JsonWatch | None:
        if byte in NUMBER and (self.number or byte not in b"eE"):  # the e of true and false is none
            number = self.number + bytes((byte,))
            # One that its grammar does not let end, since it is no multiple of what it should be, may never be.
            endless = len(number) > 4 * MAX_NUMBER
            return None if endless or _exponent(number) > MAX_EXPONENT else replace(self, number=number)
        place = replace(self, number=b"") if self.number else self
        character = chr(byte)
        if character == '"':
            return replace(place, string=b"")
        if character in "[{":
            if len(place.open) == MAX_DEPTH:
                return None
            return JsonWatch((*place.open, frozenset() if character == "{" else None), key=character == "{")
        if character in "]}":
            return JsonWatch(place.open[:-1])
        if character == ",":
            return replace(place, key=bool(place.open) and place.open[-1] is not None)
        return place


def _is_full(string: bytes) -> bool:
    if len(string) >= MAX_STRING or _BLANKS.search(string, len(string) - 2 * MAX_BLANKS):
        return True
    end = len(string) - _SIGN
    earlier = string.rfind(string[-_SIGN:], max(0, end - MAX_PERIOD), -1)
    if earlier < 0 or len(string) < MAX_ROUND:
        return False
    period = end - earlier
    round_ = max(MAX_ROUND, MAX_ROUNDS * period)
    return len(string) >= round_ and string[-round_ + period :] == string[-round_:-period]


def _exponent(number: bytes) -> int:
    """Digits of a number's exponent, leading zeros not counted."""
    found = _EXPONENT.search(number)
    return len(found[1]) if found else 0


def _read(string: bytes) -> str:
    """What a key stands for: it may be written in several ways."""
    try:
        return str(json.loads(b'"' + string + b'"'))
    except ValueError:  # a grammar of its own made it; it is compared as it stands
        return string.decode(errors="replace")
