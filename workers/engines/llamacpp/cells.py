"""The account of KV cells: one cell is the memory of one token of one request.

llama.cpp keeps its own account and answers 1 when it runs out. This one is asked first, so that a batch that
cannot fit is never tried. It knows no lanes, only how many cells are out.
"""

from __future__ import annotations


class Cells:
    """A pool of `total` cells."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self, count: int) -> bool:
        """Takes `count` cells if there are as many, else none."""
        if count > self.free:
            return False
        self.used += count
        return True

    def give_back(self, count: int) -> None:
        self.used -= count
        if self.used < 0:
            raise AssertionError("More cells were given back than were taken.")
