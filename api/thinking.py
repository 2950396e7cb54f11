"""How a chat template begins the assistant's turn, with thinking on and off.

From that come the no-thinking tail, what a template writes when thinking is off and not when it is on, and how reasoning is
told from the rest: a text may begin inside a think block that the template has opened. A raw prompt for which thinking was switched off gets the tail,
and nothing else is ever done to a raw prompt. How the tail meets a prompt that has part of it already:
`shared/no_thinking.py`. Rendering is a function handed in.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shared.errors import SluiceError
from shared.reasoning import MAX_TAG, Reasoning
from shared.think_tags import CLOSING, OPENING, closing, opening_in

#: What the user of the probe chat says: only what a template writes behind it counts.
PROBE = "sluice probe"
#: The names under which templates know the switch.
SWITCHES = ("enable_thinking", "thinking")
#: Templates remembered.
KEPT = 32
#: How long a template that failed is left alone, s.
PAUSE = 30.0

_OPEN_AT_END = re.compile(rf"(?P<tag>{OPENING.pattern})\s*\Z")
_CLOSED_AT_END = re.compile(rf"(?:{CLOSING.pattern})\s*\Z")
_CUT_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷\s]*\Z")
_TAIL = re.compile(rf"\s*(?:{OPENING.pattern}|{CLOSING.pattern})")

#: Renders a template once for each set of variables.
RenderAll = Callable[[str, Sequence[Mapping[str, Any]]], list[str]]


def tail_of(off: str, on: str) -> str | None:
    """The tail, from the probe chat rendered with thinking off and on; None if the template has no such switch.

    header = the longest beginning that both have, cut back to before an opening think tag at its end and to before a
    tag it splits; tail = off without the header. Only what follows the user's words is looked at: a template may say
    something else about thinking in its system message. For the same reason an opening tag counts only at the
    header's end, where it is what the model would go on from. A rest that is no think block is no tail.
    """
    if off == on:
        return None
    if PROBE in off and PROBE in on:
        off, on = off.rpartition(PROBE)[2], on.rpartition(PROBE)[2]
    tail = _without_header(off, on)
    if not tail:
        return "" if off != on else None
    if not _TAIL.match(tail) and on and on in off:
        # The template also writes something to the user's words (GLM-4.5: /nothink): look behind that.
        tail = _without_header(off[off.rindex(on) :], on)
    return tail if _TAIL.match(tail) else None


def _without_header(off: str, on: str) -> str:
    length = next((k for k, (a, b) in enumerate(zip(off, on, strict=False)) if a != b), min(len(off), len(on)))
    header = _CUT_TAG.sub("", off[:length]) if length < len(off) else off
    header = _OPEN_AT_END.sub("", header)
    return off[len(header) :]


class Shape(NamedTuple):
    """`tail`: the no-thinking tail, None without one. `switches`: the template knows the switch. `bare`: it writes nothing
    behind the user's words."""

    tail: str | None = None
    switches: bool = False
    bare: bool = False


class Shapes:
    """The shapes of the templates of this process's models, each found once."""

    def __init__(self, render_all: RenderAll, clock: Callable[[], float] = time.monotonic) -> None:
        self._render_all = render_all
        self._clock = clock
        self._known: OrderedDict[str, Shape] = OrderedDict()
        self._failed: dict[str, tuple[float, SluiceError]] = {}

    def of(self, template: str | None, **names: str | None) -> Shape:
        """The shape of a template. `names`: special tokens that templates may write.

        Raises what rendering raises, for `PAUSE` seconds without trying again."""
        if not template:
            return Shape()
        key = hashlib.sha256(repr((template, sorted(names.items()))).encode()).hexdigest()
        known = self._known.pop(key, None)  # to the end; by steps that other threads may come between
        if known is not None:
            self._known[key] = known
            return known
        until, error = self._failed.get(key, (0.0, None))
        if error is not None and self._clock() < until:
            raise error
        chat = {**names, "messages": [{"role": "user", "content": PROBE}], "add_generation_prompt": True}
        try:
            off, on = self._render_all(
                template, [{**chat, **dict.fromkeys(SWITCHES, value)} for value in (False, True)]
            )
        except SluiceError as failure:
            if failure.status >= 500:  # no fault of the template
                raise
            if len(self._failed) >= KEPT:
                self._failed.clear()
            self._failed[key] = (self._clock() + PAUSE, failure)
            raise
        known = self._known[key] = Shape(tail_of(off, on), off != on, on.rstrip().endswith(PROBE))
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known


def reasoning_of(template: str, prompt: str, *, bare: bool) -> Reasoning | None:
    """How the reasoning is told from the rest of what a model writes behind a prompt that its template has made. `bare`:
    the prompt ends with the user's words, whatever they are.

    None for a model that does not think, by what its template says, and behind a think block that is closed."""
    opening = opening_in(template)
    if opening is None:
        return None
    end = "" if bare else prompt.rstrip()[-MAX_TAG:]
    opened = _OPEN_AT_END.search(end)
    if opened is not None:
        return Reasoning(opened["tag"], closing(opened["tag"]), opened=True)
    return None if _CLOSED_AT_END.search(end) else Reasoning(opening, closing(opening))
