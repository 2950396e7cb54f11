"""The account of KV cells: one cell is the memory of one token, for one sequence or for several that begin alike.

llama.cpp keeps its own account and answers 1 when it runs out. This one is asked first, so that a batch that
cannot fit is never tried. It knows no lanes, only how many cells are out and who holds them together.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Run:
    """Cells in a row, behind those of `before`. `holders`: holds that end here, and runs that go on from here."""

    __slots__ = ("before", "holders", "length")

    def __init__(self, before: _Run | None, length: int) -> None:
        self.before = before
        self.length = length
        self.holders = 1


class Hold:
    """The cells of one sequence, first to last. Made and changed by `Cells` only."""

    __slots__ = ("_last", "count")

    def __init__(self, last: _Run | None = None, count: int = 0) -> None:
        self._last = last
        self.count = count


class Cells:
    """A pool of `total` cells.

    Sequences share what they have in common from their beginning on, so the cells that are out form a tree. A cell
    is free again when the last hold on it is gone, in whatever order holds are released.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def grow(self, hold: Hold, count: int) -> bool:
        """Puts `count` cells behind those of `hold`, if as many are free, else none."""
        if count > self.free:
            return False
        if count:
            self.used += count
            hold.count += count
            if hold._last is None or hold._last.holders > 1:
                hold._last = _Run(hold._last, count)  # the hold's place in the shared run passes to the new one
            else:
                hold._last.length += count
        return True

    def share(self, hold: Hold, count: int) -> Hold:
        """A second hold on the first `count` cells of `hold`; it takes none."""
        if not 0 <= count <= hold.count:
            raise ValueError(f"{count} of {hold.count} cells cannot be shared.")
        run, end = hold._last, hold.count
        while run is not None and end - run.length >= count:
            end -= run.length
            run = run.before
        if run is None or count == 0:
            return Hold()
        if end > count:
            run = _split(run, run.length - (end - count))
        run.holders += 1
        return Hold(run, count)

    def trim(self, hold: Hold, count: int) -> None:
        """Lets go of all but the first `count` cells of `hold`."""
        kept = self.share(hold, count)
        self.release(hold)
        hold._last, hold.count = kept._last, kept.count

    def release(self, hold: Hold) -> None:
        """Lets go of all cells of `hold`; it is empty afterwards."""
        run = hold._last
        while run is not None:
            run.holders -= 1
            if run.holders:
                break
            self.used -= run.length
            run = run.before
        hold._last, hold.count = None, 0

    def held_by(self, holds: Iterable[Hold]) -> int:
        """How many cells these holds have together, shared ones counted once."""
        seen: set[int] = set()
        count = 0
        for hold in holds:
            run = hold._last
            while run is not None and id(run) not in seen:
                seen.add(id(run))
                count += run.length
                run = run.before
        return count


def _split(run: _Run, length: int) -> _Run:
    """Cuts the first `length` cells of `run` off into a run of their own, which comes before it."""
    first = _Run(run.before, length)
    run.before = first
    run.length -= length
    return first
