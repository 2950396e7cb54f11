"""The llama.cpp engine: many requests in one batch, joining and leaving between steps.

It decides who runs, who waits and what a batch holds. The library is behind `Context` and `Model`, the choice of
tokens in `generation/sampling.py`. It knows nothing of text, Redis or HTTP.
"""

from __future__ import annotations

import hashlib
import logging
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.cards import ENGINE_EXTRAS, ModelCard
from shared.errors import EngineOverloaded, InternalError, SluiceError
from workers.engines import base
from workers.engines.base import Engine, EngineDied, EngineRequest, EngineStats, Event, Failed, Progress, Started
from workers.engines.cores import usable_cores
from workers.engines.lane import by_arrival, check_request
from workers.engines.llamacpp.binding import Library, LoadError
from workers.engines.llamacpp.cells import Cells, Hold
from workers.engines.llamacpp.context import MOST_LANES, SCORED_ROWS, Context
from workers.engines.llamacpp.convert import fastest_form
from workers.engines.llamacpp.lane import EXACT_ROWS, Lane
from workers.engines.llamacpp.model import Model, find_gguf, identity
from workers.engines.llamacpp.options import LlamaCppOptions
from workers.engines.llamacpp.prefixes import WORTH, FinishedSequences, Kept, common
from workers.engines.llamacpp.schedule import shares
from workers.engines.llamacpp.threads import ThreadChoice
from workers.generation.sampling import raw_logprob

log = logging.getLogger(__name__)

#: A lane that was set aside comes back when this many cells are free for it and for each running lane, beyond
#: what it needs: else it would be set aside again after a few tokens, and each return costs a prefill.
RETURN_HEADROOM = 32
#: Rows that prefill gets beside generating lanes, also if they are so many that the batch has more than EXACT_ROWS then.
LEAST_PREFILL = 16
#: Finished sequences are given up beyond this part of the cells, all but the newest. They could stay until somebody
#: needs the cells, but llama.cpp looks at every cell up to the last one in use: 2,000 idle ones make a prefill of 500
#: tokens a fifth slower with a 135M model (less with larger ones), 7,000 make a lone request decode a quarter slower.
KEPT_PART = 0.125


