"""One request inside an engine: its tokens, how it ends, and what of its prompt is still to be scored.

The part of the bookkeeping that is the same for every engine with a model. Knows nothing of the memory behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.errors import ContextLengthExceeded, InvalidRequest
from workers.engines.base import EngineRequest, Finished
from workers.generation.sampling import Sampler


class Lane:
    """A request from `add` to its last event.

    `arrival`: older requests have lower numbers. `tokens`: prompt and generated ids. `started`: its Started event is
    out. `scored`: prompt tokens whose logprobs are reported (the first has none, so that counts as done); None if none
    are asked for.
    """

    def __init__(self, request: EngineRequest, arrival: int, *, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens: list[int] = [*request.prompt, *request.generated]
        self.started = False
        self.scored = None if request.prompt_logprobs is None else 1
        self.sampler = Sampler(
            request.params,
            seed=request.seed,
            choice=request.choice,
            vocab_size=vocab_size,
            end_ids=sorted(end_ids),
            prompt=request.prompt,
            generated=request.generated,
            constraint=None if request.grammar is None else request.grammar.begin(request.generated),
        )
        self._end_ids = end_ids

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unscored(self) -> int:
        """Prompt tokens whose logprobs are still to be reported."""
        return 0 if self.scored is None else len(self.request.prompt) - self.scored

    @property
    def complete(self) -> bool:
        """Its text is what it was to be, and could not go on."""
        return self.sampler.complete

    def ends_at(self, token: int) -> bool:
        """Whether `token` ends the text. Where it is banned it cannot have been sampled; in `generated` of an
        earlier attempt neither."""
        return token in self._end_ids or token in self.request.params.stop_token_ids

    def finish(self) -> Finished | None:
        """Its last event, if it is done: by its last token, or by `max_new`, with nothing left to score."""
        if self.generated and self.ends_at(self.tokens[-1]):
            stop_token = None if self.tokens[-1] in self._end_ids else self.tokens[-1]
            return Finished(self.id, "stop", stop_token)
        if self.complete:
            return Finished(self.id, "stop")
        if self.generated >= self.request.max_new and not self.unscored:
            return Finished(self.id, "length")
        return None


def by_arrival(lane: Lane) -> int:
    """Key that sorts the oldest first."""
    return lane.arrival


def check_request(request: EngineRequest, *, taken: Iterable[Lane], vocab_size: int, context: int) -> None:
    """Raises InvalidRequest for what can never run; `taken` are the requests that the engine has."""
    if any(lane.id == request.id for lane in taken):
        raise InvalidRequest(f"A request {request.id} is running already.")
    if not request.prompt:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if request.max_new < 0:
        raise InvalidRequest("max_tokens must not be negative.", param="max_tokens")
    check_ids(request.prompt, vocab_size, "prompt")
    check_ids(request.generated, vocab_size, "prompt")
    request.params.check(vocab_size)
    if len(request.prompt) + request.max_new > context:
        raise ContextLengthExceeded(
            f"The model's context is {context} tokens; the prompt has {len(request.prompt)} and max_tokens is "
            f"{request.max_new}.",
            param="max_tokens" if len(request.prompt) < context else "prompt",
        )


def check_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"Token id {token} is outside the vocabulary of {vocab_size}.", param=param)
