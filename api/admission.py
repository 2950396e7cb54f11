"""Who may join the queue, for how long, and when to come again: the settings as submit.lua's limits, its refusals as
errors, and the deadline that a client names in its headers.

The decision itself is made in the store, in the script that would queue the request. Knows nothing of how jobs travel.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from werkzeug.datastructures import Headers

from shared.errors import InvalidRequest, QueueFull, StoreUnavailable
from shared.jobs import Placement
from shared.settings import Settings

#: What a client is asked to wait, s: at least and at most. (From 120 s on the official client does not wait at all.)
SHORTEST, LONGEST = 1.0, 60.0
#: The same, where the store is almost full: what was logged is kept for a minute then.
FULL_STORE = 10.0
#: Part of the wait that is drawn, so that not all come back at once.
JITTER = 0.25

#: The client's deadline, ms from now, and the longest that is understood.
DEADLINE = "X-Request-Deadline-Ms"
LONGEST_DEADLINE_MS = 10**15 - 1
#: The read timeout of the official client, s, which it sends along. For a stream it is about the first byte only.
READ_TIMEOUT = "X-Stainless-Read-Timeout"


def limits(settings: Settings, placement: Placement) -> str:
    """What may wait before this request, in submit.lua's words."""
    if placement.klass == "batch":
        most, longest = settings.max_waiting_batch, settings.batch_timeout_s
    else:
        most, longest = settings.max_waiting, settings.max_wait_s
    return f"{most} {math.ceil(longest * 1000)} {settings.max_tenant_requests}"


def timeout_s(settings: Settings, placement: Placement) -> float:
    """Seconds from its submission that a request has."""
    longest = settings.batch_timeout_s if placement.klass == "batch" else settings.request_timeout_s
    if placement.background:
        longest = max(longest, settings.background_timeout_s)
    return longest if placement.deadline_s is None else min(longest, placement.deadline_s)


def judge(answer: Sequence[bytes | int], drawn: Callable[[], float] = random.random) -> None:
    """Raises what submit.lua's answer means, if it is no. `drawn`: from 0 to 1."""
    verdict, *figures = answer
    if verdict == b"memory":
        error: QueueFull | StoreUnavailable = StoreUnavailable("The store is almost full: nothing new is accepted.")
        error.retry_after_s = retry_after_s(FULL_STORE, drawn())
    elif verdict == b"full":
        waiting, wait_ms = int(figures[0]), int(figures[1])
        error = QueueFull(f"The queue is full (waiting: {waiting}).")
        error.retry_after_s = retry_after_s(wait_ms / 1000, drawn())
    elif verdict == b"crowd":
        error = QueueFull(f"You have as many requests here as you may have (waiting and running: {int(figures[0])}).")
        error.retry_after_s = retry_after_s(SHORTEST, drawn())
    else:
        return
    raise error


def retry_after_s(wait_s: float, drawn: float) -> float:
    """Seconds after which to try again, where the queue will be gone in `wait_s`: within SHORTEST and LONGEST, and
    spread by `drawn` (0 to 1), so that those who are refused together come back one after the other."""
    wait = min(max(wait_s, SHORTEST), LONGEST / (1 + JITTER))
    return wait * (1 + JITTER * drawn)


def read_deadline(headers: Headers, *, waits: bool) -> float | None:
    """Seconds after which nobody waits for the answer any more; None: no word of it. `waits`: the client does nothing but
    wait for the whole answer. Raises InvalidRequest."""
    found = []
    if (text := headers.get(DEADLINE)) is not None:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= LONGEST_DEADLINE_MS):
            raise InvalidRequest(f"{DEADLINE} must be a whole number of milliseconds above 0.", param=DEADLINE)
        found.append(int(text) / 1000)
    if waits and (text := headers.get(READ_TIMEOUT)) is not None:
        found.append(_seconds(text))
    return min(found, default=None)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{READ_TIMEOUT} must be a number of seconds above 0.", param=READ_TIMEOUT)
    return seconds
