"""The llama.cpp engine: many requests in one batch, joining and leaving between steps.

It decides who runs, who waits and what a batch holds. The library is behind `Context` and `Model`, the choice of
tokens in `generation/sampling.py`. It knows nothing of text, Redis or HTTP.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.cards import ModelCard
from shared.errors import ContextLengthExceeded, EngineOverloaded, InternalError, InvalidRequest, SluiceError
from workers.engines import base
from workers.engines.base import Engine, EngineDied, EngineRequest, EngineStats, Event, Failed, Progress, Started
from workers.engines.llamacpp.binding import Library, LoadError
from workers.engines.llamacpp.cells import Cells
from workers.engines.llamacpp.context import SCORED_ROWS, Context
from workers.engines.llamacpp.convert import fastest_form
from workers.engines.llamacpp.lane import Lane
from workers.engines.llamacpp.model import Model, find_gguf, identity
from workers.engines.llamacpp.options import LlamaCppOptions, usable_cores
from workers.engines.llamacpp.schedule import shares
from workers.engines.llamacpp.threads import ThreadChoice
from workers.generation.sampling import raw_logprob

log = logging.getLogger(__name__)

#: A lane that was set aside comes back when this many cells are free for it and for each running lane, beyond
#: what it needs: else it would be set aside again after a few tokens, and each return costs a prefill.
RETURN_HEADROOM = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """What one lane has in a batch: `count` tokens, `rows` rows of logits."""

    lane: Lane
    count: int
    rows: int


class LlamaCppEngine(Engine):
    """Runs a GGUF model with llama.cpp on the CPU.

    Requests are admitted in the order they came, as soon as a lane and the cells of their prompt are free. When
    cells run out, the youngest lane is set aside: its cells are freed, its tokens kept, and it goes on later by
    another prefill. So the oldest always goes on, up to the whole pool.
    """

    def __init__(self, options: LlamaCppOptions) -> None:
        self._options = options
        self._waiting: deque[Lane] = deque()  # oldest first
        self._running: list[Lane] = []  # oldest first; all older than those who wait
        self._free_sequences = list(range(options.lanes))
        self._cells = Cells(options.context_cells)
        self._threads = ThreadChoice(usable_cores())
        self._arrivals = 0

    def load(self, progress: Progress) -> ModelCard:
        options = self._options
        source = find_gguf(options.model)
        progress(0.0, "opening")
        self._library = Library(options.libllama)
        path = fastest_form(
            source, identity(source), options.cache_dir, lambda part: progress(0.8 * part, "converting to Q8_0")
        )
        self._model = Model(self._library, path, lambda part: progress(0.8 + 0.15 * part, "loading"))
        self._context = Context(
            self._library,
            self._model,
            cells=options.context_cells,
            lanes=options.lanes,
            batch_tokens=options.batch_tokens,
        )
        self._context.warm_up(path)
        self._end_ids = frozenset(self._model.end_ids)
        limits = (self._model.context, options.context_length or self._model.context, options.context_cells)
        self._context_length = min(limits)
        if self._context_length < 2:
            raise LoadError(f"{source} has no room for a prompt and a token.")
        numbers = f"llamacpp|{self._library.version}|{identity(path)}|kv=f16"
        progress(1.0, "ready")
        return ModelCard(
            id=options.model_id,
            aliases=options.aliases,
            engine="llamacpp",
            context=self._context_length,
            vocab_size=self._model.vocab_size,
            lanes=options.lanes,
            fingerprint=f"fp_{hashlib.sha256(numbers.encode()).hexdigest()[:16]}",
            created=int(source.stat().st_mtime),
            add_bos=self._model.add_bos,
            bos_id=self._model.bos_id,
            end_ids=self._model.end_ids,
            eos_id=self._model.eos_id,
            pad_id=self._model.pad_id,
            chat_template=self._model.chat_template,
        )

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return self._model.detokenize(tokens)

    def tokenizer_json(self) -> str | None:
        return self._model.tokenizer_json()

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        self._arrivals += 1
        lane = Lane(request, self._arrivals, vocab_size=self._model.vocab_size, end_ids=self._end_ids)
        self._waiting.append(lane)

    def cancel(self, request_id: str) -> None:
        for lane in self._running:
            if lane.id == request_id:
                self._release(lane)
                return
        self._waiting = deque(lane for lane in self._waiting if lane.id != request_id)

    def step(self) -> list[Event]:
        events: list[Event] = []
        self._admit(events)
        parts = self._compute(events)
        if parts:
            logits = self._context.logits()
            row = 0
            for part in parts:
                self._advance(part, logits[row : row + part.rows], events)
                row += part.rows
        return events

    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), len(self._waiting), self._cells.used, self._cells.total)

    def close(self) -> None:
        self._context.close()
        self._model.close()
        self._library.close()

    def _check(self, request: EngineRequest) -> None:
        if any(lane.id == request.id for lane in (*self._running, *self._waiting)):
            raise InvalidRequest(f"A request {request.id} is running already.")
        if not request.prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if request.max_new < 0:
            raise InvalidRequest("max_tokens must not be negative.", param="max_tokens")
        self._model.check_ids(request.prompt, "prompt")
        self._model.check_ids(request.generated, "prompt")
        request.params.check(self._model.vocab_size)
        if len(request.prompt) + request.max_new > self._context_length:
            raise ContextLengthExceeded(
                f"The model's context is {self._context_length} tokens; the prompt has {len(request.prompt)} and "
                f"max_tokens is {request.max_new}.",
                param="max_tokens" if len(request.prompt) < self._context_length else "prompt",
            )

    def _admit(self, events: list[Event]) -> None:
        """Gives lanes to those who wait, in the order they came; who does not fit holds up those behind."""
        while self._waiting:
            lane = self._waiting[0]
            done = lane.finish()
            if done is None and not self._place(lane):
                return
            self._waiting.popleft()
            if not lane.started:
                lane.started = True
                events.append(Started(lane.id))
                if lane.scored is not None:
                    events.append(base.PromptLogprobs(lane.id, 0, [None]))
            if done is not None:
                events.append(done)
            else:
                self._running.append(lane)

    def _place(self, lane: Lane) -> bool:
        """Gives `lane` a sequence and its first cells, if both are there."""
        headroom = RETURN_HEADROOM * (len(self._running) + 1) if lane.started and self._running else 0
        if not self._free_sequences or self._cells.free < lane.cells_to_start + headroom:
            return False
        lane.cells = lane.cells_to_start
        self._cells.take(lane.cells)
        lane.sequence = min(self._free_sequences)
        self._free_sequences.remove(lane.sequence)
        return True

    def _release(self, lane: Lane) -> None:
        """Takes `lane`'s sequence and cells back; its tokens stay."""
        assert lane.sequence is not None
        self._context.forget(lane.sequence)
        self._free_sequences.append(lane.sequence)
        self._cells.give_back(lane.cells)
        self._running.remove(lane)
        lane.sequence, lane.cells, lane.seen = None, 0, 0

    def _set_youngest_aside(self) -> Lane:
        lane = self._running[-1]
        self._release(lane)
        self._waiting.appendleft(lane)
        log.debug("Out of cells: set the youngest of %d lanes aside.", len(self._running) + 1)
        return lane

    def _fail(self, lane: Lane, error: SluiceError, events: list[Event]) -> None:
        self._release(lane)
        events.append(Failed(lane.id, error))

    def _compute(self, events: list[Event]) -> list[_Part]:
        """Decodes the next batch and returns what is in it, in its order; [] if there is nothing to decode."""
        while self._running:
            self._grow()
            parts = self._fill()
            code = self._decode()
            if code == 0:
                return parts
            if code == 1 and len(self._running) > 1:
                self._set_youngest_aside()
            elif code == 1:
                self._fail(self._running[0], EngineOverloaded("The engine is out of memory for this request."), events)
            elif code == -1:
                self._refused(parts, events)
            else:
                raise EngineDied(f"llama_decode returned {code}: {self._library.last_errors()}")
        return []

    def _decode(self) -> int:
        if self._options.threads:
            return self._context.decode(self._options.threads)
        tokens = self._context.length
        threads = self._threads.pick(tokens)
        began = time.perf_counter()
        code = self._context.decode(threads)
        self._threads.took(tokens, time.perf_counter() - began)
        return code

    def _grow(self) -> None:
        """Sees that every lane has the cells of its tokens, the oldest first, at the cost of the youngest."""
        for lane in list(self._running):
            while lane.sequence is not None and lane.cells < len(lane.tokens):
                if self._cells.take(1):
                    lane.cells += 1
                else:
                    self._set_youngest_aside()

    def _fill(self) -> list[_Part]:
        """Fills the batch: a token for each generating lane, then pieces of prefill; in order of sequences, which
        keeps a lane's rows together."""
        given = shares(
            [lane.owed for lane in self._running],
            batch=self._context.batch_limit,
            chunk=self._options.prefill_chunk,
        )
        parts = []
        scored_rows = SCORED_ROWS
        for lane, count in zip(self._running, given, strict=True):
            count = min(count, lane.most_tokens(scored_rows))
            if count:
                parts.append(_Part(lane, count, lane.rows_wanted(count)))
                scored_rows -= parts[-1].rows if lane.unscored else 0
        parts.sort(key=lambda part: part.lane.sequence or 0)
        self._context.clear_batch()
        for part in parts:
            assert part.lane.sequence is not None
            self._context.append(part.lane.sequence, part.lane.next_tokens(part.count), part.lane.seen, part.rows)
        return parts

    def _refused(self, parts: list[_Part], events: list[Event]) -> None:
        """llama.cpp refused the batch: whoever is new in it must be why; the others went through before."""
        newest = [part.lane for part in parts if part.lane.seen == 0]
        suspects = newest or [part.lane for part in parts if part.lane.owed > 1]
        if not suspects:
            raise EngineDied(f"llama.cpp refuses a batch of running requests: {self._library.last_errors()}")
        for lane in suspects:
            self._fail(lane, InternalError(), events)

    def _advance(self, part: _Part, logits: npt.NDArray[np.float32], events: list[Event]) -> None:
        """Takes in what the model said about one lane: logprobs of its prompt, its next token, its end."""
        lane = part.lane
        lane.seen += part.count
        if part.rows and lane.unscored:
            self._score(lane, logits, events)
        done = lane.finish()
        if done is None and not lane.owed:
            try:
                self._sample(lane, logits[-1], events)
            except Exception:  # logits that are no numbers, or a bug of ours: on one lane, the others go on
                log.exception("Sampling failed.")
                self._fail(lane, InternalError(), events)
                return
            done = lane.finish()
        if done is not None:
            self._release(lane)
            events.append(done)

    def _sample(self, lane: Lane, logits: npt.NDArray[np.float32], events: list[Event]) -> None:
        request = lane.request
        token = lane.sampler.sample(logits)
        logprob = None
        if request.logprobs is not None:
            logprob = raw_logprob(logits, token, request.logprobs, self._model.vocab_size)
        lane.sampler.accept(token)
        lane.tokens.append(token)
        events.append(base.Token(lane.id, token, self._model.pieces[token], logprob, lane.ends_at(token)))

    def _score(self, lane: Lane, logits: npt.NDArray[np.float32], events: list[Event]) -> None:
        """Reports the logprobs of the prompt tokens that `logits`, the last rows of `lane`, tell of."""
        assert lane.scored is not None and lane.request.prompt_logprobs is not None
        first = lane.seen - len(logits) + 1  # the token that the first row is about
        report: list[base.Logprob | None] = []
        for row, token in zip(logits, lane.tokens[first : len(lane.request.prompt)], strict=False):
            report.append(raw_logprob(row, token, lane.request.prompt_logprobs, self._model.vocab_size))
        events.append(base.PromptLogprobs(lane.id, first, report))
        lane.scored += len(report)
