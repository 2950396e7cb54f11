"""How many threads compute the next batch: as many as there are cores, unless other processes want the cores too.

llama.cpp's threads meet at a barrier some hundred times per token, spinning. If one of them has to wait for a core,
all wait for it: on 2 cores with a busy neighbour, 2 threads gave 5-30 tokens/s where 1 thread gave 40-60. So this
watches how long batches take and takes fewer threads while that is faster. Knows nothing of llama.cpp.
"""

from __future__ import annotations

#: A batch must take this much longer than with fewer threads to count against the threads...
_WORSE = 1.1
#: ...and this many times in a row to take them away.
_STRIKES = 2
#: Batches until more threads are tried again; doubles with each try that fails.
_FIRST_WAIT, _LAST_WAIT = 16, 512
#: Weight of the newest time in the running mean.
_NEWEST = 0.3


class ThreadChoice:
    """Between `most` threads and one, whatever is fastest at the moment. Times are in seconds.

    Batches are compared with those of about the same size only; a size new to it costs one batch with fewer
    threads, to know what that would take.
    """

    def __init__(self, most: int) -> None:
        #: Numbers of threads, most first: one less already leaves a core to a neighbour.
        self._levels = sorted({most, max(1, most - 1), max(1, most // 2), 1}, reverse=True)
        self._level = 0
        self._tried = 0
        self._strikes = 0
        self._wait = _FIRST_WAIT
        self._until_try = 0
        self._proven = 0  # good batches since more threads were last taken
        self._means: dict[tuple[int, int], float] = {}

    def pick(self, tokens: int) -> int:
        """Threads for a batch of `tokens`. Each call is followed by `took`."""
        size = tokens.bit_length()
        below = self._level + 1
        if below < len(self._levels) and (below, size) not in self._means:
            self._tried = below
        elif self._level > 0 and self._until_try <= 0:
            self._tried = self._level - 1
        else:
            self._tried = self._level
        return self._levels[self._tried]

    def took(self, tokens: int, seconds: float) -> None:
        """The batch took this long with the threads picked for it."""
        size, each = tokens.bit_length(), seconds / tokens
        mean = self._means.get((self._tried, size), each)
        self._means[self._tried, size] = mean + _NEWEST * (each - mean)
        if self._tried < self._level:
            self._judge_try(each, self._means.get((self._level, size), each))
        elif self._tried == self._level:
            self._until_try -= 1
            self._judge_level(each, self._means.get((self._level + 1, size)))

    def _judge_try(self, each: float, now: float) -> None:
        if each < now:
            self._level, self._strikes, self._proven = self._tried, 0, 0
        else:
            self._proven = _FIRST_WAIT
            self._wait = min(2 * self._wait, _LAST_WAIT)
            self._until_try = self._wait

    def _judge_level(self, each: float, with_fewer: float | None) -> None:
        if with_fewer is None or each < _WORSE * with_fewer:
            self._strikes = 0
            self._proven += 1
            if self._proven == _FIRST_WAIT:
                self._wait = _FIRST_WAIT
            return
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._level += 1
            self._strikes, self._proven = 0, _FIRST_WAIT
            self._until_try = self._wait
