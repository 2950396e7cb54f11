"""What earlier attempts have logged of a request: where the next one goes on.

Pure; reads frames, knows nothing of engines and of texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import LogLost
from shared.frames import Delta, Finish, Frame, Logprob, Prompt, Start, Take


@dataclass(slots=True)
class PastChoice:
    """`lp`: logprobs of `ids`, where they were asked for; `text`: what clients have seen."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    lp: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None


class Past:
    """`scored[k]`: entries of prompt k's logprobs that are out. `cached`: of choices, where a frame told. `told`: ids
    whose bytes are known."""

    def __init__(self, choices: int, prompts: int) -> None:
        self.start: Start | None = None
        self.choices = [PastChoice() for _ in range(choices)]
        self.scored = [0] * prompts
        self.cached: dict[int, int] = {}
        self.told: set[int] = set()

    @classmethod
    def of(cls, frames: Iterable[Frame], *, choices: int, prompts: int) -> Past | None:
        """None: nothing but takes was logged. Raises LogLost for frames that no worker writes for this request."""
        past, anything = cls(choices, prompts), False
        for frame in frames:
            if not isinstance(frame, Take):
                anything = True
                past._add(frame)
        return past if anything else None

    def is_scored(self, number: int, candidates: int) -> bool:
        """Whether all logprobs of a prompt are out: its choices' tokens come behind them."""
        own = self.choices[number * candidates : (number + 1) * candidates]
        return any(choice.ids or choice.finish is not None for choice in own)

    def _add(self, frame: Frame) -> None:
        try:
            if isinstance(frame, Start):
                self.start = frame
                self.cached[0] = frame.cached_tokens
            elif isinstance(frame, Prompt):
                self.scored[frame.i] = frame.from_ + len(frame.t)
                self.told.update(frame.p)
            elif isinstance(frame, Delta):
                self._add_delta(frame)
            elif isinstance(frame, Finish):
                self.choices[frame.i].finish = frame
            else:
                raise LogLost("The log of this request has an end already.")
        except IndexError:
            raise LogLost("The log of this request is not its own: it has other choices.") from None

    def _add_delta(self, frame: Delta) -> None:
        choice = self.choices[frame.i]
        choice.ids += frame.t
        choice.text += frame.text
        choice.lp += frame.lp or ()
        self.told.update(frame.p)
        self.cached.setdefault(frame.i, frame.c)
