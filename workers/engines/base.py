"""The engine interface: what a model must be able to do, and nothing else.

An engine turns token ids into token ids, many requests at once. It knows nothing of Redis, HTTP, text,
UTF-8 or stop strings: text is made of its raw byte pieces in `workers/generation/`, once for all engines.

One thread owns an engine and calls `add`, `cancel`, `step` and `close`. `tokenize`, `detokenize` and `card`
may be called from any thread once `load` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shared.cards import ModelCard
from shared.errors import SluiceError
from shared.frames import Logprob as Logprob
from shared.sampling import SamplingParams
from workers.generation.constraint import Grammar

#: Called while a model loads, with the part done (0..1) and a word for what is being done.
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One choice to generate.

    `id` is the caller's and unique among the running ones. `prompt` is used exactly as given, at least one id.
    `generated` holds ids that an earlier attempt already sampled: generation goes on behind them as if it had
    never stopped (random numbers are addressed by position, so nothing else has to be carried over).
    `max_new` counts from the first sampled token, `generated` included; prompt + max_new is at most the
    model's context. Random numbers are keyed by (`seed`, `choice`) and counted by position.
    `grammar`: the text follows it, by masks; None = it is free.
    `logprobs` and `prompt_logprobs`: how many best alternatives to report for each sampled / prompt token;
    None = no logprobs. They are the raw log-softmax of the logits, before bias, masks, penalties, temperature.
    """

    id: str
    prompt: Sequence[int]
    max_new: int
    seed: int
    params: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0
    generated: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a lane; comes before its other events, as soon as it is known what is reused. `cached`: prompt
    tokens whose state is reused; at least the last token (of `generated`, if there are any) never is, and none whose
    logprobs are asked for."""

    id: str
    cached: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens from index `start` on. The first token of a prompt has None."""

    id: str
    start: int
    logprobs: list[Logprob | None]


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `piece` is its raw bytes: often no whole character; for an end token or stop token id
    (`end`) what it would print as, which is no part of the text. `complete`: the request's grammar lets nothing follow it."""

    id: str
    token: int
    piece: bytes
    logprob: Logprob | None = None
    end: bool = False
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well: an end token or a stop token id was sampled (`stop`, with
    `stop_token` set for the latter), its grammar lets nothing follow (`stop`), or `max_new` was reached (`length`)."""

    id: str
    reason: Literal["stop", "length"]
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that this engine could not run. The others go on. It comes without Started
    if the request never got a lane."""

    id: str
    error: SluiceError


Event = Started | PromptLogprobs | Token | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`running`: requests with a lane; `waiting`: added or set aside; `cells_used` of `cells`: token memory;
    `computed`: tokens of prompts and texts that the model has computed since the start. While requests run, it grows:
    an engine whose steps come back and compute nothing hangs too. `out_of_memory`: how often, since the start, the model
    found no memory to compute with: each time a request failed, or all began anew from their tokens. Who is set aside
    in time, as token memory is all taken, is none of these."""

    running: int
    waiting: int
    cells_used: int
    cells: int
    computed: int
    out_of_memory: int = 0


class EngineDied(Exception):
    """The engine is broken beyond this request (a CUDA error, a failed assertion): the process must exit."""


class Engine(ABC):
    """A model, and the requests it runs."""

    @abstractmethod
    def load(self, progress: Progress) -> ModelCard:
        """Loads the model, reporting progress. Called once, first, by the thread that will own the engine.

        Raises SluiceError or OSError with a message that says what to do."""

    @abstractmethod
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special`: with the BOS the model's tokenizer puts first, unless the text already
        begins with it. `parse_special`: special tokens written in the text become their ids."""

    @abstractmethod
    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Raw bytes of the pieces, special tokens shown. Raises InvalidRequest for an id outside the vocabulary."""

    def tokenizer_json(self) -> str | None:
        """A tokenizer.json that should tokenise exactly as this engine does, if it can make one. The worker proves
        it before anyone uses it."""
        return None

    def pieces(self, request: EngineRequest, tokens: Sequence[int]) -> list[bytes]:
        """Raw bytes of each token by itself, as `Token.piece` had them when `request` sampled it: what a resume
        replays ids with. Any thread. Raises InvalidRequest for an id outside the vocabulary."""
        return [self.detokenize((token,)) for token in tokens]

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Takes a request in; it runs as soon as a lane and memory are free. Never blocks.

        Raises InvalidRequest for what can never run (prompt + max_new over the context, an id outside the
        vocabulary, an empty prompt); the engine is then unchanged."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Forgets a request: its lane and memory are free before the next step computes, and none of its events
        follows. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[Event]:
        """One round: admits what fits, gives every running request at most one token or a chunk of its prefill.

        Returns the events in order. With nothing to compute it returns at once ([]); with requests that are only
        waiting for time to pass it blocks for 20 ms at most. Raises EngineDied."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def close(self) -> None:
        """Frees the model. No other call may follow."""
