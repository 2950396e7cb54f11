"""A GGUF file, opened: its weights, its vocabulary, and the facts that go onto the model's card.

Tokenising is safe from any thread: llama.cpp's vocabulary does not change after it is loaded, and each call works
on a state of its own. Knows nothing of contexts, lanes or requests.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shared.cards import Fim
from shared.errors import InvalidRequest
from workers.engines.lane import check_ids
from workers.engines.llamacpp.binding import Library, LoadError
from workers.engines.llamacpp.tokenizer_json import tokenizer_json
from workers.generation import fim

log = logging.getLogger(__name__)

#: Bytes of the file's head, and of each sample of the rest, that tell one file from another.
_HEAD, _SAMPLE, _SAMPLES = 1 << 20, 1 << 16, 16
#: Where files say which tokens fill in the middle (prefix, suffix, middle): now, and in older files.
_FIM_KEYS = (
    ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    ("prefix_token_id", "suffix_token_id", "middle_token_id"),
)


def find_gguf(path: Path) -> Path:
    """The GGUF at `path`, a file or a folder that holds one model (its first part, if it is split).

    Raises LoadError."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        firsts = [file for file in found if "-00001-of-" in file.name]
        candidates = firsts if firsts and all("-of-" in file.name for file in found) else found
        if not found and any(path.glob("*.safetensors")):
            raise LoadError(
                f"{path} holds *.safetensors and no GGUF file: models of that kind (EXL2, GPTQ, 16 bits) run with "
                "--engine exllamav2."
            )
        if len(candidates) != 1:
            names = ", ".join(file.name for file in candidates) or "none"
            raise LoadError(f"{path} should hold one model, but its .gguf files are: {names}. Name the file itself.")
        path = candidates[0]
    if not path.is_file():
        raise LoadError(f"There is no model at {path}.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} is no GGUF file. llama.cpp reads GGUF models only.")
    return path


