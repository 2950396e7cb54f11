"""One choice of a request: from sampled ids to text that may be sent, and to its end.

Everything here is a pure function of the request's fields and the ids: a worker that takes over a choice feeds the
logged ids to a fresh state and is where the other one was. Knows nothing of engines, logprobs or frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared.reasoning import Counter, Reasoning
from workers.generation.stops import StopScanner, StopStrings
from workers.generation.text import Utf8Stream, continues

Reason = Literal["stop", "length"]


class Finish(NamedTuple):
    """`stop_reason`: the stop string or the stop token id that ended the choice; None for an end token."""

    reason: Reason
    stop_reason: str | int | None = None


class Released(NamedTuple):
    """What one feed set free. `out`: how many ids of the choice, since its first, have all their text out."""

    text: str
    out: int
    finish: Finish | None = None


@dataclass(slots=True)
class _Span:
    """Where an id's text lies, in characters of the choice's text. `end` None: within a character not complete yet."""

    begin: int
    end: int | None


class ChoiceState:
    """The state of one choice.

    `max_new`: tokens, at least 1 (a request for none has nothing to feed: `finish` it). `end_ids`: the model's;
    they and `stop_token_ids` end the choice wherever they come, so engines must not sample them where they are
    not to end it. `ids`: how many were fed, the end token included. `out`: see `Released`; an id whose text is
    partly out does not count yet. At the end all ids count, but after a stop string only those whose text
    begins before it: the others have no text."""

    def __init__(
        self,
        *,
        stops: StopStrings,
        max_new: int,
        end_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
        reasoning: Reasoning | None = None,
    ) -> None:
        self.ids = 0
        self.out = 0
        #: Where the text of the last id begins, in code points of the choice's text; an end token's is at its end.
        self.begin = 0
        self.finished: Finish | None = None
        self._max_new = max_new
        self._end_ids = frozenset(end_ids)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._utf8 = Utf8Stream()
        self._reasoning = None if reasoning is None else Counter(reasoning)
        self._scanner = StopScanner(stops)
        #: Characters decoded, and released, so far.
        self._decoded = 0
        self._released = 0
        #: Ids that are not out, in order, and those of them that wait for the rest of a character.
        self._open: deque[_Span] = deque()
        self._split: list[_Span] = []

    def feed(self, token: int, piece: bytes, complete: bool = False) -> Released:
        """The next sampled id and its raw bytes (b"" for one whose text is not to be shown). The text of an end token
        or stop token is no part of the text. `complete`: it is the last one, by the grammar. Ids after the finish,
        sampled before the engine heard of it, do not count."""
        if self.finished is not None:
            return Released("", self.out)
        self.ids += 1
        if token in self._end_ids or token in self._stop_token_ids:
            ended = self._end(Finish("stop", None if token in self._end_ids else token))
            self.begin = self._decoded
            return ended
        pending = self._utf8.pending
        text = self._utf8.feed(piece)
        if self._reasoning is not None:
            self._reasoning.feed(text)
        # What comes behind half a character is inside it, unless it shows that there is none.
        begin = self.begin = self._decoded + (1 if pending and text and not continues(pending, piece) else 0)
        released = self._scan(text)
        if not self._open and not self._utf8.pending and self._released == self._decoded:
            self.out += 1
        else:
            span = _Span(begin, None if self._utf8.pending else self._decoded)
            self._open.append(span)
            if span.end is None:
                self._split.append(span)
            self._count()
        if self.finished is None and (complete or self.ids >= self._max_new):
            last = self._end(Finish("stop" if complete else "length"))
            return Released(released + last.text, last.out, last.finish)
        return Released(released, self.out, self.finished)

    def finish(self, reason: Reason) -> Released:
        """The engine ended the choice, other than by an id or at `max_new`: what was held back comes out."""
        return Released("", self.out) if self.finished is not None else self._end(Finish(reason))

    @property
    def reasoned(self) -> int:
        """Ids that were reasoning, end tokens not counted."""
        return 0 if self._reasoning is None else self._reasoning.count

    def replay(self, tokens: Iterable[tuple[int, bytes]], complete: bool = False) -> Released:
        """Feeds (id, piece) pairs, of which the last may be the last by the grammar; all their text in one."""
        fed = list(tokens)
        steps = [self.feed(*pair, complete and place == len(fed)) for place, pair in enumerate(fed, 1)]
        return Released("".join(step.text for step in steps), self.out, self.finished)

    def _end(self, finish: Finish) -> Released:
        """Flushes; if that completes a stop string, the stop string was first."""
        released = self._scan(self._utf8.flush())
        if self.finished is None:
            self.finished = finish
            self.out = self.ids
            return Released(released + self._scanner.flush(), self.out, finish)
        self._count()
        return Released(released, self.out, self.finished)

    def _scan(self, text: str) -> str:
        """Newly decoded text through the stop strings; a match finishes the choice. Returns what is released."""
        if text:
            for span in self._split:  # they were waiting for the character that is now the first
                span.end = self._decoded + 1
            self._split.clear()
        self._decoded += len(text)
        released = self._scanner.feed(text)
        self._released += len(released)
        if self._scanner.matched is not None:
            self.finished = Finish("stop", self._scanner.matched)
        return released

    def _count(self) -> None:
        """Ids whose text is out leave the open ones; after a stop string, those whose text begins before it."""
        while self._open:
            first = self._open[0]
            if self.finished is None and (first.end is None or first.end > self._released):
                break
            if self.finished is not None and first.begin >= self._released:
                break
            self._open.popleft()
            self.out += 1
