"""The ExLlamaV2 engine: who runs, who waits, who has to give memory back, and who is to blame for a failure.

The generator is behind `Batch`, loading behind `loading.py`; both are imported at load, since they need torch. It
knows nothing of text, Redis or HTTP.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Sequence

import structlog

from shared.cards import ENGINE_EXTRAS, ModelCard
from shared.errors import EngineOverloaded
from workers.engines.base import (
    Engine,
    EngineDied,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Progress,
    PromptLogprobs,
    Started,
    Token,
)
from workers.engines.exllamav2.directory import ModelDirectory, adapter_identity
from workers.engines.exllamav2.extension import VERSION, load_package
from workers.engines.exllamav2.lane import Lane
from workers.engines.exllamav2.options import ExLlamaV2Options
from workers.engines.exllamav2.vocabulary import Vocabulary
from workers.engines.lane import by_arrival, check_request

log = structlog.get_logger(__name__)


class ExLlamaV2Engine(Engine):
    """Runs a model folder with the package's dynamic generator.

    Requests are admitted in the order they came, as soon as a lane and the pages of their tokens are free. Pages for
    what is generated are taken one by one. When there are none left, the youngest lane is set aside: its pages are
    freed, its tokens kept, and it goes on later by another prefill (most of it reused, if nobody took the pages). So
    the oldest always goes on, up to the whole pool.

    An exception out of the generator leaves the state of all jobs unknown: all are begun anew from their tokens. From
    then on only one of them runs at a time that has not proven harmless by a token; who is alone under suspicion when
    it happens again, fails.
    """

    def __init__(self, options: ExLlamaV2Options) -> None:
        self._options = options
        self._waiting: list[Lane] = []  # oldest first
        self._running: list[Lane] = []  # oldest first
        self._arrivals = 0
        self._computed = 0
        self._out_of_memory = 0

    def load(self, progress: Progress) -> ModelCard:
        options = self._options
        directory = ModelDirectory(options.model)
        progress(0.0, "reading the folder")
        self._vocabulary = Vocabulary(directory)
        load_package(options.cache_dir, options.build_limit_s, progress)
        from workers.engines.exllamav2 import faults, loading
        from workers.engines.exllamav2.batch import Batch
        from workers.engines.exllamav2.model import Model

        self._faults = faults
        self._unload = loading.unload
        self._loaded = loaded = loading.load(options, directory, progress, Model)
        self._batch = Batch(
            loaded, lanes=options.lanes, vocab_size=self._vocabulary.vocab_size, ngram=options.ngram_draft
        )
        self._end_ids = frozenset(self._vocabulary.end_ids)
        numbers = (
            *("exllamav2", VERSION, directory.identity(), options.cache_mode, loaded.attention),
            *(options.rope_scale, options.rope_alpha),
            *((adapter_identity(lora.path), lora.scale) for lora in options.loras),
        )
        progress(1.0, "ready")
        vocabulary = self._vocabulary
        return ModelCard(
            id=options.model_id,
            engine="exllamav2",
            context=loaded.context,
            vocab_size=vocabulary.vocab_size,
            lanes=options.lanes,
            fingerprint=f"fp_{hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]}",
            created=int((directory.path / "config.json").stat().st_mtime),
            add_bos=vocabulary.add_bos,
            bos_id=vocabulary.bos_id,
            end_ids=vocabulary.end_ids,
            eos_id=vocabulary.eos_id,
            pad_id=vocabulary.pad_id,
            control_ids=vocabulary.control_ids,
            fim=vocabulary.fim,
            unsupported=ENGINE_EXTRAS,
            chat_template=directory.chat_template,
            constraints=True,
            loras=loaded.lora_names,
        ).with_special(vocabulary.pieces.__getitem__)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return self._vocabulary.detokenize(tokens)

    def tokenizer_json(self) -> str | None:
        return self._vocabulary.tokenizer_json

    def add(self, request: EngineRequest) -> None:
        taken = (*self._running, *self._waiting)
        vocab_size = self._vocabulary.vocab_size
        check_request(request, taken=taken, vocab_size=vocab_size, context=self._loaded.context)
        self._arrivals += 1
        self._waiting.append(Lane(request, self._arrivals, vocab_size=vocab_size, end_ids=self._end_ids))

    def cancel(self, request_id: str) -> None:
        for lane in self._running:
            if lane.id == request_id:
                self._release(lane)
                return
        self._waiting = [lane for lane in self._waiting if lane.id != request_id]

    def step(self) -> list[Event]:
        try:
            return self._step()
        except Exception as error:
            # Not in the generator's step alone: what CUDA did wrong before is told by whatever asks it next, such as
            # the defragmentation behind the last job's end.
            if self._faults.is_fatal(error):
                raise EngineDied(f"{type(error).__name__}: {error}") from error
            raise

    def stats(self) -> EngineStats:
        pages, size = self._batch.pages, self._batch.page_size
        used = (pages - self._batch.free_pages) * size
        running, waiting = len(self._running), len(self._waiting)
        return EngineStats(running, waiting, used, pages * size, self._computed, self._out_of_memory)

    def close(self) -> None:
        for lane in list(self._running):
            self._release(lane)
        self._batch.close()
        self._unload(self._loaded)

    # -- who runs

    def _step(self) -> list[Event]:
        events: list[Event] = []
        self._admit(events)
        if not self._running:
            return events
        self._grow()
        before = self._computed_now()
        try:
            self._batch.step()
        except Exception as error:
            if self._faults.is_fatal(error):
                raise
            self._collect(events)
            self._begin_anew(error, events)
            return events
        self._computed += self._computed_now() - before
        self._collect(events)
        return events

    def _admit(self, events: list[Event]) -> None:
        """Gives lanes to those who wait, in the order they came. While others generate, prompts of at most a chunk are
        begun in one step: each runs its whole chunk in it, and the others wait for that."""
        prefill = [lane.job for lane in self._running if lane.job is not None and not lane.job.is_prefill_done()]
        generating = len(self._running) > len(prefill)
        chunk = self._loaded.chunk
        room = chunk - sum(min(chunk, job.length - job.computed) for job in prefill)
        for lane in list(self._waiting):
            if (done := lane.finish()) is not None:
                self._waiting.remove(lane)
                self._report_start(lane, 0, events)
                events.append(done)
                continue
            if len(self._running) >= self._options.lanes or (generating and min(chunk, len(lane.tokens)) > room):
                return
            if lane.cleared and not lane.started and self._suspects():
                continue  # beside a suspect, nobody could tell who of the two it was
            if not lane.cleared and not all(other.cleared for other in self._running):
                continue
            # Who was set aside would be again after a few tokens, and each return costs a prefill.
            headroom = len(self._running) if lane.started else 0
            try:
                if not self._batch.start(lane, headroom):
                    return
            except Exception as error:
                if self._faults.is_fatal(error):
                    raise
                self._begin_anew(error, events, guilty=lane)
                return
            self._waiting.remove(lane)
            insort(self._running, lane, key=by_arrival)
            assert lane.job is not None
            room -= min(chunk, lane.job.length - lane.job.computed)

    def _suspects(self) -> bool:
        """The generator has failed, and who did it is not known yet."""
        return not all(lane.cleared for lane in (*self._running, *self._waiting))

    def _grow(self) -> None:
        """Sees that every lane has the pages of its next step, the oldest first, at the cost of the youngest."""
        for lane in list(self._running):
            while lane.job is not None and lane.job.pages < lane.job.pages_needed():
                if not lane.job.extend():
                    self._set_youngest_aside()

    def _set_youngest_aside(self) -> None:
        lane = self._running[-1]
        self._release(lane)
        insort(self._waiting, lane, key=by_arrival)
        log.debug("set_aside", lanes=len(self._running))

    def _release(self, lane: Lane) -> None:
        self._batch.stop(lane)
        self._running.remove(lane)

    def _computed_now(self) -> int:
        return sum(lane.job.computed - lane.job.reused for lane in self._running if lane.job is not None)

    # -- what they say

    def _collect(self, events: list[Event]) -> None:
        """Turns what the jobs did in this step into events, and lets go of those that are over."""
        for lane in list(self._running):
            job = lane.job
            assert job is not None
            if not lane.started and lane.error is None and job.has_begun:
                self._report_start(lane, min(job.reused, len(lane.request.prompt)), events)
            events += lane.take_scores()
            for token, logprob, complete in lane.take_sampled():
                lane.cleared = True
                piece = self._vocabulary.pieces[token]
                events.append(Token(lane.id, token, piece, logprob, lane.ends_at(token), complete))
            if isinstance(lane.error, EngineOverloaded):
                self._ran_out_of_memory(lane.id)
            last = Failed(lane.id, lane.error) if lane.error is not None else lane.finish()
            if last is not None:
                self._release(lane)
                events.append(last)

    def _report_start(self, lane: Lane, reused: int, events: list[Event]) -> None:
        if not lane.started:
            lane.started = True
            events.append(Started(lane.id, reused))
            if lane.scored is not None:
                events.append(PromptLogprobs(lane.id, 0, [None]))

    # -- failures

    def _begin_anew(self, error: Exception, events: list[Event], guilty: Lane | None = None) -> None:
        """After an exception out of the generator: whoever is surely to blame fails, the others begin anew. `guilty`: who
        waits, and could not be begun."""
        log.error("generator_failed", error=repr(error), lanes=len(self._running), exc_info=error)
        if self._faults.is_out_of_memory(error):
            self._ran_out_of_memory(*(lane.id for lane in self._running))
        if guilty is None:
            suspects = [lane for lane in self._running if not lane.cleared] or self._running
            guilty = suspects[0] if len(suspects) == 1 else None
            for lane in self._running:
                lane.cleared = guilty is not None
        else:
            self._waiting.remove(guilty)
        if guilty is not None:
            events.append(Failed(guilty.id, self._faults.as_answer(error)))
        for lane in self._running:
            lane.job = None
            if lane is not guilty:
                insort(self._waiting, lane, key=by_arrival)
        self._running.clear()
        self._batch.reset()

    def _ran_out_of_memory(self, *request_ids: str) -> None:
        self._out_of_memory += 1
        self._batch.give_memory_back()
        log.error("out_of_memory", requests=request_ids, times=self._out_of_memory)
