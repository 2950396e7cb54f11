"""The scripted engine: the real pipeline without a model, for fault tests, load tests and demonstrations.

The prompt says what comes out and when (`script.py`). Knows nothing of text: pieces are bytes, whole
characters or not.

Two deliberate departures from a model: the pieces of a script obey no mask, bias, min_tokens or ignore_eos
(that is what makes a script exact; so the card says `constraints: false`), and a script with `prefer`, which obeys
them all, is always greedy.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.cards import ENGINE_EXTRAS, ModelCard
from shared.errors import ContextLengthExceeded, InternalError, InvalidRequest, SluiceError
from workers.engines.base import (
    Engine,
    EngineDied,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Finished,
    Logprob,
    Progress,
    PromptLogprobs,
    Started,
    Token,
)
from workers.engines.script import (
    DEFAULT_LOGPROB,
    END_ID,
    FIRST_PIECE,
    FIRST_SPECIAL,
    VOCAB_SIZE,
    Script,
    highest_preferred,
    other_logprob,
    read_script,
)
from workers.engines.scripted_tokenizer import tokenizer_json
from workers.generation.constraint import State

CONTEXT = 32_768
#: Longest sleep of one step, s: how soon a new request or a cancel is looked at.
LONGEST_SLEEP_S = 0.02
#: Between the token before `fatal_after` and the death, s: what was sampled can still be written, as with a model.
FATAL_GRACE_S = 0.1
#: Prompt logprobs of one step.
PREFILL_CHUNK = 2048
#: In chat, the last message of the user, or of a tool, alone is the script. A template that speaks of think tags is a thinking model's: what it
#: writes between them at the beginning is reasoning. It knows tools, and calls them in the form of Hermes.
CHAT_TEMPLATE = (
    "{#- <think> tools <tool_call> -#}"
    "{%- set last = namespace(text='') -%}"
    "{%- for message in messages if message['role'] in ('user', 'tool') -%}"
    "{%- set last.text = message['content'] -%}"
    "{%- endfor -%}"
    "{{- last.text -}}"
)

_SPECIAL = re.compile(r"<\|([0-9]{3})\|>")


def with_others(token: int, logprob: float, best: int) -> Logprob:
    """The logprob of `token` with the `best` most likely ids and itself: ids 0, 1, 2 ... stand at -10, -11, -12 ..."""
    others = [(other, other_logprob(other)) for other in range(best + 1) if other != token]
    ranked = sorted([(token, logprob), *others], key=lambda entry: -entry[1])
    top = ranked[:best]
    return logprob, top if (token, logprob) in top else [*top, (token, logprob)]


@dataclass(slots=True)
class Lane:
    """A running request. `count`: tokens sampled in all, `generated` included; `due`: when the next one comes, by
    the engine's clock; `prefilled`: prompt tokens whose logprobs are out; `constraint`: what preferred ids obey."""

    request: EngineRequest
    script: Script
    count: int
    due: float
    prefilled: int
    constraint: State | None = None

    def preferred(self) -> tuple[int, float]:
        """The next id and its raw logprob, of a script that prefers ids. Raises SluiceError if there is none."""
        prefer, params, constraint = self.script.prefer, self.request.params, self.constraint
        if constraint is None:
            return highest_preferred(prefer, params, self.count)
        best = highest_preferred(prefer, params, self.count, constraint.mask())
        while not constraint.takes(best[0]):
            constraint.refuse(best[0])
            best = highest_preferred(prefer, params, self.count, constraint.mask())
        constraint.accept(best[0])
        return best


def die() -> None:
    """The process ends as a crash would end it: nothing is flushed, nobody is told."""
    os.kill(os.getpid(), signal.SIGKILL)


