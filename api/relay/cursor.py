"""Where a client stopped reading a stream, and what comes behind it.

Pure. A replay begins with the request's first frame, as every builder does; what the client has seen is thrown away.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from api.relay.builder import Builder, Event
from shared.errors import InvalidRequest, LogLost
from shared.frames import Frame, Name, first_seq

# No more digits than a frame's name can have: an attempt is a time in ms, a seq counts tokens.
_EVENT_ID = re.compile(r"(?P<a>[0-9]{1,16})-(?P<s>[0-9]{1,12})(?:\.(?P<k>[0-9]{1,9}))?")
_SEQ = re.compile(r"[0-9]{1,12}")


class Cursor(NamedTuple):
    """The last event seen: number `k` of the events of frame `a-s`. `a` None: the client named the frame's seq alone, so
    another text at that place cannot be told from its own; `k` None: all events of the frame. s 0: nothing seen."""

    a: int | None
    s: int
    k: int | None = 0

    @classmethod
    def parse(cls, text: str, field: str, *, bare: bool = False) -> Self:
        """An event id, or with `bare` also a seq. Raises InvalidRequest naming `field` for anything else."""
        found = _EVENT_ID.fullmatch(text)
        if found is not None:
            return cls(int(found["a"]), int(found["s"]), int(found["k"] or 0))
        if bare and _SEQ.fullmatch(text):
            return cls(None, int(text), None)
        raise InvalidRequest(f"{field} must be the id of an event: attempt-number.", param=field)


#: Before every event.
BEGIN = Cursor(None, 0, None)


class Behind:
    """Feeds a builder and passes on the events behind the cursor. `reached`: the frame of the cursor was there."""

    def __init__(self, builder: Builder, cursor: Cursor = BEGIN) -> None:
        self._builder = builder
        self._cursor = cursor
        self.reached = not cursor.s

    def feed(self, last: Name, frames: list[Frame]) -> tuple[list[Event], list[Frame]]:
        """(events, frames) of these behind the cursor. All frames are of the attempt `last.a`.

        Raises LogLost if the frame of the cursor belongs to another attempt than the client saw: the store lost frames,
        and the request was run again from before them."""
        if self.reached:
            return self._builder.feed(last, frames), frames
        cursor = self._cursor
        if last.s < cursor.s:
            self._builder.feed(last, frames)
            return [], []
        if cursor.a is not None and cursor.a != last.a:
            raise LogLost("The store lost part of this stream; what there is now belongs to another run.")
        self.reached = True
        seen = cursor.s - first_seq(last, frames) + 1
        made = self._builder.feed(Name(last.a, cursor.s), frames[:seen])
        events = [] if cursor.k is None else [event for event in made if _is_behind(event.id, cursor.s, cursor.k)]
        rest = frames[seen:]
        return events + (self._builder.feed(last, rest) if rest else []), rest


def _is_behind(event_id: str, s: int, k: int) -> bool:
    found = _EVENT_ID.fullmatch(event_id)
    return found is not None and (int(found["s"]), int(found["k"] or 0)) > (s, k)
