"""What has to come out of given tokens, worked out from the contract alone and not by the product's code.

Whole byte strings and plain searches, no streaming: slow, short, and of another build than what it judges.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Expected(NamedTuple):
    text: str
    finish: str
    stop_reason: str | None
    completion_tokens: int


def pending(data: bytes) -> int:
    """How many bytes at the end begin a character that further bytes could complete."""
    for length in (3, 2, 1):
        end = data[-length:]
        if len(end) < length or not 0xC2 <= end[0] <= 0xF4:
            continue
        for count in (1, 2, 3):
            for rest in itertools.product(b"\x80\x90\xa0\xbf", repeat=count):
                try:
                    if len((end + bytes(rest)).decode()) == 1:
                        return length
                except UnicodeDecodeError:
                    continue
    return 0


def first_stop(text: str, stops: list[str]) -> str | None:
    """The stop string that is first to end in the text; of several that end at one character the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len)
    return None


def cut(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(what stays, the stop string) if there is one."""
    stop = first_stop(text, stops)
    return None if stop is None else (text[: text.index(stop)], stop)


def completion(pieces: Sequence[bytes], stops: list[str], limit: int | None) -> Expected:
    """Of pieces that are followed by an end token."""
    data = b""
    for count, piece in enumerate(pieces, 1):
        data += piece
        final = data[: len(data) - pending(data)].decode(errors="replace")
        if found := cut(final, stops):
            return Expected(found[0], "stop", found[1], count)
        if count == limit:
            if found := cut(data.decode(errors="replace"), stops):
                return Expected(found[0], "stop", found[1], count)
            return Expected(data.decode(errors="replace"), "length", None, count)
    text = data.decode(errors="replace")
    found = cut(text, stops)
    return Expected(found[0] if found else text, "stop", found[1] if found else None, len(pieces) + 1)


def begins(data: bytes) -> list[int]:
    """Where each character of `data`, decoded with replacements, begins, in bytes."""
    found, place = [], 0
    while place < len(data):
        found.append(place)
        for length in (1, 2, 3, 4):
            try:
                data[place : place + length].decode()
            except UnicodeDecodeError:
                continue
            place += length
            break
        else:
            try:
                data[place:].decode()
            except UnicodeDecodeError as error:
                place += error.end
    return found


def offsets(pieces: Sequence[bytes], whole: bytes) -> list[int]:
    """Where each piece begins in the text, in characters: inside one, where that one begins. `whole`: all that was
    sampled, the pieces and what may have followed."""
    starts, place, found = begins(whole), 0, []
    for piece in pieces:
        inside = [number for number, start in enumerate(starts) if start <= place]
        found.append(len(starts) if place >= len(whole) else inside[-1])
        place += len(piece)
    return found


def name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def kept(pieces: Sequence[bytes], end: str, want: Expected) -> tuple[list[str], list[int]]:
    """(names, offsets within the completion) of the tokens that have an entry: all that were sampled, but those that
    begin at or behind a stop string. `end`: the end token's name."""
    sampled = pieces[: want.completion_tokens]
    names, places = [name(piece) for piece in sampled], offsets(sampled, b"".join(sampled))
    if want.completion_tokens > len(pieces):
        names.append(end)
        places.append(len(b"".join(sampled).decode(errors="replace")))
    if want.stop_reason is not None:
        inside = sum(1 for place in places if place < len(want.text))
        names, places = names[:inside], places[:inside]
    return names, places
