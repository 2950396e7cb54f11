"""Control tokens that somebody wrote into a message stay text: no message can forge a turn.

Before a template is rendered, a mark is put into each control token that messages hold; where the marks are found in the
prompt, it is cut, and tokenised in parts (`shared/prompts.py`), so that no control token is seen there. Messages without any
pass unchanged. Pure; knows no template and no tokenizer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from shared.errors import InvalidRequest

#: Characters searched at once: a search holds up everything else in its process.
WINDOW = 32_768
#: Characters that may be the mark; texts hardly ever hold one of them, and none holds all.
_MARKS = (0xFDD0, 0xFDF0), (0xF0000, 0xFFFFE)


class Search(NamedTuple):
    """`begins`: matches, empty, where one of the texts begins. `parts`: all beginnings of them. `longest`: in characters."""

    begins: re.Pattern[str]
    parts: frozenset[str]
    longest: int


@functools.lru_cache(maxsize=32)
def search_for(texts: tuple[str, ...]) -> Search:
    """For the control tokens of a model."""
    parts = frozenset(text[:end] for text in texts for end in range(1, len(text)))
    return Search(re.compile(f"(?={_any_of(frozenset(texts))})"), parts, max(map(len, texts)))


def _any_of(texts: frozenset[str]) -> str:
    """A pattern for the beginning of any of the texts; it looks at each character once, however many there are."""
    if "" in texts:
        return ""
    ways = {first: frozenset(text[1:] for text in texts if text[0] == first) for first in {text[0] for text in texts}}
    patterns = [re.escape(first) + _any_of(rests) for first, rests in sorted(ways.items())]
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


def _places(text: str, search: Search) -> list[int]:
    """Where the text is to be cut: inside each control token, and behind one that has begun at its end."""
    places = [
        match.start() + 1
        for begin in range(0, len(text), WINDOW)
        for match in search.begins.finditer(text, begin, begin + WINDOW + search.longest - 1)
        if match.start() < begin + WINDOW
    ]
    if any(text[-length:] in search.parts for length in range(1, min(search.longest, len(text) + 1))):
        places.append(len(text))
    return sorted(set(places))


class Marked(NamedTuple):
    """`value` with the marks in its texts; `mark` "": there was nothing to mark."""

    value: Any
    mark: str

    def cut(self, prompt: str) -> tuple[str, tuple[int, ...]]:
        """The prompt without the marks, and where they were."""
        if not self.mark:
            return prompt, ()
        parts = prompt.split(self.mark)
        cuts = sorted({*accumulate(map(len, parts[:-1]))})
        text = "".join(parts)
        return text, tuple(cut for cut in cuts if 0 < cut < len(text))


def mark(value: Any, controls: tuple[str, ...], beside: Any = None) -> Marked:
    """Marks the control tokens in all texts of `value` (objects, arrays and texts, keys too). `beside`: what else the
    template gets, which must not hold the mark.

    Raises InvalidRequest for texts in which nothing is left that could be a mark."""
    if not controls:
        return Marked(value, "")
    search = search_for(controls)
    found = {text: places for text in set(_texts(value)) if (places := _places(text, search))}
    if not found:
        return Marked(value, "")
    written = set(json.dumps([value, beside], ensure_ascii=False))
    chosen = next((chr(c) for first, end in _MARKS for c in range(first, end) if chr(c) not in written), None)
    if chosen is None:
        raise InvalidRequest("messages hold all of Unicode's private characters.", param="messages")
    return Marked(_replaced(value, {text: _with_marks(text, places, chosen) for text, places in found.items()}), chosen)


def _with_marks(text: str, places: list[int], chosen: str) -> str:
    return chosen.join(text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, texts: dict[str, str]) -> Any:
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, dict):
        return {texts.get(key, key): _replaced(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, texts) for item in value]
    return value
