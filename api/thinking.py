"""The no-thinking tail of a chat template: what a template writes when thinking is off, and not when it is on.

A raw prompt for which thinking was switched off gets that tail, and nothing else is ever done to a raw prompt. How
the tail meets a prompt that has part of it already: `shared/no_thinking.py`. Rendering is a function handed in.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import SluiceError
from shared.no_thinking import OPENING

#: What the user of the probe chat says: only what a template writes behind it counts.
PROBE = "sluice probe"
#: The names under which templates know the switch.
SWITCHES = ("enable_thinking", "thinking")
#: Templates remembered.
KEPT = 32
#: How long a template that failed is left alone, s.
PAUSE = 30.0

_CLOSING = re.compile(
    r"</(?:\w+:)?(?:think|thinking|thought|thoughts|reason|reasoning)>|\[/THINK\]|◁/think▷|<\|/think\|>"
)
_OPEN_AT_END = re.compile(rf"(?:{OPENING.pattern})\s*\Z")
_CUT_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷\s]*\Z")
_TAIL = re.compile(rf"\s*(?:{OPENING.pattern}|{_CLOSING.pattern})")

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


class Tails:
    """The tails of the templates of this process's models, each found once."""

    def __init__(self, render_all: RenderAll, clock: Callable[[], float] = time.monotonic) -> None:
        self._render_all = render_all
        self._clock = clock
        self._known: OrderedDict[str, str | None] = OrderedDict()
        self._failed: dict[str, tuple[float, SluiceError]] = {}

    def of(self, template: str | None, **names: str | None) -> str | None:
        """The tail of a template, None without a switch. `names`: special tokens that templates may write.

        Raises what rendering raises, for `PAUSE` seconds without trying again."""
        if not template:
            return None
        key = hashlib.sha256(repr((template, sorted(names.items()))).encode()).hexdigest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
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
        self._known[key] = tail_of(off, on)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return self._known[key]