class ScriptedEngine(Engine):
    """Runs scripts on `lanes` lanes.

    `clock` and `sleep` (s) are for tests; so is `die`, called at a script's `fatal_after`: if it comes back, the
    step raises EngineDied."""

    def __init__(
        self,
        lanes: int = 64,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        die: Callable[[], object] = die,
    ) -> None:
        self.card = ModelCard(
            id="scripted",
            engine="scripted",
            context=CONTEXT,
            vocab_size=VOCAB_SIZE,
            lanes=lanes,
            fingerprint="scripted-1",
            end_ids=(END_ID,),
            eos_id=END_ID,
            control_ids=tuple(range(FIRST_SPECIAL, FIRST_PIECE)),
            unsupported=ENGINE_EXTRAS,
            chat_template=CHAT_TEMPLATE,
            constraints=False,
        ).with_special(lambda token: _decode((token,)))
        self._lanes = lanes
        self._clock = clock
        self._sleep = sleep
        self._die = die
        self._running: dict[str, Lane] = {}
        self._waiting: dict[str, tuple[EngineRequest, Script, State | None]] = {}
        self._refused: deque[Failed] = deque()
        self._closed = threading.Event()
        self._steps = 0  # what it has instead of computed tokens: waiting is its work

    def load(self, progress: Progress) -> ModelCard:
        progress(1.0, "ready")
        return self.card

    # Tokens

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """One token a UTF-8 byte; there is no BOS. Raises InvalidRequest for lone surrogates."""
        try:
            if not parse_special or "<|" not in text:
                return list(text.encode())
            ids: list[int] = []
            end = 0
            for match in _SPECIAL.finditer(text):
                if FIRST_SPECIAL <= int(match[1]) < FIRST_PIECE:
                    ids += text[end : match.start()].encode()
                    ids.append(int(match[1]))
                    end = match.end()
            return ids + list(text[end:].encode())
        except UnicodeEncodeError:
            raise InvalidRequest(
                "The prompt is not valid Unicode: it holds a lone surrogate.", param="prompt"
            ) from None

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        _check_ids(tokens, "tokens")
        return _decode(tokens)

    def tokenizer_json(self) -> str | None:
        return tokenizer_json()

    def pieces(self, request: EngineRequest, tokens: Sequence[int]) -> list[bytes]:
        """As `detokenize`, one by one, with the pieces of the request's own script."""
        _check_ids(tokens, "tokens")
        try:
            own = read_script(_decode(request.prompt), request.choice).pieces
        except InvalidRequest:
            own = []
        return [own[t - FIRST_PIECE] if 0 <= t - FIRST_PIECE < len(own) else _decode((t,)) for t in tokens]

    # Requests

    def add(self, request: EngineRequest) -> None:
        if request.id in self._running or request.id in self._waiting:
            raise InvalidRequest(f"A request {request.id} is running already.")
        if not request.prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        _check_ids(request.prompt, "prompt")
        _check_ids(request.generated, "generated")
        request.params.check(VOCAB_SIZE)
        if request.max_new < 0:
            raise InvalidRequest("max_tokens must not be negative.", param="max_tokens")
        if len(request.prompt) + request.max_new > CONTEXT:
            raise ContextLengthExceeded(
                f"This model's context is {CONTEXT} tokens; the prompt has {len(request.prompt)} and "
                f"{request.max_new} more were asked for.",
                param="max_tokens",
            )
        try:
            script = read_script(_decode(request.prompt), request.choice)
        except InvalidRequest as error:
            self._refused.append(Failed(request.id, error))
            return
        grammar = request.grammar if script.prefer else None
        constraint = None if grammar is None else grammar.begin(request.generated)
        self._waiting[request.id] = (request, script, constraint)

    def cancel(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._refused = deque(failed for failed in self._refused if failed.id != request_id)

    def step(self) -> list[Event]:
        events: list[Event] = [*self._refused]
        self._refused.clear()
        self._steps += 1
        now = self._clock()
        self._admit(now, events)
        self._round(now, events)
        if not events and self._running:
            self._sleep(min(LONGEST_SLEEP_S, min(lane.due for lane in self._running.values()) - now))
            self._round(self._clock(), events)
        return events

    def stats(self) -> EngineStats:
        used = sum(len(lane.request.prompt) + lane.count for lane in self._running.values())
        return EngineStats(len(self._running), len(self._waiting), used, self._lanes * CONTEXT, self._steps)

    def close(self) -> None:
        """May come from another thread than the owner's: it ends a step that hangs."""
        self._closed.set()
        self._running.clear()
        self._waiting.clear()

    # One step

    def _admit(self, now: float, events: list[Event]) -> None:
        while self._waiting and len(self._running) < self._lanes:
            request, script, constraint = self._waiting.pop(next(iter(self._waiting)))
            count = len(request.generated)
            lane = Lane(request, script, count, now + (script.start_delay if count == 0 else 0.0), 0, constraint)
            if request.prompt_logprobs is None:
                lane.prefilled = len(request.prompt)
            if script.total is None or count < script.total:
                lane.due += script.delay
            self._running[request.id] = lane
            events.append(Started(request.id))

    def _round(self, now: float, events: list[Event]) -> None:
        """Gives every lane that is due its next token, or a chunk of its prompt's logprobs."""
        for lane in list(self._running.values()):
            if lane.prefilled < len(lane.request.prompt):
                events.append(_prefill(lane))
                continue
            last: Failed | Finished | None = _over(lane)
            if last is None and lane.due <= now:
                if lane.count == lane.script.hang_after:
                    self._closed.wait()
                    return
                last = self._sample(lane, now, events) or _over(lane)
            if last is not None:
                del self._running[lane.request.id]
                events.append(last)

    def _sample(self, lane: Lane, now: float, events: list[Event]) -> Failed | Finished | None:
        """The next token of a lane goes to `events`; returns its last event if it is done with that."""
        request, script, position = lane.request, lane.script, lane.count
        if position == script.error_after:
            return Failed(request.id, InternalError(f"The script fails after {position} tokens."))
        if position == script.fatal_after:
            self._die()
            raise EngineDied(f"the script of {request.id} ends the process after {position} tokens")
        logprob = script.logprob(position)
        if script.prefer:
            try:
                token, logprob = lane.preferred()
            except SluiceError as error:
                return Failed(request.id, error)
            piece = _decode((token,))
        elif position == script.total:
            token, piece = END_ID, b"<|257|>"
        else:
            index = position % len(script.pieces)
            token, piece = FIRST_PIECE + index, script.pieces[index]
        stops = token == END_ID or token in request.params.stop_token_ids
        entry = None if request.logprobs is None else with_others(token, logprob, request.logprobs)
        complete = lane.constraint is not None and lane.constraint.complete
        events.append(Token(request.id, token, piece, entry, stops, complete))
        lane.count = position = position + 1
        # A late token shortens the next wait, but what was slept through is not caught up with.
        lane.due = now if position == script.total else max(now, lane.due + script.delay)
        if position == script.fatal_after:
            lane.due = max(lane.due, now + FATAL_GRACE_S)
        if stops:
            return Finished(request.id, "stop", None if token == END_ID else token)
        return None


def _over(lane: Lane) -> Finished | None:
    """How the lane ends if no token may follow those it has."""
    request, script, count = lane.request, lane.script, lane.count
    if count == len(request.generated) and count > 0:  # an earlier attempt may have had the last token already
        last = request.generated[-1]
        if last == END_ID or last in request.params.stop_token_ids:
            return Finished(request.id, "stop", None if last == END_ID else last)
    if lane.constraint is not None and lane.constraint.complete:
        return Finished(request.id, "stop")
    if count >= request.max_new or (script.total is not None and count >= script.total + script.ends):
        return Finished(request.id, "length")
    return None


def _prefill(lane: Lane) -> PromptLogprobs:
    request, start = lane.request, lane.prefilled
    lane.prefilled = min(len(request.prompt), start + PREFILL_CHUNK)
    entries: list[Logprob | None] = [
        with_others(token, DEFAULT_LOGPROB, request.prompt_logprobs or 0)
        for token in request.prompt[start : lane.prefilled]
    ]
    if start == 0:
        entries[0] = None
    return PromptLogprobs(request.id, start, entries)


def _check_ids(tokens: Sequence[int], param: str) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < VOCAB_SIZE):
        wrong = next(token for token in tokens if not 0 <= token < VOCAB_SIZE)
        raise InvalidRequest(f"Token id {wrong} is outside the vocabulary of {VOCAB_SIZE}.", param=param)


def _decode(tokens: Sequence[int]) -> bytes:
    try:
        return bytes(tokens)
    except ValueError:  # an id over 255
        return b"".join(
            bytes((t,)) if t < FIRST_SPECIAL else b"<|%d|>" % t if t < FIRST_PIECE else b"<%d>" % t for t in tokens
        )
