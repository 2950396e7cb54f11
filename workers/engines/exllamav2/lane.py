"""A lane of the ExLlamaV2 engine: a request, and what its job in the generator has said since the last step.

Pure bookkeeping, so that a job may be thrown away and begun anew; knows nothing of torch or the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared.errors import SluiceError
from shared.frames import Logprob
from workers.engines.base import EngineRequest, PromptLogprobs
from workers.engines.lane import Lane as EngineLane
from workers.generation.sampling import raw_logprob

if TYPE_CHECKING:
    from workers.engines.exllamav2.job import Job


#: A token, its logprobs, and whether the text is complete with it.
Sampled = tuple[int, Logprob | None, bool]


class Lane(EngineLane):
    """A request from `add` to its last event, with a job in the generator while it runs.

    `prepared`: the job it is to begin with, of the tokens it has, while it waits for pages. `sampled`: what the engine
    has not reported yet. `error`: what its job failed with. `cleared`: no
    failure of the whole generator may be its doing.
    """

    def __init__(self, request: EngineRequest, arrival: int, *, vocab_size: int, end_ids: frozenset[int]) -> None:
        super().__init__(request, arrival, vocab_size=vocab_size, end_ids=end_ids)
        self.job: Job | None = None
        self.prepared: Job | None = None
        self.sampled: list[Sampled] = []
        self.error: SluiceError | None = None
        self.cleared = True
        self._scores: list[PromptLogprobs] = []
        self._vocab_size = vocab_size

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Samples the next token from raw `logits` [head] and takes it in."""
        token = self.sampler.sample(logits)
        top = self.request.logprobs
        logprob = None if top is None else raw_logprob(logits, token, top, self._vocab_size)
        self.sampler.accept(token)
        self.tokens.append(token)
        self.sampled.append((token, logprob, self.complete))
        return token

    def score(self, first: int, logits: npt.NDArray[np.float32]) -> None:
        """Takes in raw `logits` [n, head] of the positions from `first` on; row p tells of token p + 1."""
        top, prompt = self.request.prompt_logprobs, self.request.prompt
        assert self.scored is not None and top is not None
        start = self.scored
        for row, token in zip(logits[start - 1 - first :], prompt[start:], strict=False):
            if self.scored == start:
                self._scores.append(PromptLogprobs(self.id, start, []))
            self._scores[-1].logprobs.append(raw_logprob(row, token, top, self._vocab_size))
            self.scored += 1

    def take_scores(self) -> Iterator[PromptLogprobs]:
        """What was scored since the last call."""
        scores, self._scores = self._scores, []
        yield from scores

    def take_sampled(self) -> Iterator[Sampled]:
        """What was sampled since the last call."""
        sampled, self.sampled = self.sampled, []
        yield from sampled
