"""A lane of the llama.cpp engine: what the model has seen of a request, and the cells that it holds.

Pure bookkeeping; knows nothing of llama.cpp.
"""

from __future__ import annotations

from workers.engines.base import EngineRequest
from workers.engines.lane import Lane as EngineLane
from workers.engines.llamacpp.cells import Hold

#: Most rows of a batch that llama.cpp computes row by row, so that a row's logits are the same to the last bit alone, in
#: company and in prefill. From 64 on (GGML_FA_TILE_Q), flash attention works in tiles and rounds otherwise, and 8-bit
#: activations make up to some tenths of a nat of it; it is also faster: 1.2 times for a prompt of 256 tokens of a
#: 135M model, 1.4 times for 512.
EXACT_ROWS = 63
#: Prompts up to this length (tokens) are computed in such batches, as the time that it costs is small.
EXACT_PROMPT = 128


class Lane(EngineLane):
    """A request from `add` to its last event, with or without a lane of the model at the moment.

    `seen`: how many of its tokens are in the model's memory, in sequence `sequence` (None: waiting); the first
    `reused` of those were there before. `hold`: its KV cells, `seen` at least. `spoiled`: its memory may not hold what
    `tokens` says.
    """

    def __init__(self, request: EngineRequest, arrival: int, *, vocab_size: int, end_ids: frozenset[int]) -> None:
        super().__init__(request, arrival, vocab_size=vocab_size, end_ids=end_ids)
        self.seen = 0
        self.sequence: int | None = None
        self.reused = 0
        self.spoiled = False
        self.hold = Hold()

    @property
    def owed(self) -> int:
        """Tokens that the model has not seen yet: 1 while generating."""
        return len(self.tokens) - self.seen

    @property
    def exact(self) -> bool:
        """Whether its next tokens are to have the logits that any other way of computing them gives: those of a text, new
        or replayed, of scored and of short prompts, and of what would be few rows anyway."""
        left = len(self.request.prompt) - self.seen
        return bool(self.unscored) or left <= EXACT_ROWS or len(self.request.prompt) <= EXACT_PROMPT

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

    def rows_wanted(self, count: int) -> int:
        """Of its next `count` tokens, how many at their end need logits: those that tell of an unreported prompt
        token (the logits at position p are those of token p + 1), and the last of all, for the next token."""
        end = self.seen + count
        if self.scored is not None and self.unscored:
            return min(count, max(0, end - (self.scored - 1)))
        return 1 if end == len(self.tokens) else 0

    def most_tokens(self, rows: int) -> int:
        """How many tokens it may decode next with at most `rows` rows of logits (at least 1). Tokens that are replayed
        behind a long prompt are not computed in one batch with it."""
        if not self.exact:
            return len(self.request.prompt) - self.seen
        if self.scored is None or not self.unscored:
            return self.owed
        return min(self.owed, max(0, self.scored - 1 - self.seen) + rows)

    def next_tokens(self, count: int) -> list[int]:
        return self.tokens[self.seen : self.seen + count]
