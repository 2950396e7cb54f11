"""A lane: one job in this worker, from its prompt to its last frame.

Turns engine events into frames. Knows the job and its choices, nothing of Redis; `emitter.py` carries the frames
away. All methods but the constructor belong to the engine thread; `outbox` may be emptied by another one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shared.errors import LogLost, SluiceError
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start
from shared.jobs import Job
from workers.engines.base import EngineRequest, Failed, Finished, PromptLogprobs, Started, Token
from workers.generation.choice import ChoiceState, Released
from workers.generation.constraint import Grammar
from workers.generation.stops import StopStrings
from workers.past import Past
from workers.scoring import Dictionary, PromptScores, finite

#: RQ's word for how a job ended.
Outcome = Literal["finished", "failed", "stopped", "canceled"]


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as the engine gets it. `room`: tokens a choice may sample; `added`, `hidden`: leading and trailing ids
    that the server put there; `text`: as sent, or what sent ids stand for."""

    ids: list[int]
    room: int
    added: int = 0
    text: str = ""
    sent_as_text: bool = True
    hidden: int = 0


class Lane:
    """`name` is the log's last frame, written by the take; `deadline` is on the monotonic clock, s; `hidden` ids have
    no text; `pieces` are the engine's bytes of ids. `grammar`: what the texts follow. `past`: what earlier attempts logged; the
    lane goes on behind it.
    `fields` and `log`: the job's hash and its log, as taken.

    Raises LogLost for a past that this worker cannot go on from."""

    def __init__(
        self,
        job: Job,
        name: Name,
        prompts: list[PromptIds],
        *,
        home: str = "",
        fanout: bool = False,
        deadline: float = math.inf,
        end_ids: Collection[int] = (),
        hidden: Collection[int] = (),
        pieces: Callable[[EngineRequest, Sequence[int]], list[bytes]] = lambda request, ids: [b""] * len(ids),
        grammar: Grammar | None = None,
        past: Past | None = None,
        fields: Mapping[bytes, bytes] = MappingProxyType({}),
        log: Iterable[tuple[Name, bytes]] = (),
    ) -> None:
        self.job = job
        self.attempt = name.a
        self.home = home
        self.fanout = fanout
        self.deadline = deadline
        #: What the emitter has not taken yet: frames that must stand in one entry of the log, together.
        self.outbox: deque[tuple[Frame, ...]] = deque()
        #: Set last and once: the frame that ends the request.
        self.terminal: End | Error | None = None
        self.outcome: Outcome = "finished"
        #: Somebody else ended the request or took it over, or its end is written: nothing counts any more.
        self.dropped = False
        #: It is to go on in another worker: once its frames are written, it is given back.
        self.handing_over = False
        #: The emitter's: last frame known to be in the log, an entry under way, the connection that wrote it.
        self.written = name
        self.inflight: tuple[Name, bytes] | None = None
        self.epoch = -1
        #: The store has lost the request: it gets it back without waiting for the next frame.
        self.lost = False
        #: What the store would need if it lost this request: its hash, and every entry of its log.
        self.fields = fields
        self.log = [*log]

        self._prompts = prompts
        self._began = time.monotonic()
        self._first_token: float | None = None
        self._cached: dict[int, int] = {}
        self._told_start = False
        stops = StopStrings(job.stop)
        self._choices = [
            ChoiceState(
                stops=stops,
                max_new=self._prompt_of(index).room,
                end_ids=end_ids,
                stop_token_ids=job.params.stop_token_ids,
                reasoning=job.reasoning,
            )
            for index in range(job.choices)
        ]
        self._sums = [0.0] * job.choices  # raw logprobs of the sampled tokens, for best_of
        #: Ids of choices that were reasoning, as far as frames have told.
        self._reasoned = [0] * job.choices
        self._deltas: dict[int, Delta] = {}
        #: Cached tokens of choices' prompts that no frame has told yet.
        self._untold: dict[int, int] = {}
        self._open = set(range(job.choices))
        self._past = past or Past(job.choices, len(prompts))
        self._scores: dict[int, PromptScores] = {}
        #: Of each prompt whose logprobs are not all there: what its other choices said meanwhile.
        self._early: dict[int, list[tuple[int, Token | Finished]]] = (
            {number: [] for number in range(len(prompts)) if not self._past.is_scored(number, job.candidates)}
            if job.echo and job.logprobs is not None
            else {}
        )
        self._hidden = frozenset(hidden)
        self._grammar = grammar
        self._pieces = pieces
        self._requests = [self._request(index) for index in range(job.choices)]
        first = self._requests[0]
        self._dictionary = Dictionary(lambda ids: pieces(first, ids))
        if past is not None:
            self._go_on(past)
        #: Choices that the engine still has, whatever became of them here.
        self._in_engine = set(self._open)

    @classmethod
    def failed(cls, job: Job, name: Name, error: SluiceError, **placed: Any) -> Lane:
        """A lane for a job that cannot run: it has only its end. `placed`: as of the constructor."""
        lane = cls(job, name, [PromptIds([0], 1) for _ in job.prompts or [""]], **placed)
        lane.fail(error)
        return lane

    def _prompt_of(self, index: int) -> PromptIds:
        return self._prompts[index // self.job.candidates]

    @property
    def over(self) -> bool:
        """Nothing of this lane is left to generate."""
        return self.dropped or self.handing_over or self.terminal is not None

    @property
    def tokens(self) -> int:
        """Sampled so far, over all choices and attempts."""
        return sum(choice.ids for choice in self._choices)

    @property
    def gives_way(self) -> bool:
        """It is batch work: interactive requests that wait may have its place."""
        return self.fields.get(b"class") == b"batch"

    @property
    def closing(self) -> bool:
        """Once all is written, the request is ended or given back."""
        return self.terminal is not None or self.handing_over

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that are done."""
        return [choice.finished.reason for choice in self._choices if choice.finished is not None]

    def requests(self) -> list[EngineRequest]:
        """One engine request for each choice that is not done, in the order of the choices."""
        return [request for index, request in enumerate(self._requests) if index in self._open]

    def _request(self, index: int) -> EngineRequest:
        """The first choice of a prompt brings its prompt's logprobs for all."""
        job, prompt = self.job, self._prompt_of(index)
        number, j = divmod(index, job.candidates)
        ranked = 0 if job.best_of > job.n else None
        return EngineRequest(
            id=f"{job.id}/{index}",
            prompt=prompt.ids,
            max_new=prompt.room,
            seed=job.seed,
            params=job.params,
            choice=j,
            generated=self._past.choices[index].ids,
            logprobs=ranked if job.logprobs is None else job.logprobs,
            prompt_logprobs=job.logprobs if j == 0 and number in self._early else None,
            grammar=self._grammar,
        )

    def _go_on(self, past: Past) -> None:
        """Brings the choices to where the log ends: its ids, fed to fresh states, must give the text that clients have
        seen. Raises LogLost if they do not."""
        self._told_start = past.start is not None
        self._cached.update(past.cached)
        self._dictionary.told(past.told)
        for index, logged in enumerate(past.choices):
            choice = self._choices[index]
            pieces = self._pieces(self._requests[index], logged.ids)
            shown = (b"" if token in self._hidden else piece for token, piece in zip(logged.ids, pieces, strict=True))
            complete = self._grammar is not None and _is_complete(self._grammar, logged.ids)
            text = choice.replay(zip(logged.ids, shown, strict=True), complete).text
            if logged.finish is not None and choice.finished is None:
                text += choice.finish("length" if logged.finish.reason == "length" else "stop").text
            if text != logged.text:
                raise LogLost("What was sent of this request cannot be made again from its log.")
            self._sums[index] = sum(entry[0] for entry in logged.lp)
            self._reasoned[index] = choice.reasoned
            if logged.finish is not None:
                self._open.discard(index)
            elif choice.finished is not None:  # an older version's: it said the end in an entry of its own
                self._say(index, Released("", choice.out, choice.finished))
        if not self._open and self.terminal is None:
            self._end()

    def open_requests(self) -> Iterable[str]:
        """Ids of the engine requests that have not ended."""
        return [f"{self.job.id}/{index}" for index in self._in_engine]

    def on_event(self, index: int, event: Started | PromptLogprobs | Token | Finished | Failed) -> bool:
        """Takes in one event of choice `index`. True: the engine should stop that choice, it is done.

        The logprobs of a prompt come in pieces, with its first choice; the others need them whole before their text,
        and wait for them here."""
        if isinstance(event, Finished | Failed):
            self._in_engine.discard(index)
        if self.over:
            return False
        if index not in self._open:
            return isinstance(event, Token)
        number, j = divmod(index, self.job.candidates)
        if isinstance(event, Token | Finished) and number in self._early:
            if j > 0:
                self._early[number].append((index, event))
                return False
            self._scored(number)
        if isinstance(event, Token):
            return self._on_token(index, event)
        if isinstance(event, Started):
            self._on_started(index, event)
        elif isinstance(event, PromptLogprobs):
            self._on_prompt_logprobs(number, event)
        elif isinstance(event, Finished):
            self._say(index, self._choices[index].finish(event.reason))
        elif isinstance(event, Failed):
            self.fail(event.error)
        return False

    def _on_started(self, index: int, event: Started) -> None:
        if not self._told_start:
            self._told_start = True
            job = self.job
            tell = (job.echo or job.logprobs is not None) and not all(prompt.sent_as_text for prompt in self._prompts)
            start = Start(
                prompt_tokens=sum(len(prompt.ids) for prompt in self._prompts),
                cached_tokens=event.cached,
                echo=[prompt.text for prompt in self._prompts] if tell else None,
            )
            self.outbox.append((start,))
            self._cached[index] = event.cached
        elif index not in self._cached:
            self._cached[index] = self._untold[index] = event.cached

    def _on_prompt_logprobs(self, number: int, event: PromptLogprobs) -> None:
        scores = self._scores.get(number)
        if scores is None:
            prompt = self._prompts[number]
            request = self._requests[number * self.job.candidates]
            scores = self._scores[number] = PromptScores(
                number,
                prompt.ids,
                self._pieces(request, prompt.ids),
                added=prompt.added,
                hidden=prompt.hidden,
                text=prompt.text if prompt.sent_as_text else None,
                logged=self._past.scored[number],
            )
        self.outbox.extend((frame,) for frame in scores.frames(event.start, event.logprobs, self._dictionary))
        if event.start + len(event.logprobs) >= len(self._prompts[number].ids):
            self._scored(number)

    def _scored(self, number: int) -> None:
        """The logprobs of a prompt are all there."""
        for index, event in self._early.pop(number, ()):
            self.on_event(index, event)
            self._flush(index)

    def _on_token(self, index: int, event: Token) -> bool:
        self._first_token = self._first_token or time.monotonic()
        shown = b"" if event.token in self._hidden else event.piece
        released = self._choices[index].feed(event.token, shown, event.complete)
        self._say(index, released, event)
        return released.finish is not None

    def _say(self, index: int, released: Released, token: Token | None = None) -> None:
        """Adds to the choice's delta of this step, and closes the choice at its end."""
        choice = self._choices[index]
        if token or released.text:
            delta = self._deltas.get(index)
            if delta is None:
                delta = self._deltas[index] = Delta(index, [], c=self._untold.pop(index, 0))
            if token:
                delta.t.append(token.token)
                delta.r += choice.reasoned - self._reasoned[index]
                self._reasoned[index] = choice.reasoned
                if token.logprob is not None:
                    self._add_logprob(index, delta, token)
            delta.text += released.text
            delta.n = released.out if released.out < choice.ids else None
        if released.finish is not None:
            last = [self._named(self._deltas.pop(index))] if index in self._deltas else []
            self.outbox.append((*last, Finish(index, *released.finish)))  # together: one entry of the log
            self._open.discard(index)
            if not self._open:
                self._end()

    def _add_logprob(self, index: int, delta: Delta, token: Token) -> None:
        assert token.logprob is not None
        entry = finite(token.logprob)
        self._sums[index] += entry[0]
        delta.lp = [*(delta.lp or ()), entry]
        if self.job.logprobs is None:
            return  # best_of asked: only who takes the request over has to know
        delta.o = [*(delta.o or ()), self._choices[index].begin]

    def _named(self, delta: Delta) -> Delta:
        """A delta on its way out, with the bytes of those ids that no frame before it told: the choices' deltas leave
        in another order than they began in."""
        if delta.o is not None:
            delta.p = self._dictionary.news(delta.t, delta.lp or ())
        return delta

    def _pick(self) -> list[int] | None:
        """Which candidates best_of keeps: of each prompt the n of highest mean raw logprob, best first."""
        job = self.job
        if job.best_of <= job.n:
            return None
        kept: list[int] = []
        for first in range(0, job.choices, job.candidates):
            mean = {i: self._sums[i] / max(1, self._choices[i].ids) for i in range(first, first + job.candidates)}
            kept += sorted(mean, key=lambda i: (-mean[i], i))[: job.n]
        return kept

    def _end(self) -> None:
        now = time.monotonic()
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = self.tokens
        cached = sum(self._cached.get(index, 0) for index in range(0, self.job.choices, self.job.candidates))
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
            self._pick(),
        )

    def flush(self) -> None:
        """Ends a step: what its tokens gave becomes frames."""
        for index in list(self._deltas):
            self._flush(index)

    def _flush(self, index: int) -> None:
        delta = self._deltas.pop(index, None)
        if delta is not None:
            self.outbox.append((self._named(delta),))

    def fail(self, error: SluiceError, outcome: Outcome = "failed") -> None:
        """Ends the request with an error, behind what was already said."""
        if self.over:
            return
        self.flush()
        self._open.clear()
        self.outcome = outcome
        self.terminal = Error.of(error)

    def hand_over(self) -> None:
        """Stops here, to go on in another worker behind what was said."""
        if not self.over:
            self.flush()
            self._open.clear()
            self.handing_over = True

    def drop(self) -> None:
        """Ends the lane without a word: the request has its end, or another owner."""
        self.dropped = True
        self._open.clear()


def _is_complete(grammar: Grammar, ids: Sequence[int]) -> bool:
    """Whether the last of the ids is the last that the grammar lets come."""
    try:
        return grammar.begin(ids).complete
    except LogLost:  # there are engines that obey no mask; of the others, each notices itself
        return False
