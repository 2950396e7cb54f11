"""A llama.cpp context: one pool of KV cells for all lanes, and the batch buffers to fill and decode.

Owned by one thread. It guards the calls that would abort the process (a batch or an output too many), and knows
nothing of requests: a lane is a sequence number here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workers.engines.llamacpp.binding import Library, LoadError
from workers.engines.llamacpp.model import Model

#: Logits rows of one batch beyond one for each lane: prompt tokens that are scored. 64 rows of a 256,000 wide
#: head are 64 MB, for which llama.cpp keeps a buffer.
SCORED_ROWS = 64
#: LLAMA_MAX_SEQ of b11549.
MOST_LANES = 256


class Context:
    """KV memory of at least `cells` tokens, for sequences 0..lanes+spare-1 with one token memory (`kv_unified`):
    split memory would give each lane cells / lanes and refuse longer prompts, and could not share cells. At most
    `lanes` sequences are in a batch; the others only keep what they have. Raises LoadError."""

    def __init__(
        self, library: Library, model: Model, *, cells: int, lanes: int, batch_tokens: int, spare: int = 0
    ) -> None:
        if lanes + spare > MOST_LANES:
            raise LoadError(f"llama.cpp runs at most {MOST_LANES} sequences: set SLUICE_LANES to that or less.")
        self._lib, self._ffi, self._model = library.lib, library.ffi, model
        params = self._lib.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = max(batch_tokens, lanes)
        params.n_seq_max = lanes + spare
        params.n_outputs_max = lanes + SCORED_ROWS
        params.n_outputs_max_per_seq = 0  # as many as the batch's
        params.kv_unified = True
        self._pointer = self._lib.llama_init_from_model(model.pointer, params)
        if self._pointer == self._ffi.NULL:
            raise LoadError(
                f"llama.cpp cannot make a context of {cells} tokens: {library.last_errors()} "
                "If memory is short, lower SLUICE_CONTEXT_CELLS or SLUICE_LANES."
            )
        self._memory = self._lib.llama_get_memory(self._pointer)
        #: What one batch may hold. llama.cpp clamps it, and aborts the process over a larger batch.
        self.batch_limit: int = self._lib.llama_n_batch(self._pointer)
        self._most_outputs = min(lanes + SCORED_ROWS, self.batch_limit)
        if self.batch_limit < lanes or self._lib.llama_n_ctx(self._pointer) < cells:
            raise LoadError(f"{cells} cells are too few for {lanes} lanes: raise SLUICE_CONTEXT_CELLS.")
        self._make_batch()

    def _make_batch(self) -> None:
        """Buffers for a full batch, made once. numpy fills them, llama.cpp reads the same memory."""
        size = self.batch_limit
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._sequences = np.zeros(size, np.int32)
        self._wanted = np.zeros(size, np.int8)
        self._ones = np.ones(size, np.int32)
        first = self._ffi.from_buffer("llama_seq_id[]", self._sequences)
        self._sequence_pointers = self._ffi.new("llama_seq_id *[]", [first + row for row in range(size)])
        self._batch = self._ffi.new("llama_batch *")
        self._batch.token = self._ffi.from_buffer("llama_token[]", self._tokens)
        self._batch.pos = self._ffi.from_buffer("llama_pos[]", self._positions)
        self._batch.n_seq_id = self._ffi.from_buffer("int32_t[]", self._ones)
        self._batch.seq_id = self._sequence_pointers
        self._batch.logits = self._ffi.from_buffer("int8_t[]", self._wanted)
        self._length = 0
        self._rows = 0  # of logits, of the batch last decoded

    def clear_batch(self) -> None:
        self._length = 0

    def append(self, sequence: int, tokens: Sequence[int], position: int, wanted: int) -> None:
        """Puts `tokens` of `sequence`, from `position` on, behind what the batch holds. Logits are computed for
        the last `wanted` of them. Raises OverflowError if the batch cannot hold them."""
        start, end = self._length, self._length + len(tokens)
        if end > self.batch_limit:
            raise OverflowError(f"A batch of {end} tokens; the limit is {self.batch_limit}.")
        if len(tokens) == 1:
            self._tokens[start] = tokens[0]
            self._positions[start] = position
            self._sequences[start] = sequence
            self._wanted[start] = wanted > 0
        else:
            self._tokens[start:end] = tokens
            self._positions[start:end] = range(position, position + len(tokens))
            self._sequences[start:end] = sequence
            self._wanted[start : end - wanted] = 0
            self._wanted[end - wanted : end] = 1
        self._length = end

    @property
    def length(self) -> int:
        """Tokens in the batch."""
        return self._length

    def decode(self, threads: int) -> int:
        """Computes the batch. 0: done; 1: no cells for it, nothing has changed; -1: llama.cpp refuses the batch,
        nothing has changed; other values: it failed, and the memory's state is unknown."""
        self._rows = int(np.count_nonzero(self._wanted[: self._length]))
        if self._rows > self._most_outputs:
            raise OverflowError(f"{self._rows} rows of logits; the limit is {self._most_outputs}.")
        self._batch.n_tokens = self._length
        self._lib.llama_set_n_threads(self._pointer, threads, threads)
        return int(self._lib.llama_decode(self._pointer, self._batch[0]))

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits [rows, vocab] of the last batch, in its order. Valid until the next `decode`; not to be written."""
        width = self._model.vocab_size
        if not self._rows:
            return np.empty((0, width), np.float32)
        memory = self._ffi.buffer(self._lib.llama_get_logits(self._pointer), self._rows * width * 4)
        return np.frombuffer(memory, np.float32).reshape(self._rows, width)

    def forget(self, sequence: int, first: int = 0) -> None:
        """Takes `sequence` off its cells from position `first` on; what no other sequence shares is free then."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, first, -1)

    def share(self, source: int, target: int, count: int) -> None:
        """Puts the empty sequence `target` onto the first `count` cells of `source`; nothing is copied."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, 0, count)

    def warm_up(self, path: Path) -> None:
        """Decodes one token and forgets it: what is broken shows here and not at the first request."""
        self.clear_batch()
        self.append(0, [self._model.bos_id or 0], 0, 1)
        code = self.decode(1)
        if code != 0 or not np.isfinite(self.logits()).all():
            raise LoadError(f"{path} loads, but decoding a token fails (code {code}): is the file damaged?")
        self.forget(0)

    def close(self) -> None:
        self._lib.llama_free(self._pointer)
