"""The order of one stream's frames: what is new, what was seen, what is missing, what is another text.

Pure. Feed it entries from the channel and from the log in any order, any number of times: what it lets through
is every frame once, in order.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum

from shared.errors import LogLost
from shared.frames import TERMINAL, End, Error, Frame, Name, Take, first_seq


class Verdict(Enum):
    """What an entry without new frames means."""

    SEEN = "seen"
    GAP = "gap"


class Order:
    """Follows one request from its first frame on."""

    def __init__(self) -> None:
        #: The last frame let through.
        self.last = Name(0, 0)
        #: A terminal frame was let through; nothing counts after it.
        self.ended = False
        self._run_starts: list[int] = []  # first seq of each attempt's run of frames, and the attempt
        self._run_attempts: list[int] = []

    def feed(self, last: Name, frames: list[Frame]) -> list[Frame] | Verdict:
        """The frames of the entry that are new and next; SEEN if there are none; GAP if some before it are missing.

        Raises LogLost when the entry belongs to another text than what was let through: another attempt at a seq
        already seen, or an attempt that changes other than by take, end or error.
        """
        if self.ended:
            return Verdict.SEEN
        first = first_seq(last, frames)
        if first < 1 or not frames:  # nobody of ours names frames so
            return Verdict.SEEN
        if first > self.last.s + 1:
            return Verdict.GAP
        for seq in range(first, min(last.s, self.last.s) + 1):
            if self._attempt_at(seq) != last.a:
                raise LogLost("The store lost part of this stream; what follows belongs to another run.")
        new = frames[max(0, self.last.s + 1 - first) :]
        if not new:
            return Verdict.SEEN
        if last.a != self.last.a:
            if not isinstance(new[0], Take | End | Error):
                raise LogLost("The store lost part of this stream: its frames change attempts without a take.")
            self._run_starts.append(self.last.s + 1)
            self._run_attempts.append(last.a)
        for index, frame in enumerate(new):
            if isinstance(frame, TERMINAL):
                self.ended = True
                new = new[: index + 1]
                break
        self.last = Name(last.a, self.last.s + len(new))
        return new

    def _attempt_at(self, seq: int) -> int:
        return self._run_attempts[bisect_right(self._run_starts, seq) - 1]
