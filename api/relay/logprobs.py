"""The `logprobs` objects of the legacy completions API and of chats, piece by piece as text becomes final.

Pure: frames in, objects out. Knows no tokenizer; the bytes of ids come with the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shared.frames import Delta, Logprob, Prompt


class Vocabulary:
    """How this request's ids are written, from the frames' `p`.

    `as_ids`: `token_id:N` for all, which loses nothing where two ids have one string."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._pieces: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def learn(self, pieces: dict[int, str]) -> None:
        for token, hexed in pieces.items():
            piece = self._pieces[token] = bytes.fromhex(hexed)
            self._names[token] = _name(piece)

    def name(self, token: int) -> str:
        """The token as text; `bytes:\\xf0\\x9f` where it is no UTF-8."""
        return f"token_id:{token}" if self._as_ids else self._names.get(token, "")

    def piece(self, token: int) -> bytes:
        return self._pieces.get(token, b"")


def _name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Entry(NamedTuple):
    """One token. `offset`: code points of prompt and completion before its text."""

    token: int
    logprob: Logprob | None
    offset: int


class ChoiceLogprobs:
    """The entries of one choice. `release` hands out those whose text is complete; each once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._entries: list[Entry] = []
        self._released = 0

    def add(self, frame: Delta, before: int) -> None:
        """The tokens of a delta; `before`: code points of the prompt."""
        self._vocabulary.learn(frame.p)
        for token, logprob, offset in zip(frame.t, frame.lp or (), frame.o or (), strict=True):
            self._entries.append(Entry(token, logprob, before + offset))

    def release(self, count: int | None, text_end: int | None = None) -> list[Entry]:
        """The entries up to the choice's token `count` (None: all so far) that were not released yet.

        With `text_end` only those that begin before it: a token without text of its own, the end token above all,
        waits for the next chunk or the finish."""
        stop = len(self._entries) if count is None else count
        if text_end is not None:
            while stop > self._released and self._entries[stop - 1].offset >= text_end:
                stop -= 1
        new = self._entries[self._released : stop]
        self._released = max(self._released, stop)
        return new


def prompt_entries(frame: Prompt) -> list[Entry]:
    return [Entry(token, logprob, offset) for token, logprob, offset in zip(frame.t, frame.lp, frame.o, strict=True)]


def as_object(entries: Sequence[Entry], vocabulary: Vocabulary) -> dict[str, Any]:
    """The four lists, one entry a token."""
    return {
        "tokens": [vocabulary.name(entry.token) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else entry.logprob[0] for entry in entries],
        "top_logprobs": [_top(entry.logprob, vocabulary) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _top(logprob: Logprob | None, vocabulary: Vocabulary) -> dict[str, float] | None:
    """Best first; of two ids with one string the higher value stays."""
    if logprob is None:
        return None
    top: dict[str, float] = {}
    for token, value in logprob[1]:
        top.setdefault(vocabulary.name(token), value)
    return top


def as_chat_object(entries: Sequence[Entry], vocabulary: Vocabulary, best: int) -> dict[str, Any]:
    """One object a token, each with its `best` likeliest ones."""
    return {"content": [_with_top(entry, vocabulary, best) for entry in entries], "refusal": None}


def _with_top(entry: Entry, vocabulary: Vocabulary, best: int) -> dict[str, Any]:
    own, ranked = entry.logprob or (0.0, [])
    top = [_told(token, value, vocabulary) for token, value in ranked[:best]]
    return {**_told(entry.token, own, vocabulary), "top_logprobs": top}


def _told(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"token": vocabulary.name(token), "logprob": logprob, "bytes": list(vocabulary.piece(token))}
