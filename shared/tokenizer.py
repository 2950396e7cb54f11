"""A model's tokenizer outside its engine: ids of texts and texts of ids, from the tokenizer.json on its card.

The worker proves this very code equal to its engine before it offers the file (`workers/tokenizer_proof.py`); the
API counts with it. Knows nothing of stores, HTTP and engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


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
        return str(self._parsing.decode(list(tokens), skip_special_tokens=False))

    def name(self, token: int) -> str | None:
        """The entry of an id in the vocabulary, as written there."""
        found: str | None = self._parsing.id_to_token(token)
        return found

    def _without_specials(self) -> Tokenizer:
        """Control tokens written in a text stay text. A tokenizer of its own: the switch is no argument of a call."""
        if self._plain is None:  # two threads may both make one: no harm, and no lock that gevent would have to know
            plain = _load(self._json)
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain


def _load(json: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ValueError(f"not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
