"""A model's tokenizer outside its engine: ids of texts and texts of ids, from the tokenizer.json on its card.

The worker proves this very code equal to its engine before it offers the file (`workers/tokenizer_proof.py`); the
API counts with it. Knows nothing of stores, HTTP and engines.
"""

from __future__ import annotations

import json as json_lib
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

#: How SentencePiece writes a byte that is in no piece.
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class JsonTokenizer:
    """Tokenises as the engine does. Any thread; a call gives up the GIL while it works.

    `bos_id`: id that goes before a text, None if the tokenizer adds none. Raises ValueError for a file that is no
    tokenizer.json.
    """

    def __init__(self, json: str, bos_id: int | None) -> None:
        self._json = json
        self._bos_id = bos_id
        self._parsing = _load(json)
        self._plain: Tokenizer | None = None
        self._joined = _kind(self._parsing) == "sentencepiece"
        self._pieces: list[bytes] | None = None
        self._added: dict[int, str] | None = None

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`; the arguments are those of `Engine.tokenize`."""
        return self.encode_all([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Ids of each text."""
        tokenizer = self._parsing if parse_special else self._without_specials()
        # `encode` would hold the GIL throughout and compute offsets that nobody wants (tokenizers 0.23).
        found = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        if add_special and self._bos_id is not None:
            for ids in found:
                if ids[:1] != [self._bos_id]:
                    ids.insert(0, self._bos_id)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens shown; bytes that are no UTF-8 become U+FFFD."""
        if self._joined:
            # The library would take a space from the front, which the next text may need, and would show every byte of
            # a run as U+FFFD if the run as a whole is no UTF-8.
            if self._pieces is None:
                self._pieces = pieces(self._json)
            return b"".join(self._pieces[token] for token in tokens if 0 <= token < len(self._pieces)).decode(
                errors="replace"
            )
        return str(self._parsing.decode(list(tokens), skip_special_tokens=False))

    def name(self, token: int) -> str | None:
        """The entry of an id in the vocabulary, as written there."""
        # `id_to_token` shows some added tokens as the normalizer would make them: "▁<s>" in older files of Llama 2.
        if self._added is None:
            decoder = self._parsing.get_added_tokens_decoder()
            self._added = {number: added.content for number, added in decoder.items()}
        found: str | None = self._added.get(token) or self._parsing.id_to_token(token)
        return found

    def ids(self) -> dict[str, int]:
        """The id of every entry of the vocabulary, added tokens included."""
        found: dict[str, int] = self._parsing.get_vocab(with_added_tokens=True)
        return found

    def _without_specials(self) -> Tokenizer:
        """Control tokens written in a text stay text. A tokenizer of its own: the switch is no argument of a call."""
        if self._plain is None:  # two threads may both make one: no harm, and no lock that gevent would have to know
            plain = _load(self._json)
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain


def pieces(json: str) -> list[bytes]:
    """Raw bytes of every id of a tokenizer.json, special tokens as they are written; b"" for an id that is no token.

    A text is these joined: nothing is stripped. Raises ValueError for a file that is no tokenizer.json."""
    tokenizer = _load(json)
    kind = _kind(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    names = {token: name for name, token in tokenizer.get_vocab(with_added_tokens=True).items()}
    alphabet = _byte_alphabet()
    found = []
    for token in range(max(names, default=-1) + 1):
        name = names.get(token, "")
        # Gemma's runs of spaces are added tokens too, but not special ones.
        if token in added and (added[token].special or kind != "sentencepiece"):
            found.append(added[token].content.encode())
        elif kind == "bytes":
            # A token with a character that stands for no byte is taken as it is, as the library does.
            known = [alphabet.get(character) for character in name]
            found.append(name.encode() if None in known else bytes(byte for byte in known if byte is not None))
        elif kind == "sentencepiece":
            byte = _BYTE.fullmatch(name)
            found.append(bytes((int(byte[1], 16),)) if byte else name.replace("\u2581", " ").encode())
        else:
            found.append(name.encode())
    return found


def _kind(tokenizer: Tokenizer) -> str:
    """How a tokenizer.json writes bytes: `bytes` (a character for each), `sentencepiece`, or `other`."""
    if tokenizer.decoder is None:
        return "other"
    # The decoder's part of the file; to parse all of it would take long, with the GIL held.
    steps: dict[str, Any] = json_lib.loads(tokenizer.decoder.__getstate__())
    types = {step.get("type") for step in steps.get("decoders", [steps])}
    if "ByteLevel" in types:
        return "bytes"
    return "sentencepiece" if types & {"ByteFallback", "Metaspace"} else "other"


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for (GPT-2): printable Latin-1 characters for
    themselves, those from U+0100 on for the other bytes in their order."""
    alphabet = frozenset(ByteLevel.alphabet())
    own = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {**{chr(byte): byte for byte in own}, **{chr(256 + place): byte for place, byte in enumerate(others)}}


def _load(json: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ValueError(f"not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
