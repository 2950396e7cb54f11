"""Between a request's frames and its builder: a text with a constraint is looked at before its client may take it for good.

What masks guarantee passes as it comes, and each choice is checked before its finish. What they do not is held back until
all is there (`Constraint.whole`). Which frames pass is a function of the frames and of what the check says, so that a stream,
a resumed one and the whole agree. Knows no HTTP, and no kind of request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from api.relay.builder import Builder
from shared.errors import StructuredOutputFailed
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start, Take, first_seq
from shared.jobs import Job
from shared.reasoning import Splitter
from shared.structured import Constraint

#: Whether a finished text is what it was to be.
Holds = Callable[[Constraint, str], bool]

_FAILED = Error.of(StructuredOutputFailed("The text does not have the form that the request demands."))


class Passed(NamedTuple):
    """Frames for the builder; `last` names the last of them. `silent`: they count, and their events are nobody's."""

    last: Name
    frames: list[Frame]
    silent: bool = False


class Inspector:
    """Takes a request's frames in order, each once, from its first on. Without a constraint all pass."""

    def __init__(self, job: Job, holds: Holds) -> None:
        self._job = job
        self._constraint = job.constraint
        self._holds = holds
        #: Of several candidates, the client gets some: only the end tells which.
        self._whole = job.constraint is not None and (job.constraint.whole or job.candidates > job.n)
        self._held: list[Passed] = []
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._finishes: dict[int, Finish] = {}
        self._over = False

    def feed(self, last: Name, frames: list[Frame]) -> list[Passed]:
        """What passes now. Raises what the check raises."""
        if self._constraint is None:
            return [Passed(last, frames)]
        if self._over:
            return []
        self._note(frames)
        return self._hold(last, frames) if self._whole else self._look(last, frames)

    def _note(self, frames: list[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Delta):
                self._texts[frame.i].append(frame.text)
            elif isinstance(frame, Finish):
                self._finishes.setdefault(frame.i, frame)

    def _look(self, last: Name, frames: list[Frame]) -> list[Passed]:
        """All up to the finish of a choice that is not right; in its place, the error."""
        first = first_seq(last, frames)
        for index, frame in enumerate(frames):
            if isinstance(frame, Finish) and not self._is_right(frame.i):
                self._over = True
                place = first + index
                before = [Passed(Name(last.a, place - 1), frames[:index])] if index else []
                return [*before, Passed(Name(last.a, place), [_FAILED])]
        return [Passed(last, frames)]

    def _hold(self, last: Name, frames: list[Frame]) -> list[Passed]:
        """What says nothing of the text, until the end; then all, if it is right."""
        silent = 0
        if not self._held:
            silent = next((index for index, frame in enumerate(frames) if not self._is_silent(frame)), len(frames))
        early = [Passed(Name(last.a, first_seq(last, frames) + silent - 1), frames[:silent])] if silent else []
        if silent < len(frames):
            self._held.append(Passed(last, frames[silent:]))
        end = frames[-1]
        if not isinstance(end, End | Error):
            return early
        self._over = True
        if isinstance(end, End) and all(map(self._is_right, self._kept(end))):
            return [*early, *self._held]
        unseen = [Passed(held.last, held.frames, silent=True) for held in self._held]
        return [*early, *unseen, Passed(last, [end if isinstance(end, Error) else _FAILED])]

    def _is_silent(self, frame: Frame) -> bool:
        """It says nothing of a text. (The beginning comes with the prompt, if that is echoed.)"""
        return isinstance(frame, Take) or (isinstance(frame, Start) and not self._job.echo)

    def _kept(self, end: End) -> Iterable[int]:
        return self._finishes if end.pick is None else end.pick

    def _is_right(self, choice: int) -> bool:
        """Whether a choice that is finished may be: a text that was cut off is what it is."""
        assert self._constraint is not None
        finish = self._finishes.get(choice)
        if finish is None or finish.reason == "length":
            return True
        splitter = Splitter(self._job.reasoning)
        parts = [splitter.feed(text) for text in self._texts[choice]]
        return self._holds(self._constraint, "".join(part.content for part in [*parts, splitter.flush()]))


def feed(builder: Builder, inspector: Inspector, last: Name, frames: list[Frame]) -> None:
    """Feeds a builder with what passes, for what it knows at the end."""
    for passed in inspector.feed(last, frames):
        builder.feed(passed.last, passed.frames)
