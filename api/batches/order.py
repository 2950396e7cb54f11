"""Puts requests that begin alike next to each other, so that workers compute what they share once. Pure."""

from __future__ import annotations

from array import array

#: Beginnings that are compared, characters: each is looked at among those that have the one before it in common.
LEVELS = (256, 512, 1024, 2048, 4096, 8192, 16_384)


class Prefixes:
    """The beginnings of texts, as 56 bytes for each."""

    def __init__(self) -> None:
        self._levels = tuple(array("q") for _ in LEVELS)

    def add(self, text: str) -> None:
        for length, level in zip(LEVELS, self._levels, strict=True):
            level.append(hash(text[:length]))

    def order(self) -> list[int]:
        """The texts' numbers: groups in the order in which their first texts came, and within them likewise. Texts that
        share nothing stay as they came."""
        ranks: list[list[int]] = []
        for level in self._levels:
            first: dict[int, int] = {}
            ranks.append([first.setdefault(beginning, number) for number, beginning in enumerate(level)])
        return sorted(range(len(self._levels[0])), key=lambda number: tuple(rank[number] for rank in ranks))