def identity(path: Path) -> str:
    """A digest that tells this file from others without reading it whole: size, head and samples of the rest."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD))
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * (number + 1) // _SAMPLES)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


class Model:
    """The weights and the vocabulary of one GGUF file.

    `report` is called with the part loaded (0..1). Raises LoadError for a file that llama.cpp cannot read, or
    that is no model which completes text.
    """

    def __init__(self, library: Library, path: Path, report: Callable[[float], None]) -> None:
        self._library, self._ffi, self._lib = library, library.ffi, library.lib
        params = self._lib.llama_model_default_params()
        callback = library.progress_callback(report)
        params.progress_callback = callback
        self._path = path
        self.pointer = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if self.pointer == self._ffi.NULL:
            raise LoadError(f"llama.cpp cannot load {path}: {library.last_errors()}")
        if self._lib.llama_model_has_encoder(self.pointer) or not self._lib.llama_model_has_decoder(self.pointer):
            raise LoadError(f"{path} holds an encoder model; this engine completes text with decoder-only models.")
        self._vocab = self._lib.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = self._lib.llama_vocab_n_tokens(self._vocab)
        if self._lib.llama_vocab_type(self._vocab) == 0:
            raise LoadError(f"{path} holds no vocabulary, so it cannot complete text.")
        self.context: int = self._lib.llama_model_n_ctx_train(self.pointer)
        bos = self._lib.llama_vocab_bos(self._vocab)
        self.bos_id: int | None = bos if bos >= 0 else None
        self.add_bos: bool = self.bos_id is not None and self._lib.llama_vocab_get_add_bos(self._vocab)
        eos, pad = self._lib.llama_vocab_eos(self._vocab), self._lib.llama_vocab_pad(self._vocab)
        self.eos_id: int | None = eos if eos >= 0 else None
        self.pad_id: int | None = pad if pad >= 0 else None
        self.end_ids = tuple(
            token for token in range(self.vocab_size) if self._lib.llama_vocab_is_eog(self._vocab, token)
        )
        self.control_ids = tuple(
            token for token in range(self.vocab_size) if self._lib.llama_vocab_is_control(self._vocab, token)
        )
        self.fim = self._fim()
        template = self._lib.llama_model_chat_template(self.pointer, self._ffi.NULL)
        self.chat_template: str | None = None
        if template != self._ffi.NULL:
            self.chat_template = self._ffi.string(template).decode("utf-8", "replace")
        #: Its memory can be cut off and shared at any token. The state of a recurrent model is one for all tokens, and
        #: one with a sliding window may have given away the cells of a prefix.
        self.shares_prefixes = not (
            self._lib.llama_model_is_recurrent(self.pointer)
            or self._lib.llama_model_is_hybrid(self.pointer)
            or self._lib.llama_model_n_swa(self.pointer) > 0
        )
        #: Raw bytes of every token, special ones as they are written.
        self.pieces = self._pieces()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`; see `Engine.tokenize`. Raises InvalidRequest for text that is not valid Unicode."""
        try:
            raw = text.encode()
        except UnicodeEncodeError:
            # llama.cpp throws a C++ exception over such bytes, and nothing would catch it.
            raise InvalidRequest("The text holds a lone surrogate, which is no character.", param="prompt") from None
        # A token is at least one byte; vocabularies that add a space prefix may need one more.
        room = len(raw) + 8
        buffer = np.empty(room, np.int32)
        count = self._lib.llama_tokenize(
            # The length goes along: U+0000 inside the text is a character like others.
            *(self._vocab, raw, len(raw)),
            *(self._ffi.from_buffer("llama_token[]", buffer), room),
            False,  # llama.cpp would add a second BOS, or an EOS that ends the text before it began
            parse_special,
        )
        if count < 0:
            raise InvalidRequest("The text is too long to be tokenised.", param="prompt")
        ids: list[int] = buffer[:count].tolist()
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        check_ids(tokens, self.vocab_size, "tokens")
        return b"".join(self.pieces[token] for token in tokens)

    def tokenizer_json(self) -> str | None:
        """See `Engine.tokenizer_json`."""
        attributes = [self._lib.llama_vocab_get_attr(self._vocab, token) for token in range(self.vocab_size)]
        try:
            return tokenizer_json(self._path, attributes)
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for merges that do not fit
            log.warning("No tokenizer.json could be made of %s: %s", self._path.name, error)
            return None

    def _fim(self) -> Fim | None:
        """By the vocabulary's well-known names, which also tell the order of the parts; else by what the file says."""
        texts = (self._lib.llama_vocab_get_text(self._vocab, token) for token in range(self.vocab_size))
        names = {self._ffi.string(text).decode("utf-8", "replace"): token for token, text in enumerate(texts)}
        if (known := fim.known_tokens(names)) is not None:
            return known
        for keys in _FIM_KEYS:
            prefix, suffix, middle = (self._metadata_id(f"tokenizer.ggml.{key}") for key in keys)
            if prefix is not None and suffix is not None:
                return Fim(prefix, suffix, middle, "psm" if middle is not None else "spm")
        return None

    def _metadata_id(self, key: str) -> int | None:
        """A token id among the file's metadata."""
        room = 16
        buffer = self._ffi.new("char[]", room)
        if self._lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, room) < 0:
            return None
        value = self._ffi.string(buffer).decode("ascii", "replace")
        return int(value) if re.fullmatch("[0-9]+", value) and int(value) < self.vocab_size else None

    def close(self) -> None:
        self._lib.llama_model_free(self.pointer)

    def _pieces(self) -> list[bytes]:
        room = 64
        buffer = self._ffi.new("char[]", room)
        pieces = []
        for token in range(self.vocab_size):
            length = self._lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, True)
            if length < 0:  # too small by as much
                room = -length
                buffer = self._ffi.new("char[]", room)
                length = self._lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, True)
            pieces.append(self._ffi.buffer(buffer, length)[:])
        return pieces
