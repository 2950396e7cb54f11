"""The four lists of `logprobs` as a client reads them: what they must have to do with the text and with each other."""

from __future__ import annotations

import math
from typing import Any

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(pieces: list[dict[str, Any]], index: int = 0) -> dict[str, list[Any]]:
    """The lists of one choice of a stream, put together again."""
    whole: dict[str, list[Any]] = {name: [] for name in LISTS}
    for piece in pieces:
        if piece["index"] == index and piece["logprobs"] is not None:
            assert set(piece["logprobs"]) == set(LISTS)
            for name in LISTS:
                whole[name] += piece["logprobs"][name]
    return whole


def aligned(scores: dict[str, list[Any]], text: str, *, entries: int, best: int, scored_prompt: int = 0) -> None:
    """Checks the lists against `text`, which is prompt and completion, also where the prompt is not echoed.

    `entries`: how many there must be, those of `scored_prompt` prompt tokens first. `best`: the logprobs asked for."""
    assert {name: len(scores[name]) for name in LISTS} == dict.fromkeys(LISTS, entries)
    offsets = scores["text_offset"]
    assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
    if scored_prompt:
        assert offsets[0] == 0
    columns = zip(*(scores[name] for name in LISTS), strict=True)
    for place, (token, logprob, top, offset) in enumerate(columns):
        if scored_prompt and place == 0:
            assert (logprob, top) == (None, None), "nothing comes before the first token"
            continue
        assert math.isfinite(logprob) and logprob <= 0
        assert top[token] >= logprob, "its own number; of two ids with one string the higher"
        assert (1 if best == 0 else min(best, 1)) <= len(top) <= best + 1
        assert list(top.values()) == sorted(top.values(), reverse=True) or list(top.values())[-1] == logprob
        if not token.startswith("bytes:") and offset < len(text):
            rest = text[offset:]
            assert rest.startswith(token) or token.startswith(rest), (place, token, rest[:20])
