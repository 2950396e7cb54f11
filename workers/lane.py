"""A lane: one job in this worker, from its prompt to its last frame.

Turns engine events into frames. Knows the job and its choices, nothing of Redis; `emitter.py` carries the frames
away. All methods but the constructor belong to the engine thread; `outbox` may be emptied by another one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from shared.errors import ContextLengthExceeded, InvalidRequest, SluiceError
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start
from shared.jobs import Job
from workers.engines.base import EngineRequest, Failed, Finished, PromptLogprobs, Started, Token
from workers.generation.choice import ChoiceState, Released
from workers.generation.stops import StopStrings

#: RQ's word for how a job ended.
Outcome = Literal["finished", "failed", "stopped"]


def room_for(job: Job, prompt: Sequence[int], context: int) -> int:
    """How many tokens a choice of this prompt may sample.

    Raises InvalidRequest for an empty prompt, ContextLengthExceeded if prompt and max_tokens do not fit."""
    if not prompt:
        raise InvalidRequest("prompt is empty and the model has no token to begin with.", param="prompt")
    room = context - len(prompt)
    if room < 1:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has {len(prompt)} tokens and leaves no room.",
            param="prompt",
        )
    if job.max_tokens is None:
        return room
    if job.max_tokens > room and not job.fit_max_tokens:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens, but the prompt has {len(prompt)} tokens and max_tokens asks for "
            f"{job.max_tokens}; {room} are left.",
            param="max_tokens",
        )
    return min(job.max_tokens, room)


class Lane:
    """`name` is the log's last frame, written by the take; `prompts` and `rooms` are ids and tokens to sample, one each
    a prompt; `deadline` is on the monotonic clock, s."""

    def __init__(
        self,
        job: Job,
        name: Name,
        prompts: list[list[int]],
        rooms: list[int],
        *,
        home: str = "",
        deadline: float = math.inf,
        end_ids: Collection[int] = (),
    ) -> None:
        self.job = job
        self.attempt = name.a
        self.home = home
        self.deadline = deadline
        #: Frames that the emitter has not taken yet.
        self.outbox: deque[Frame] = deque()
        #: Set last and once: the frame that ends the request.
        self.terminal: End | Error | None = None
        self.outcome: Outcome = "finished"
        #: Somebody else ended the request or took it over, or its end is written: nothing counts any more.
        self.dropped = False
        #: The emitter's: last frame known to be in the log, an entry under way, the connection that wrote it.
        self.written = name
        self.inflight: tuple[Name, bytes] | None = None
        self.epoch = -1

        self._prompts = prompts
        self._rooms = rooms
        self._began = time.monotonic()
        self._first_token: float | None = None
        self._cached: dict[int, int] = {}
        stops = StopStrings(job.stop)
        self._choices = [
            ChoiceState(
                stops=stops,
                max_new=rooms[index // self._per_prompt],
                end_ids=end_ids,
                stop_token_ids=job.params.stop_token_ids,
            )
            for index in range(job.choices)
        ]
        self._texts = [""] * job.choices
        self._deltas: dict[int, Delta] = {}
        self._open = set(range(job.choices))

    @classmethod
    def failed(cls, job: Job, name: Name, error: SluiceError, *, home: str) -> Lane:
        """A lane for a job that cannot run: it has only its end."""
        lane = cls(job, name, [[] for _ in job.prompts], [1 for _ in job.prompts], home=home)
        lane.fail(error)
        return lane

    @property
    def _per_prompt(self) -> int:
        return self.job.choices // len(self._prompts)

    @property
    def over(self) -> bool:
        """Nothing of this lane is left to generate."""
        return self.dropped or self.terminal is not None

    def result(self) -> list[dict[str, Any]]:
        """The choices so far, for RQ's result."""
        return [
            {"index": index, "text": text, "finish_reason": choice.finished and choice.finished.reason}
            for index, (text, choice) in enumerate(zip(self._texts, self._choices, strict=True))
        ]

    def requests(self) -> list[EngineRequest]:
        """One engine request a choice; `index` finds the choice again."""
        job, per_prompt = self.job, self._per_prompt
        return [
            EngineRequest(
                id=f"{job.id}/{index}",
                prompt=self._prompts[index // per_prompt],
                max_new=self._rooms[index // per_prompt],
                seed=job.seed,
                params=job.params,
                choice=index % per_prompt,
                logprobs=job.logprobs,
            )
            for index in range(job.choices)
        ]

    def open_requests(self) -> Iterable[str]:
        """Ids of the engine requests that have not ended."""
        return [f"{self.job.id}/{index}" for index in self._open]

    def on_event(self, index: int, event: Started | PromptLogprobs | Token | Finished | Failed) -> bool:
        """Takes in one event of choice `index`. True: the engine should stop that choice, it is done."""
        if self.over or index not in self._open:
            return False
        if isinstance(event, Token):
            return self._on_token(index, event)
        if isinstance(event, Started):
            self._on_started(index, event)
        elif isinstance(event, Finished):
            self._say(index, self._choices[index].finish(event.reason))
        elif isinstance(event, Failed):
            self.fail(event.error)
        return False

    def _on_started(self, index: int, event: Started) -> None:
        if not self._cached:
            self.outbox.append(Start(prompt_tokens=sum(map(len, self._prompts)), cached_tokens=event.cached))
        self._cached[index] = event.cached

    def _on_token(self, index: int, event: Token) -> bool:
        self._first_token = self._first_token or time.monotonic()
        released = self._choices[index].feed(event.token, event.piece)
        self._say(index, released, event)
        return released.finish is not None

    def _say(self, index: int, released: Released, token: Token | None = None) -> None:
        """Adds to the choice's delta of this step, and closes the choice at its end."""
        choice = self._choices[index]
        if token or released.text:
            delta = self._deltas.get(index)
            if delta is None:
                delta = self._deltas[index] = Delta(index, [])
            if token:
                delta.t.append(token.token)
                if token.logprob is not None:
                    delta.lp = [*(delta.lp or ()), token.logprob]
            delta.text += released.text
            delta.n = released.out if released.out < choice.ids else None
            self._texts[index] += released.text
        if released.finish is not None:
            self._flush(index)
            self.outbox.append(Finish(index, *released.finish))
            self._open.discard(index)
            if not self._open:
                self._end()

    def _end(self) -> None:
        now = time.monotonic()
        prompt = sum(map(len, self._prompts))
        completion = sum(choice.ids for choice in self._choices)
        cached = sum(self._cached.get(index, 0) for index in range(0, self.job.choices, self._per_prompt))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        first = self._first_token or now
        self.terminal = End(
            usage,
            {"first_token_ms": round((first - self._began) * 1e3, 1), "total_ms": round((now - self._began) * 1e3, 1)},
        )

    def flush(self) -> None:
        """Ends a step: what its tokens gave becomes frames."""
        for index in list(self._deltas):
            self._flush(index)

    def _flush(self, index: int) -> None:
        delta = self._deltas.pop(index, None)
        if delta is not None:
            self.outbox.append(delta)

    def fail(self, error: SluiceError, outcome: Outcome = "failed") -> None:
        """Ends the request with an error, behind what was already said."""
        if self.over:
            return
        self.flush()
        self._open.clear()
        self.outcome = outcome
        self.terminal = Error(error.to_object(), error.status, error.retryable)

    def drop(self) -> None:
        """Ends the lane without a word: the request has its end, or another owner."""
        self.dropped = True
        self._open.clear()
