"""Logprobs on their way into frames: which bytes an id stands for, where its text begins, how long a frame may be.

Pure; knows frames and ids, nothing of engines and of HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from shared.frames import Logprob, Prompt
from workers.generation.text import Utf8Stream, continues

#: JSON has no -inf; what clients of the OpenAI API expect in its place.
FLOOR = -9999.0
#: Prompt tokens in one frame: below 64 KB with 20 alternatives each.
PROMPT_PIECE = 64

#: Raw bytes of ids.
Pieces = Callable[[Sequence[int]], list[bytes]]


def finite(entry: Logprob) -> Logprob:
    """The entry with FLOOR in place of -inf."""
    own, top = entry
    if math.isfinite(own) and (not top or math.isfinite(top[-1][1])):
        return entry
    return max(own, FLOOR), [(token, max(value, FLOOR)) for token, value in top]


class Dictionary:
    """The bytes of ids, each told once a request."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._told: set[int] = set()

    def told(self, tokens: Iterable[int]) -> None:
        """An earlier attempt told these."""
        self._told.update(tokens)

    def news(self, tokens: Iterable[int], entries: Iterable[Logprob | None]) -> dict[int, str]:
        """id -> bytes in hex, of those ids among the tokens and their alternatives that were not told yet."""
        new = set(tokens)
        for entry in entries:
            if entry is not None:
                new.update(token for token, _ in entry[1])
        new -= self._told
        self._told |= new
        ordered = sorted(new)
        return {token: piece.hex() for token, piece in zip(ordered, self._pieces(ordered), strict=True)}


def offsets(pieces: Iterable[bytes]) -> list[int]:
    """Where each piece begins in the text of all, in code points; inside a character: where that one begins."""
    stream, decoded, begins = Utf8Stream(), 0, []
    for piece in pieces:
        pending = stream.pending
        text = stream.feed(piece)
        begins.append(decoded + (1 if pending and text and not continues(pending, piece) else 0))
        decoded += len(text)
    return begins


class PromptScores:
    """Turns a prompt's logprobs into frames, in the pieces in which they come.

    `added`, `hidden`: how many tokens the server put before and behind the prompt; they have no entry. `text`: the
    prompt as sent, for the tokenizers that put a space before it. `logged`: entries that an earlier attempt has told.
    """

    def __init__(
        self,
        index: int,
        tokens: Sequence[int],
        pieces: list[bytes],
        *,
        added: int,
        hidden: int = 0,
        text: str | None,
        logged: int = 0,
    ) -> None:
        self._index = index
        self._logged = logged
        self._added = added
        end = len(tokens) - hidden
        self._tokens = list(tokens[added:end])
        pieces = pieces[added:end]
        spaced = text is not None and not text.startswith(" ") and pieces and pieces[0].startswith(b" ")
        if spaced and text is not None and (b" " + text.encode()).startswith(b"".join(pieces)):
            pieces = [pieces[0][1:], *pieces[1:]]
        self.pieces = pieces
        self._offsets = offsets(pieces)

    def frames(self, start: int, entries: Sequence[Logprob | None], dictionary: Dictionary) -> Iterator[Prompt]:
        """Frames of the entries of prompt tokens `start` on."""
        first = start - self._added
        shown = [(first + k, entry) for k, entry in enumerate(entries) if self._logged <= first + k < len(self._tokens)]
        for begin in range(0, len(shown), PROMPT_PIECE):
            part = shown[begin : begin + PROMPT_PIECE]
            low, high = part[0][0], part[-1][0] + 1
            lp = [None if place == 0 or entry is None else finite(entry) for place, entry in part]
            tokens = self._tokens[low:high]
            yield Prompt(low, tokens, lp, self._offsets[low:high], dictionary.news(tokens, lp), self._index)
