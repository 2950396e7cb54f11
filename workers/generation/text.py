"""Detokenising: raw byte pieces of tokens into text that is final.

One token is often no whole character, so bytes are decoded as a stream, never token by token. Knows nothing of
tokens, stop strings or languages; nothing is ever trimmed.
"""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """A stream of bytes into valid UTF-8 text.

    However the bytes are cut, the joined text is that of `bytes.decode("utf-8", "replace")` over all of them: bytes
    that no longer can become a character are U+FFFD, those that still can are held back (at most three)."""

    def __init__(self) -> None:
        #: The bytes held back: the beginning of one character. The next text begins with it, or with the one U+FFFD
        #: that stands for it.
        self.pending = b""
        self._decoder = _new_decoder("replace")

    def feed(self, piece: bytes) -> str:
        """The text that became final with `piece`."""
        if not self.pending and piece.isascii():
            return piece.decode()
        text = self._decoder.decode(piece)
        self.pending = self._decoder.getstate()[0]
        if len(self.pending) == 2 and self.pending[0] == 0xED and self.pending[1] >= 0xA0:
            # Half a surrogate can become no character, but CPython's decoder waits (for `surrogatepass`).
            text += self.flush()
        return text

    def flush(self) -> str:
        """The end of the stream: what was held back, as U+FFFD, or ""."""
        self.pending = b""
        return self._decoder.decode(b"", True)


def continues(pending: bytes, piece: bytes) -> bool:
    """Whether `piece` begins inside the character that `pending` begins (or else refutes it)."""
    try:
        (pending + piece[:1]).decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.end == len(pending) + len(piece[:1])
    return True
