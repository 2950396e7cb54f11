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
        self._decoder = _new_decoder("replace")

    @property
    def pending(self) -> bytes:
        """The bytes held back: the beginning of one character. The next text begins with it, or with the one U+FFFD
        that stands for it."""
        return self._decoder.getstate()[0]

    def feed(self, piece: bytes) -> str:
        """The text that became final with `piece`."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The end of the stream: what was held back, as U+FFFD, or ""."""
        return self._decoder.decode(b"", True)


def continues(pending: bytes, piece: bytes) -> bool:
    """Whether `piece` begins inside the character that `pending` begins (or else refutes it)."""
    try:
        (pending + piece[:1]).decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.end == len(pending) + len(piece[:1])
    return True
