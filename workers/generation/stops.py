"""Stop strings: where a text ends, and how much of it may be sent before that is known.

Matching runs character by character over the generated text, so how the text was cut into tokens changes nothing:
the match that ends first wins, of several that end at one character the longest. Knows nothing of tokens.

Why one KMP automaton for each stop string and no Aho-Corasick trie: the trie of 64 stops of 1,000 characters is
64,000 dictionaries to build for each request (15 MB, 0.1 s of a thread that has other lanes to serve). The KMP
tables are 64,000 small integers. Only stops that have begun to match are stepped, found by their first character:
ordinary text costs one look-up a character, the worst text 64 steps. Both are linear in the text.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """The stop strings of a request, prepared once for all its choices. `texts`: without repetitions.

    Raises ValueError for an empty one, which would match everywhere."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        if "" in self.texts:
            raise ValueError("a stop string must not be empty")
        self.borders = [_borders(text) for text in self.texts]
        self.by_first: dict[str, list[int]] = {}
        for index, text in enumerate(self.texts):
            self.by_first.setdefault(text[0], []).append(index)


class StopScanner:
    """Looks for the stop strings in one text.

    `matched`: the stop string that ended the text, else None. `held`: the longest end of the text that can still
    become a stop string, which is all that is held back."""

    def __init__(self, stops: StopStrings) -> None:
        self.matched: str | None = None
        self.held = ""
        self._stops = stops
        #: Stop string -> how many of its characters the text ends with; only those that are above 0.
        self._begun: dict[int, int] = {}

    def feed(self, text: str) -> str:
        """The text that is free to go. With a match it ends where the match begins, and nothing comes after it."""
        if self.matched is not None:
            return ""
        texts, borders, by_first = self._stops.texts, self._stops.borders, self._stops.by_first
        begun = self._begun
        if not begun and by_first.keys().isdisjoint(text):
            return text
        waiting = self.held + text
        for position, char in enumerate(text, len(self.held)):
            found = ""
            after: dict[int, int] = {}
            for index, length in begun.items():
                stop, border = texts[index], borders[index]
                while length and stop[length] != char:
                    length = border[length]
                if stop[length] == char:
                    length += 1
                    if length < len(stop):
                        after[index] = length
                    elif length > len(found):
                        found = stop
            for index in by_first.get(char, ()):
                if index not in begun:
                    if len(texts[index]) > 1:
                        after[index] = 1
                    elif not found:
                        found = char
            begun = after
            if found:
                self.matched, self.held, self._begun = found, "", {}
                return waiting[: position + 1 - len(found)]
        self._begun = begun
        free = len(waiting) - max(begun.values(), default=0)
        self.held = waiting[free:]
        return waiting[:free]

    def flush(self) -> str:
        """The end of the text: what was held back, whole."""
        held, self.held, self._begun = self.held, "", {}
        return held


def _borders(text: str) -> list[int]:
    """KMP's table: at index k the length of the longest proper prefix of text[:k] that is also its suffix."""
    borders = [0, 0]
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = borders[length]
        if text[length] == char:
            length += 1
        borders.append(length)
    return borders
