"""A model's vocabulary: ids of texts, raw bytes of ids, and which ids have a meaning of their own.

It is read from tokenizer.json by the same code that the API counts with (`shared/tokenizer.py`), not by the package's
tokenizer, which caches and is not safe between threads. Any thread. Knows nothing of weights and GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.tokenizer import JsonTokenizer, pieces
from workers.engines.exllamav2.directory import ModelDirectory
from workers.engines.exllamav2.errors import LoadError
from workers.engines.lane import check_ids
from workers.generation import fim

#: Ends what is filled in (CodeLlama), and stands in none of its configuration files.
_END_OF_FILL = "\u2581<EOT>"
#: Tokenizer classes that put a BOS before a text unless they are told not to.
_BOS_BY_DEFAULT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


class Vocabulary:
    """The vocabulary of the model in `directory`.

    `vocab_size`: ids that the tokenizer knows, never more than the output layer has rows (`head`). `pieces`: raw bytes
    of each of them. `tokenizer_json`: the file as it is. Raises LoadError.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        path = directory.tokenizer_path
        try:
            self.tokenizer_json = path.read_text(encoding="utf-8")
            every = pieces(self.tokenizer_json)
            written = json.loads(self.tokenizer_json)
        except (ValueError, UnicodeDecodeError) as error:
            raise LoadError(f"{path} cannot be read: {error}.") from None
        if not every:
            raise LoadError(f"{path} holds no tokens.")
        # Longer heads are padded; ids beyond the head, which some tokenizers have, could never be computed.
        self.head = directory.vocab_size or len(every)
        self.vocab_size = min(len(every), self.head)
        self.pieces = every[: self.vocab_size]
        config = directory.tokenizer_config
        every_id = JsonTokenizer(self.tokenizer_json, None).ids()
        self.names = {name: token for name, token in every_id.items() if token < self.vocab_size}
        template = _bos_of_template(written.get("post_processor"))
        self.bos_id = self._named(config.get("bos_token"), directory.bos_id)
        if template is not None and self.bos_id is None:
            self.bos_id = self._inside(template)
        self.add_bos = self.bos_id is not None and _adds_bos(config, template, self.bos_id)
        self.eos_id = self._named(config.get("eos_token"), next(iter(directory.end_ids), None))
        self.pad_id = self._named(config.get("pad_token"), directory.pad_id)
        ends = [*directory.end_ids, self.eos_id, self.names.get(_END_OF_FILL)]
        self.end_ids = tuple(sorted({token for token in ends if self._inside(token) is not None and token is not None}))
        self.control_ids = tuple(sorted(self._control(written, config)))
        self.fim = fim.known_tokens(self.names)
        self._tokenizer = JsonTokenizer(self.tokenizer_json, self.bos_id if self.add_bos else None)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`; see `Engine.tokenize`. Raises InvalidRequest for text that is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("The text holds a lone surrogate, which is no character.", param="prompt") from None
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The pieces, joined; see `Engine.detokenize`. The space that SentencePiece puts before a text is there."""
        check_ids(tokens, self.vocab_size, "tokens")
        return b"".join(self.pieces[token] for token in tokens)

    def _inside(self, token: int | None) -> int | None:
        return token if token is not None and 0 <= token < self.vocab_size else None

    def _named(self, token: Any, otherwise: int | None) -> int | None:
        """Id of a token that tokenizer_config.json names (as a string, or as an object with `content`)."""
        name = token.get("content") if isinstance(token, dict) else token
        found = self.names.get(name) if isinstance(name, str) else None
        return found if found is not None else self._inside(otherwise)

    def _control(self, written: dict[str, Any], config: dict[str, Any]) -> Iterator[int]:
        """Ids of the tokens that either file flags as special."""
        flagged = {entry["id"] for entry in written.get("added_tokens") or () if entry.get("special")}
        decoder = config.get("added_tokens_decoder")
        for token, entry in (decoder if isinstance(decoder, dict) else {}).items():
            if isinstance(entry, dict) and entry.get("special") and token.isdigit():
                flagged.add(int(token))
        return (token for token in flagged if self._inside(token) is not None)


def _adds_bos(config: dict[str, Any], template: int | None, bos_id: int | None) -> bool:
    """Whether the model's tokenizer puts BOS before a text: what its configuration says, else what its tokenizer.json
    does, else what its class does."""
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    if template is not None:
        return template == bos_id
    return str(config.get("tokenizer_class", "")).removesuffix("Fast") in _BOS_BY_DEFAULT


def _bos_of_template(processor: Any) -> int | None:
    """The id that a post-processor puts before a single text; -1: it puts nothing; None: it is no template."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        found = [_bos_of_template(step) for step in processor.get("processors") or ()]
        return next((token for token in found if token is not None), None)
    if processor.get("type") != "TemplateProcessing":
        return None
    single: list[dict[str, Any]] = processor.get("single") or [{}]
    first = single[0].get("SpecialToken")
    if first is None:
        return -1
    ids: list[int] = (processor.get("special_tokens") or {}).get(first["id"], {}).get("ids", [])
    return ids[0] if len(ids) == 1 else -1
