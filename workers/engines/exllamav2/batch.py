"""The package's generator and the jobs in it: what the engine sees of them.

Decides nothing: who starts, who is set aside and who is to blame is the engine's. Knows nothing of events.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from exllamav2.generator import ExLlamaV2DynamicGenerator

from workers.engines.exllamav2.job import Job
from workers.engines.exllamav2.lane import Lane
from workers.engines.exllamav2.loading import Loaded

#: Vocabularies from here on are sampled in several threads: below, starting them costs more than it gains.
THREADED_VOCABULARY = 16_384
SAMPLING_THREADS = 8


def sampling_threads(vocab_size: int) -> int:
    """Threads that sample, for the lanes of a step."""
    return SAMPLING_THREADS if vocab_size >= THREADED_VOCABULARY else 1


class Generator(ExLlamaV2DynamicGenerator):
    """The generator of the package, with n-gram drafts of ours: exllamav2 0.3.2 takes a whole prompt into its trie in one
    step, for which all wait, and looks back further than a short sequence goes (IndexError)."""

    def iterate_ngram_gen(self, results: list[Any]) -> torch.Tensor | None:
        """Drafts [generating jobs, num_draft_tokens] for the next step; None if nobody's text has any, so that the step is
        one token wide."""
        drafts: list[list[int] | None] = []
        for job in self.active_jobs:
            text = job.lane.tokens
            job.drafts.learn(text)
            if job.is_prefill_done():
                drafts.append(job.drafts.propose(text, self.num_draft_tokens))
        if not any(drafts):
            return None
        return torch.tensor([draft or [0] * self.num_draft_tokens for draft in drafts])


class NoText:
    """Stands for the tokenizer in the generator, which would make text of every token, and at the first one a list of
    the whole vocabulary: seconds, where it is large. Text is made by the worker, once for all engines."""

    def get_id_to_piece_list(self, include_special_tokens: bool) -> NoText:
        return self

    def __getitem__(self, token: int) -> str:
        return ""


class Batch:
    """`lanes`: jobs at once, at most. `ngram`: drafts come from the text so far."""

    def __init__(self, loaded: Loaded, *, lanes: int, vocab_size: int, ngram: bool) -> None:
        self._generator = Generator(
            model=loaded.model,
            cache=loaded.cache,
            tokenizer=NoText(),
            max_batch_size=lanes,
            max_chunk_size=loaded.chunk,
            max_q_size=loaded.width,
            draft_model=loaded.draft_model,
            draft_cache=loaded.draft_cache,
            num_draft_tokens=loaded.draft_tokens,
            use_ngram_draft=ngram,
            max_sampling_threads=sampling_threads(vocab_size),
        )
        # `set_loras([])` makes every later step raise IndexError in exllamav2 0.3.2; None is what it begins with.
        self._generator.current_loras = loaded.loras or None

    @property
    def pages(self) -> int:
        return int(self._generator.max_pages)

    @property
    def free_pages(self) -> int:
        """Pages that no job holds; what they hold of ended jobs is given up when they are taken."""
        return len(self._generator.unreferenced_pages)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self._generator.page_size)

    def start(self, lane: Lane, headroom: int) -> bool:
        """A job for `lane`, if there are pages for it and `headroom` more."""
        generator, job = self._generator, lane.prepared
        if job is None:
            job = Job(lane)
            job.prepare_for_queue(generator, generator.job_serial)
        if job.current_new_pages_required() + headroom > self.free_pages:
            # Asked again before every step, with the same tokens: to hash 32,000 of them takes milliseconds.
            lane.prepared = job
            return False
        lane.prepared = None
        generator.enqueue(job)
        generator.iterate_start_jobs([])
        assert job in generator.active_jobs, "the generator took no job that fits"
        lane.job = job
        return True

    def stop(self, lane: Lane) -> None:
        """Takes the job of `lane` out, if it has one. Its full pages stay until somebody needs the memory."""
        if lane.job is not None:
            self._generator.cancel(lane.job)
            lane.job = None

    def step(self) -> None:
        """A chunk of prefill, or a token and what was drafted right, for every job. Raises what torch raises."""
        try:
            self._generator.iterate()
        except BaseException:
            self._wait_for_samplers()
            raise

    def _wait_for_samplers(self) -> None:
        """A step that ends with an exception leaves behind the threads that sample for it: what they say later would
        be said of jobs that have begun anew."""
        pool = getattr(self._generator, "sampling_pool", None)
        if pool is not None:
            pool.shutdown()
            self._generator.sampling_pool = ThreadPoolExecutor(self._generator.max_sampling_threads)

    def reset(self) -> None:
        """Forgets all jobs and what the pages hold: after a failure, nobody knows how far they had come."""
        self._generator.active_jobs.clear()
        self._generator.pending_jobs.clear()
        self._generator.reset_page_table()
        self.give_memory_back()

    def give_memory_back(self) -> None:
        """What torch keeps for later, in pieces that nobody can use: after memory ran out."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        for pool in (getattr(self._generator, "sampling_pool", None), self._generator.filter_pool):
            if pool is not None:
                pool.shutdown()
