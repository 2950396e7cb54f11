"""One request inside the engine: what it has, what the model has seen of it, and how it ends.

Pure bookkeeping; knows nothing of llama.cpp.
"""

from __future__ import annotations

from workers.engines.base import EngineRequest, Finished
from workers.engines.llamacpp.cells import Hold
from workers.generation.sampling import Sampler


class Lane:
    """A request from `add` to its last event, with or without a lane of the model at the moment.

    `arrival`: older requests have lower numbers. `tokens`: prompt and generated ids. `seen`: how many of them are
    in the model's memory, in sequence `sequence` (None: waiting); the first `reused` of those were there before.
    `hold`: its KV cells, `seen` at least. `spoiled`: its memory may not hold what `tokens` says.
    `scored`: prompt tokens whose logprobs are reported (the first has none, so that counts as done); None if none
    are asked for.
    """

    def __init__(self, request: EngineRequest, arrival: int, *, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens: list[int] = [*request.prompt, *request.generated]
        self.seen = 0
        self.sequence: int | None = None
        self.reused = 0
        self.spoiled = False
        self.hold = Hold()
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
        )
        self._end_ids = end_ids

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def owed(self) -> int:
        """Tokens that the model has not seen yet: 1 while generating."""
        return len(self.tokens) - self.seen

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unscored(self) -> int:
        """Prompt tokens whose logprobs are still to be reported."""
        return 0 if self.scored is None else len(self.request.prompt) - self.scored

    @property
    def reusable(self) -> int:
        """How many of its first tokens need no row of logits, now that it is to begin: at least one is left to decode,
        and no prompt token whose logprobs are to be reported."""
        if self.scored is not None and self.unscored:
            return self.scored - 1
        return len(self.tokens) - 1

    @property
    def cells_to_start(self) -> int:
        """Cells for what it has and one more; never those of all it may generate."""
        return min(len(self.tokens) + 1, len(self.request.prompt) + self.request.max_new)

    def ends_at(self, token: int) -> bool:
        """Whether `token` ends the text. Where it is banned it cannot have been sampled; in `generated` of an
        earlier attempt neither."""
        return token in self._end_ids or token in self.request.params.stop_token_ids

    def finish(self) -> Finished | None:
        """Its last event, if it is done: by its last token, or by `max_new`, with nothing left to score."""
        if self.generated and self.ends_at(self.tokens[-1]):
            stop_token = None if self.tokens[-1] in self._end_ids else self.tokens[-1]
            return Finished(self.id, "stop", stop_token)
        if self.generated >= self.request.max_new and not self.unscored:
            return Finished(self.id, "length")
        return None

    def rows_wanted(self, count: int) -> int:
        """Of its next `count` tokens, how many at their end need logits: those that tell of an unreported prompt
        token (the logits at position p are those of token p + 1), and the last of all, for the next token."""
        end = self.seen + count
        if self.scored is not None and self.unscored:
            return min(count, max(0, end - (self.scored - 1)))
        return 1 if end == len(self.tokens) else 0

    def most_tokens(self, rows: int) -> int:
        """How many tokens it may decode next with at most `rows` rows of logits (at least 1)."""
        if self.scored is None or not self.unscored:
            return self.owed
        return min(self.owed, max(0, self.scored - 1 - self.seen) + rows)

    def next_tokens(self, count: int) -> list[int]:
        return self.tokens[self.seen : self.seen + count]
