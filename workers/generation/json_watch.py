"""What a grammar does not see of the JSON it lets through: keys that come twice, depth, and texts that would not end.

A pure function of the bytes, as they come. It follows a text that a grammar keeps well formed, and is no parser: of
anything else it says nothing useful. Knows nothing of tokens and of grammars.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, replace
from enum import Enum

from shared.structured import (
    MAX_ALIKE,
    MAX_ALIKE_BYTES,
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
_BLANK, _QUOTE, _COMMA = b" \t\r\n", ord('"'), ord(",")
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
class Level:
    """An array or object that is open. `keys`: of an object, those so far; None: an array. Of an array, `items` are done, with a
    checksum of `sum` and `size` bytes in all; the last `alike` are the same, whose own checksum is `last`. `around`: checksum
    and bytes of the item that it is in, up to it."""

    keys: frozenset[str] | None
    items: int = 0
    alike: int = 0
    last: int = -1
    sum: int = 0
    size: int = 0
    around: tuple[int, int] = (0, 0)
    tired: bool = False

    def another(self, item: int, size: int) -> Level:
        """With one more item, by its checksum and bytes."""
        alike = self.alike + 1 if item == self.last else 1
        return replace(
            self,
            items=self.items + 1,
            alike=alike,
            last=item,
            sum=zlib.crc32(b"%d," % item, self.sum),
            size=self.size + size + 1,
            tired=alike >= MAX_ALIKE and alike * size >= MAX_ALIKE_BYTES,
        )


@dataclass(frozen=True, slots=True)
class JsonWatch:
    """A place in a JSON text; `after` gives the one behind further bytes.

    `open`: the arrays and objects around it. `key`: a string that begins here is a key.
    `string`: the bytes of the string it is in, None outside. `escaped`: behind a backslash. `number`: those of the number
    it is in. `sum`, `size`: a checksum of what the innermost array's item, or object, has so far, and its bytes."""

    open: tuple[Level, ...] = ()
    key: bool = False
    string: bytes | None = None
    escaped: bool = False
    number: bytes = b""
    sum: int = 0
    size: int = 0

    @property
    def full(self) -> Full | None:
        if self.string is not None:
            return Full.STRING if not self.escaped and _is_full(self.string) else None
        return Full.NUMBER if len(self.number) >= MAX_NUMBER or _exponent(self.number) >= MAX_EXPONENT else None

    @property
    def digit(self) -> int | None:
        """The last one of the number it is in, as its byte."""
        return self.number[-1] if self.number[-1:].isdigit() else None

    @property
    def tired(self) -> int | None:
        """The depth of the outermost array around it whose items have long been alike."""
        return next((depth for depth, level in enumerate(self.open) if level.tired), None)

    def repeats(self, piece: bytes) -> bool:
        """Whether `piece` would begin another item of the tired array."""
        depth, behind = self.tired, self.after(piece)
        if depth is None or behind is None or len(behind.open) <= depth:
            return False
        return behind.open[depth].items > self.open[depth].items

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
        place = self._summed(b'"%b"' % string)
        if not self.key:
            return replace(place, string=None), end + 1
        name, level = _read(string), self.open[-1] if self.open else None
        if level is None or level.keys is None or name in level.keys:
            return None, end
        known = replace(level, keys=level.keys | {name})
        return replace(place, open=(*self.open[:-1], known), key=False, string=None), end + 1

    def _outside(self, byte: int) -> JsonWatch | None:
        if byte in NUMBER and (self.number or byte not in b"eE"):  # the e of true and false is none
            number = self.number + bytes((byte,))
            # One that its grammar does not let end, since it is no multiple of what it should be, may never be.
            endless = len(number) > 4 * MAX_NUMBER
            return None if endless or _exponent(number) > MAX_EXPONENT else replace(self, number=number)
        place = replace(self._summed(self.number), number=b"") if self.number else self
        if byte in _BLANK:
            return place
        if byte == _QUOTE:
            return replace(place, string=b"")
        if byte in b"[{":
            if len(place.open) == MAX_DEPTH:
                return None
            is_object = byte == b"{"[0]
            level = Level(frozenset() if is_object else None, around=(place.sum, place.size))
            return JsonWatch((*place.open, level), key=is_object)
        if byte in b"]}":
            level = (place.open[-1] if place.open else Level(None)).another(place.sum, place.size)
            before, size = level.around
            written = b"%c%d" % (byte, level.sum)
            return JsonWatch(place.open[:-1], sum=zlib.crc32(written, before), size=size + level.size + 1)
        if byte == _COMMA and place.open and (level := place.open[-1]).keys is None:
            return replace(place, open=(*place.open[:-1], level.another(place.sum, place.size)), sum=0, size=0)
        return replace(place._summed(bytes((byte,))), key=place.key or (byte == _COMMA and bool(place.open)))

    def _summed(self, piece: bytes) -> JsonWatch:
        return replace(self, sum=zlib.crc32(piece, self.sum), size=self.size + len(piece))


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
