"""Calls of tools, told apart from the rest of a text that a model writes, as it comes.

A pure function of the text: however it is cut, the calls are the same, so a stream, a resumed one and the whole agree. What
is no call, or a broken one, stays text. Knows nothing of tokens, frames and HTTP.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from api.strict_json import parse
from shared.errors import InvalidRequest
from shared.reasoning import overlap
from shared.tool_calls import CLOSING, OPENING, Tools

#: White space before a call that belongs to neither, characters.
MAX_SPACE = 64
#: In so many characters a call says which function it calls, or it comes when it is whole.
MAX_HEAD = 1024
#: Longest call that comes whole, characters.
MAX_WHOLE = 65_536

_SPACE = " \t\r\n"
_KEYS = ("name", "type", "id", "function", "arguments", "parameters")
_STRING = r'"[^"\\]*"'
_BEGIN = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*(?P<name>{_STRING})\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


@dataclass(slots=True)
class CallDelta:
    """What came of call `index`: its name when it begins, and more of its arguments' JSON."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Found:
    """What became clear of a text."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def begin(self, index: int, name: str) -> None:
        self.calls.append(CallDelta(index, name, ""))

    def argue(self, index: int, text: str) -> None:
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index, None, ""))
        self.calls[-1].arguments += text


def call_id(job_id: str, choice: int, index: int) -> str:
    """The id of a call: the same whoever reads the text, and how often."""
    return "call_" + hashlib.sha256(f"{job_id}/{choice}/{index}".encode()).hexdigest()[:24]


class _At(Enum):
    """TEXT: before a call. HEAD: it has begun, and does not say yet what it calls. ARGUMENTS: inside of them. AFTER: behind
    them, before its end."""

    TEXT = "text"
    HEAD = "head"
    ARGUMENTS = "arguments"
    AFTER = "after"


class _Nesting:
    """Follows a JSON object to its end, whatever is between its brackets."""

    def __init__(self) -> None:
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._seen = 0

    def end(self, text: str, begin: int) -> int | None:
        """Where the object ends that begins there; None: not in this text, of which each call gets more. `broken`: it ends
        in a `<`, which is no JSON."""
        at = begin + self._seen
        while at < len(text):
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                at = len(text)
                break
            sign, at = found[0], found.end()
            if sign == "\\":
                if at == len(text):  # what it escapes is to come
                    at -= 1
                    break
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif sign == "<":
                self.broken = True
                return at - 1
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at
        self._seen = at - begin
        return None

    def seen(self, begin: int) -> int:
        return begin + self._seen

    def move(self, by: int) -> None:
        """The text lost so many characters at its beginning."""
        self._seen -= by


class CallParser:
    """One text. White space around calls belongs to nothing."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._open, self._close = OPENING[tools.form], CLOSING[tools.form]
        #: An object may be a call without a tag before it: where a text begins, or behind another call.
        self._bare = tools.form == "llama"
        self._at = _At.TEXT
        self._held = ""
        #: Of what is held in HEAD, the part before the object.
        self._lead = 0
        self._nesting = _Nesting()
        self._in_array = False
        self._in_object = False
        #: There was text behind the only call.
        self._spoken = False
        #: Calls that have begun.
        self.calls = 0
        #: All of them have come to the end of their arguments.
        self.whole = True

    def feed(self, text: str) -> Found:
        """What `text` makes clear."""
        found = Found()
        self._held += text
        steps = {
            _At.TEXT: self._text,
            _At.HEAD: self._head,
            _At.ARGUMENTS: self._arguments,
            _At.AFTER: self._after,
        }
        while self._held and steps[self._at](found):
            pass
        return found

    def flush(self, text: str = "") -> Found:
        """The end of the text, behind its last piece: what was held back."""
        found = self.feed(text)
        held, self._held = self._held, ""
        if self._at is _At.ARGUMENTS:
            self.whole = False
            if held:
                found.argue(self.calls - 1, held)
        elif self._at is _At.HEAD or (self._at is _At.TEXT and (held.strip(_SPACE) or not self.calls)):
            found.content += held
        return found

    # Each step takes what is clear off the text that is held; False: more text is needed.

    def _text(self, found: Found) -> bool:
        held = self._held
        if self.calls and self._tools.single:
            if self._spoken or held.strip(_SPACE):
                self._spoken, self._held = True, ""
                found.content += held
            return False
        if self._bare:
            lead = len(held) - len(held.lstrip(_SPACE + ";" if self.calls else _SPACE))
            if lead == len(held):
                return False
            self._bare = False
            if held[lead] == "{":
                self._begin(lead)
                return True
        begin = held.find(self._open)
        end = begin if begin >= 0 else len(held) - overlap(held, self._open)
        shown = max(len(held[:end].rstrip(_SPACE)), end - MAX_SPACE)
        found.content += held[:shown]
        self._held = held[shown:]
        if begin < 0:
            return False
        self._begin(begin - shown + len(self._open))
        return True

    def _begin(self, lead: int) -> None:
        self._at, self._lead, self._nesting = _At.HEAD, lead, _Nesting()

    def _no_call(self, found: Found) -> bool:
        """What looked like a call is text."""
        found.content += self._held[: self._lead]
        self._held = self._held[self._lead :]
        self._at, self._in_array = _At.TEXT, False
        return True

    def _head(self, found: Found) -> bool:
        held = self._held
        begin = self._lead
        while begin < len(held) and held[begin] in _SPACE:
            begin += 1
        if begin - self._lead > MAX_SPACE:
            return self._no_call(found)
        if begin == len(held):
            return False
        if held[begin] == "[" and self._tools.form == "hermes" and not self._in_array:
            self._in_array, self._lead = True, begin + 1
            return True
        if held[begin] != "{" or not _may_be_call(held, begin + 1):
            return self._no_call(found)
        named = _BEGIN.match(held, begin, begin + MAX_HEAD)
        if named is not None:
            if (name := named["name"][1:-1]) not in self._tools.names:
                return self._no_call(found)
            self._called(found, name)
            self._at, self._held, self._nesting = _At.ARGUMENTS, held[named.end() :], _Nesting()
            return True
        end = self._nesting.end(held[: begin + MAX_WHOLE], begin)
        if end is None and len(held) - begin < MAX_WHOLE:
            return False
        whole = None if end is None or self._nesting.broken else _call_in(held[begin:end])
        if whole is None or whole[0] not in self._tools.names:
            return self._no_call(found)
        self._called(found, whole[0])
        found.argue(self.calls - 1, whole[1])
        self._at, self._held, self._in_object = _At.AFTER, held[end:], False
        return True

    def _called(self, found: Found, name: str) -> None:
        found.begin(self.calls, name)
        self.calls += 1
        self._in_object = True

    def _arguments(self, found: Found) -> bool:
        end = self._nesting.end(self._held, 0)
        upto = self._nesting.seen(0) if end is None else end
        if upto:
            found.argue(self.calls - 1, self._held[:upto])
            self._held = self._held[upto:]
            self._nesting.move(upto)
        if end is None:
            return False
        if self._nesting.broken:
            self.whole = False
        self._at = _At.AFTER
        return True

    def _after(self, found: Found) -> bool:
        self._held = self._held.lstrip(_SPACE)
        if not self._held:
            return False
        sign = self._held[0]
        if sign == "}" and self._in_object:
            self._in_object, self._held = False, self._held[1:]
        elif sign == "," and self._in_array and not self._tools.single:
            self._begin(1)
        elif sign == "]" and self._in_array:
            self._in_array, self._held = False, self._held[1:]
        elif self._close and self._held.startswith(self._close):
            self._held = self._held[len(self._close) :]
            self._behind()
        elif self._close and self._close.startswith(self._held):
            return False
        else:
            self._behind()
        return True

    def _behind(self) -> None:
        self._at, self._in_array, self._bare = _At.TEXT, False, self._tools.form == "llama"


def _may_be_call(text: str, begin: int) -> bool:
    """Whether an object may be a call, by its first key, as far as that is there."""
    key = text[begin : begin + MAX_SPACE].lstrip(_SPACE)
    if not key:
        return len(text) - begin < MAX_SPACE
    name, quote, _ = key[1:].partition('"')
    if key[0] != '"':
        return False
    return name in _KEYS if quote else any(known.startswith(name) for known in _KEYS)


def _call_in(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of an object that is a call."""
    try:
        read: Any = parse(text.encode())
        if isinstance(read, dict) and isinstance(read.get("function"), dict):
            read = read["function"]
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return None
        arguments: Any = next((read[key] for key in ("arguments", "parameters") if read.get(key) is not None), {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return (read["name"], written) if isinstance(parse(written.encode()), dict) else None
    except (InvalidRequest, UnicodeEncodeError):
        return None
