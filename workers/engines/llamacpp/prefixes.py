"""What the model has in memory already: which sequence begins like a new one, and finished ones kept for that.

Pure bookkeeping; it knows token ids and sequence numbers, nothing of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.llamacpp.cells import Hold

#: Tokens in common from which on a sequence is worth copying, keeping or waiting for. Below that a prefill is as
#: quick, and prompts that merely begin with the same few words would wait for each other.
WORTH = 16


@dataclass(slots=True, eq=False)
class Kept:
    """A finished sequence that is still in memory: its tokens, its number, its cells."""

    tokens: list[int]
    sequence: int
    hold: Hold


def common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """How many tokens `a` and `b` have in common from the first on, at most `most`. Both are lists."""
    low, high = 0, min(len(a), len(b), most)
    if high <= 0 or a[0] != b[0]:
        return 0
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class FinishedSequences:
    """At most `most` finished sequences, least recently used first. Who evicts one frees its sequence and cells."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, tokens: list[int], most: int) -> tuple[int, Kept | None]:
        """(tokens in common, the sequence) of the one that begins most like `tokens`."""
        best, found = 0, None
        for kept in self._kept:
            length = common(tokens, kept.tokens, most)
            if length > best:
                best, found = length, kept
        return best, found

    def used(self, kept: Kept) -> None:
        """It has been of use: now it is evicted last."""
        self._kept.remove(kept)
        self._kept.append(kept)

    def keep(self, new: Kept) -> list[Kept]:
        """Takes in a sequence that has just finished; returns those that are not kept, itself perhaps: too short
        ones, what is the beginning of another one, and the least recently used beyond `most`."""
        if self._most == 0 or len(new.tokens) < WORTH:
            return [new]
        for kept in self._kept:
            if common(kept.tokens, new.tokens, len(new.tokens)) == len(new.tokens):
                self.used(kept)
                return [new]
        dropped = [kept for kept in self._kept if new.tokens[: len(kept.tokens)] == kept.tokens]
        self._kept = [kept for kept in self._kept if kept not in dropped]
        self._kept.append(new)
        while len(self._kept) > self._most:
            dropped.append(self._kept.pop(0))
        return dropped

    def evict(self) -> Kept | None:
        """Gives up the least recently used one."""
        return self._kept.pop(0) if self._kept else None