@dataclass(frozen=True, slots=True)
class _Part:
    """What one lane has in a batch: `count` tokens, `rows` rows of logits."""

    lane: Lane
    count: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What the memory holds of a lane's first tokens: `count` of them, the first cells of `hold`, which is `sequence`'s
    (`kept`: a finished one). `coming`: more than that is being computed by a lane in prefill; it is worth waiting."""

    count: int = 0
    sequence: int = 0
    hold: Hold = field(default_factory=Hold)
    kept: Kept | None = None
    coming: int = 0


class LlamaCppEngine(Engine):
    """Runs a GGUF model with llama.cpp on the CPU.

    Requests are admitted in the order they came, as soon as a lane and the cells of their prompt are free. When
    cells run out, the youngest lane is set aside: its cells are freed, its tokens kept, and it goes on later by
    another prefill. So the oldest always goes on, up to the whole pool.

    What a prompt has in common with a running or a finished sequence is not computed again: the new sequence shares
    those cells. One that begins like a prompt in prefill waits for it, and others may pass. Finished sequences stay
    in memory that nobody needs, and are given up before anything else has to give way.

    A step decodes up to two batches: one whose rows are the same in any company, for texts, short prompts and scoring,
    and one for what there is of longer prompts.
    """

    def __init__(self, options: LlamaCppOptions) -> None:
        self._options = options
        self._waiting: list[Lane] = []  # oldest first
        self._running: list[Lane] = []  # oldest first
        self._spare = max(0, min(options.prefix_cache, MOST_LANES - options.lanes))
        self._free_sequences = list(range(options.lanes + self._spare))
        self._finished = FinishedSequences(self._spare)
        self._cells = Cells(options.context_cells)
        self._threads = ThreadChoice(usable_cores())
        self._arrivals = 0
        self._computed = 0
        self._out_of_memory = 0

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
            spare=self._spare,
        )
        self._shares = self._model.shares_prefixes and options.prefix_cache > 0
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
            control_ids=self._model.control_ids,
            fim=self._model.fim,
            unsupported=ENGINE_EXTRAS,
            chat_template=self._model.chat_template,
            constraints=True,
        ).with_special(self._model.pieces.__getitem__)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return self._model.detokenize(tokens)

    def tokenizer_json(self) -> str | None:
        return self._model.tokenizer_json()

    def add(self, request: EngineRequest) -> None:
        taken = (*self._running, *self._waiting)
        check_request(request, taken=taken, vocab_size=self._model.vocab_size, context=self._context_length)
        self._arrivals += 1
        lane = Lane(request, self._arrivals, vocab_size=self._model.vocab_size, end_ids=self._end_ids)
        self._waiting.append(lane)

    def cancel(self, request_id: str) -> None:
        for lane in self._running:
            if lane.id == request_id:
                self._release(lane, keep=True)
                return
        self._waiting = [lane for lane in self._waiting if lane.id != request_id]

    def step(self) -> list[Event]:
        try:
            return self._step()
        except Exception:
            # Whose memory holds what is not known any more, so nobody may begin with it.
            for lane in self._running:
                lane.spoiled = True
            while self._evict():
                pass
            raise

    def _step(self) -> list[Event]:
        events: list[Event] = []
        self._admit(events)
        for exact in (True, False):
            parts = self._compute(exact, events)
            if parts:
                logits = self._context.logits()
                row = 0
                for part in parts:
                    self._advance(part, logits[row : row + part.rows], events)
                    row += part.rows
        return events

    def stats(self) -> EngineStats:
        running = list(self._running)
        used = self._cells.held_by(lane.hold for lane in running)
        total, waiting = self._cells.total, len(self._waiting)
        return EngineStats(len(running), waiting, used, total, self._computed, self._out_of_memory)

    def close(self) -> None:
        self._context.close()
        self._model.close()
        self._library.close()

    def _admit(self, events: list[Event]) -> None:
        """Gives lanes to those who wait, in the order they came. Who does not fit holds up those behind; who waits for
        another one's prefill does not, but has a lane and cells left for it."""
        lanes, cells = self._options.lanes, 0
        for lane in list(self._waiting):
            done = lane.finish()
            if done is None:
                if len(self._running) >= lanes:
                    return
                beginning = self._beginning(lane)
                if beginning.coming:
                    lanes -= 1
                    cells += lane.cells_to_start - beginning.coming
                    continue
                if not self._place(lane, beginning, cells):
                    return
            self._waiting.remove(lane)
            if not lane.started:
                lane.started = True
                events.append(Started(lane.id, min(lane.reused, len(lane.request.prompt))))
                if lane.scored is not None:
                    events.append(base.PromptLogprobs(lane.id, 0, [None]))
            if done is not None:
                events.append(done)
            else:
                insort(self._running, lane, key=by_arrival)

    def _beginning(self, lane: Lane) -> _Beginning:
        """Where the longest beginning of `lane` is in memory, or will be soon."""
        most = lane.reusable
        if not self._shares or most < WORTH:
            return _Beginning()
        count, kept = self._finished.longest(lane.tokens, most)
        found = _Beginning(count, kept.sequence, kept.hold, kept) if kept else _Beginning()
        coming = 0
        for other in self._running:
            if other.spoiled or other.sequence is None:
                continue
            alike = common(lane.tokens, other.tokens, most)
            if (seen := min(alike, other.seen)) > found.count:
                found = _Beginning(seen, other.sequence, other.hold)
            if other.owed > 1:
                coming = max(coming, alike)
        if coming >= WORTH and coming > found.count:
            return _Beginning(coming=coming)
        return found if found.count >= WORTH else _Beginning()

    def _place(self, lane: Lane, beginning: _Beginning, left: int) -> bool:
        """Gives `lane` a sequence and its first cells, if both are there and `left` cells stay free."""
        headroom = RETURN_HEADROOM * (len(self._running) + 1) if lane.started and self._running else 0
        hold = self._cells.share(beginning.hold, beginning.count)
        new = lane.cells_to_start - beginning.count
        needed = self._cells.held_by([*(other.hold for other in self._running), hold]) + new + headroom + left
        if needed > self._cells.total:
            self._cells.release(hold)
            return False
        lane.sequence = min(self._free_sequences)
        self._free_sequences.remove(lane.sequence)
        if beginning.count:
            self._context.share(beginning.sequence, lane.sequence, beginning.count)
        if beginning.kept is not None:
            self._finished.used(beginning.kept)
        while self._cells.free < new + headroom + left and self._evict():
            pass
        self._cells.grow(hold, new)
        lane.hold = hold
        lane.seen = lane.reused = beginning.count
        return True

    def _release(self, lane: Lane, *, keep: bool) -> None:
        """Takes `lane`'s sequence and cells back; its tokens stay. `keep`: what is in memory may be of use."""
        assert lane.sequence is not None
        self._running.remove(lane)
        done = Kept(lane.tokens[: lane.seen], lane.sequence, lane.hold)
        self._cells.trim(lane.hold, lane.seen)
        for dropped in self._finished.keep(done) if keep and self._shares and not lane.spoiled else [done]:
            self._drop(dropped)
        while len(self._finished) > 1 and self._idle_cells() > KEPT_PART * self._cells.total:
            self._evict()
        lane.sequence, lane.hold, lane.seen, lane.reused = None, Hold(), 0, 0

    def _idle_cells(self) -> int:
        """Cells that only finished sequences hold."""
        return self._cells.used - self._cells.held_by(lane.hold for lane in self._running)

    def _evict(self) -> bool:
        """Gives up the finished sequence that was not used for longest, if there is one."""
        kept = self._finished.evict()
        if kept is not None:
            self._drop(kept)
        return kept is not None

    def _drop(self, kept: Kept) -> None:
        self._context.forget(kept.sequence)
        self._free_sequences.append(kept.sequence)
        self._cells.release(kept.hold)

    def _set_youngest_aside(self) -> Lane:
        lane = self._running[-1]
        self._release(lane, keep=False)
        insort(self._waiting, lane, key=by_arrival)
        log.debug("Out of cells: set the youngest of %d lanes aside.", len(self._running) + 1)
        return lane

    def _fail(self, lane: Lane, error: SluiceError, events: list[Event]) -> None:
        self._release(lane, keep=False)
        events.append(Failed(lane.id, error))

    def _compute(self, exact: bool, events: list[Event]) -> list[_Part]:
        """Decodes the next batch of the lanes that are `exact`, or of the others, and returns what is in it, in its
        order; [] if there is nothing to decode."""
        while any(lane.exact == exact for lane in self._running):
            self._grow()
            parts = self._fill(exact)
            if not parts:
                break
            code = self._decode()
            if code == 0:
                return parts
            if code == 1 and self._evict():
                continue
            if code == 1 and len(self._running) > 1:
                self._set_youngest_aside()
            elif code == 1:
                self._out_of_memory += 1
                log.error(
                    "Out of memory: %s fails (times since the start: %d).", self._running[0].id, self._out_of_memory
                )
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
            while lane.sequence is not None and lane.hold.count < len(lane.tokens):
                if not self._cells.grow(lane.hold, 1) and not self._evict():
                    self._set_youngest_aside()

    def _fill(self, exact: bool) -> list[_Part]:
        """Fills the batch: a token for each generating lane, then pieces of prefill; in order of sequences, which
        keeps a lane's rows together."""
        lanes = [lane for lane in self._running if lane.exact == exact]
        generating = sum(lane.owed == 1 for lane in self._running)
        limit, chunk = self._context.batch_limit, self._options.prefill_chunk
        if exact:
            limit = min(limit, max(EXACT_ROWS, generating + LEAST_PREFILL))
        elif generating:
            limit = min(limit, chunk)
        given = shares([lane.owed for lane in lanes], batch=limit, chunk=chunk)
        parts = []
        scored_rows = SCORED_ROWS
        for lane, count in zip(lanes, given, strict=True):
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
        newest = [part.lane for part in parts if part.lane.seen == part.lane.reused]
        suspects = newest or [part.lane for part in parts if part.lane.owed > 1]
        if not suspects:
            raise EngineDied(f"llama.cpp refuses a batch of running requests: {self._library.last_errors()}")
        for lane in suspects:
            self._fail(lane, InternalError(), events)

    def _advance(self, part: _Part, logits: npt.NDArray[np.float32], events: list[Event]) -> None:
        """Takes in what the model said about one lane: logprobs of its prompt, its next token, its end."""
        lane = part.lane
        lane.seen += part.count
        self._computed += part.count
        if part.rows and lane.unscored:
            self._score(lane, logits, events)
        done = lane.finish()
        if done is None and not lane.owed:
            try:
                self._sample(lane, logits[-1], events)
            except SluiceError as error:  # its grammar lets nothing follow
                self._fail(lane, error, events)
                return
            except Exception:  # logits that are no numbers, or a bug of ours: on one lane, the others go on
                log.exception("Sampling failed.")
                self._fail(lane, InternalError(), events)
                return
            done = lane.finish()
        if done is not None:
            self._release(lane, keep=True)
            events.append(done)

    def _sample(self, lane: Lane, logits: npt.NDArray[np.float32], events: list[Event]) -> None:
        request = lane.request
        token = lane.sampler.sample(logits)
        logprob = None
        if request.logprobs is not None:
            logprob = raw_logprob(logits, token, request.logprobs, self._model.vocab_size)
        lane.sampler.accept(token)
        lane.tokens.append(token)
        piece = self._model.pieces[token]
        events.append(base.Token(lane.id, token, piece, logprob, lane.ends_at(token), lane.complete))

    def _score(self, lane: Lane, logits: npt.NDArray[np.float32], events: list[Event]) -> None:
        """Reports the logprobs of the prompt tokens that `logits`, the last rows of `lane`, tell of."""
        assert lane.scored is not None and lane.request.prompt_logprobs is not None
        first = lane.seen - len(logits) + 1  # the token that the first row is about
        report: list[base.Logprob | None] = []
        for row, token in zip(logits, lane.tokens[first : len(lane.request.prompt)], strict=False):
            report.append(raw_logprob(row, token, lane.request.prompt_logprobs, self._model.vocab_size))
        events.append(base.PromptLogprobs(lane.id, first, report))
        lane.scored += len(report)
