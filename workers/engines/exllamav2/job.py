"""A job of the package's generator that samples, scores and ends our way.

The generator keeps what it is good at: batches, pages, prefill, reuse of pages, speculation. What its jobs do with
logits is replaced (`receive_logits`), since penalties, logprobs, random numbers and ends have to be the same for every
engine; so are the two places where a job asks for memory. Faults of exllamav2 0.3.2 that this takes out of the way:

- Logits and probabilities come out after penalties and bias: ours are read before.
- Presence and frequency penalties count the prompt: our sampler counts what was generated.
- With drafting, text ends `num_draft_tokens` early; a stop string that the last token completes leaks out; text held
  at a stop token is lost: no stop condition, text or limit of the generator is used, a job ends by `Lane.finish`.
- All pages of prompt + max_tokens are taken at the start: a job takes them one by one (`extend`).
- Pages from the middle of a text are left without a predecessor (`prev_hash`), as if a text began there. Prompts that
  begin like such a page were given its keys, which are for other positions: `_chain` and `deallocate_pages`.
"""

from __future__ import annotations

from typing import Any

import structlog
import torch
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

from shared.errors import SluiceError
from workers.engines.exllamav2.faults import as_answer, is_fatal
from workers.engines.exllamav2.lane import Lane
from workers.engines.exllamav2.ngrams import Ngrams
from workers.engines.exllamav2.sizes import SCORED_ROWS

log = structlog.get_logger(__name__)

#: A limit that no job reaches: `Lane.finish` ends it.
_NEVER = 1 << 40


class Job(ExLlamaV2DynamicJob):
    """Runs `lane` from its tokens on."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(
            input_ids=torch.tensor([lane.tokens], dtype=torch.long),
            max_new_tokens=_NEVER,
            gen_settings=ExLlamaV2Sampler.Settings.greedy(),
        )
        self.lane = lane
        #: Proposes from its text, instead of the package's trie.
        self.drafts = Ngrams()
        #: The prompt's logits are wanted: its pages are computed even if others hold the same.
        self.scores = lane.unscored > 0

    @property
    def length(self) -> int:
        """Tokens it has, computed or not."""
        return len(self.sequences[0].sequence_ids)

    @property
    def computed(self) -> int:
        """Tokens that are in the cache; all but the last while it generates."""
        return int(self.sequences[0].kv_position)

    @property
    def has_begun(self) -> bool:
        """It is known how much of it was in the cache, or nothing is to be reused."""
        return self.scores or self.is_prefill_done()

    @property
    def reused(self) -> int:
        """Tokens that were in the cache before, once the prefill is done."""
        return int(self.cached_pages * self.generator.page_size + self.cached_tokens)

    # -- memory

    def pages_needed(self) -> int:
        """Pages to have before the next step: for each token of it and the one that is sampled behind."""
        return int((self.length + self.generator.num_draft_tokens) // self.generator.page_size) + 1

    def prepare_for_queue(self, generator: ExLlamaV2DynamicGenerator, serial_number: int) -> None:
        """Asks for the pages of its tokens and the next step, not of all it may generate. Its tokens are hashed once,
        however often the generator is asked to take it."""
        if self.generator is not None:
            return
        self.max_new_tokens = 1 + generator.num_draft_tokens
        super().prepare_for_queue(generator, serial_number)
        self.max_new_tokens = _NEVER
        if self.scores:
            sequence = self.sequences[0]
            sequence.new_unique_pages += len(sequence.page_hashes)
            sequence.page_hashes = []
            self.all_unique_hashes.clear()

    def extend(self) -> bool:
        """Takes one more page. False: there is none that nobody uses."""
        generator, sequence = self.generator, self.sequences[0]
        if not generator.unreferenced_pages:
            return False
        page = min(generator.unreferenced_pages.values(), key=lambda page: page.access_serial)
        generator.access_serial += 1
        page.add_ref_unique(generator.access_serial)
        sequence.allocated_pages.append(page)
        sequence.block_index_tensor = None
        return True

    @property
    def pages(self) -> int:
        return len(self.sequences[0].allocated_pages or ())

    def deallocate_pages(self) -> None:
        """Gives its pages back, those from the middle of a text never as the beginning of one.

        exllamav2 0.3.2 does that with a page that holds drafts only, of a job that ended before they were judged, and
        with one that was taken and not used if its old content has been computed elsewhere in the meantime."""
        pages, size = list(self.sequences[0].allocated_pages or ()), self.generator.page_size
        if pages and self.is_prefill_done():
            for page in pages[-(-self.computed // size) :]:
                page.kv_position = 0
        unused = [page for page in pages if page.can_revert and page.ref_count == 1]
        super().deallocate_pages()
        for page in unused:
            if page.phash != page.phash_revert:
                page.kv_position = 0

    def _chain(self) -> None:
        """Says what the page in which it goes on follows. exllamav2 0.3.2 does not where all before was in the cache."""
        pages, index = self.sequences[0].allocated_pages, self.computed // self.generator.page_size
        if 0 < index < len(pages):
            pages[index].prev_hash = pages[index - 1].phash

    # -- steps

    def prefill(self, results: list[Any]) -> None:
        """One chunk of its prefill. What fails here is this job's own fault, and only it ends."""
        if self.lane.error is not None:
            return
        try:
            if self.scores and not self.is_prefill_done():
                self._prefill_scored(results)
            else:
                super().prefill(results)
            self._chain()
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("prefill_failed")
            self.lane.error = as_answer(error)
            # The generator would give these pages back as holding what they held before (`CachePage.revert`), and some
            # layers may have been written over by then: the next prompt that begins alike would go on from garbage.
            for page in self.sequences[0].allocated_pages:
                page.can_revert = False

    def _prefill_scored(self, results: list[Any]) -> None:
        generator, first = self.generator, self.computed
        chunk, pages = generator.max_chunk_size, generator.all_pages
        # Without a look at other pages: the generator would copy what is alike, and its logits would be missing.
        generator.max_chunk_size, generator.all_pages = min(chunk, SCORED_ROWS), []
        generator.model.scorer = lambda logits: self.lane.score(first, logits)
        try:
            super().prefill(results)
        finally:
            generator.max_chunk_size, generator.all_pages = chunk, pages
            generator.model.scorer = None

    def receive_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, None, None, None, bool]:
        """Samples from raw `logits` [1, 1, head] in memory of the CPU; runs in a thread of the generator's pool.

        The last of the five says whether the job is over."""
        lane, token = self.lane, 0
        if lane.error is None and lane.finish() is None:
            try:
                token = lane.sample(logits[0, 0].numpy())
            except SluiceError as error:  # its grammar lets nothing follow
                lane.error = error
            except Exception as error:  # logits that are no numbers, or a bug of ours: on one lane, the others go on
                log.exception("sampling_failed")
                lane.error = as_answer(error)
        over = lane.error is not None or lane.finish() is not None
        return torch.tensor([[token]], dtype=torch.long), None, None, None, over
