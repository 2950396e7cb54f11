"""What a key may use up: requests and tokens a minute, requests at one time.

Counted in the store (`shared/lua/admit.lua`), so that all API processes count together. Tokens are reserved before a
request is queued and put right when it is over. Knows nothing of Flask; who asks is in `api/auth.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import redis
import structlog

from shared.api_keys import Key
from shared.errors import RateLimited, StoreUnavailable
from shared.jobs import Job
from shared.scripts import Scripts

log = structlog.get_logger(__name__)

#: x-ratelimit-*, named as OpenAI names them.
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)
#: Tokens that are reserved for each choice of a request without max_tokens; what it really makes is known at its end.
UNSAID = 256
#: Characters of a prompt that are taken for one token.
CHARACTERS = 4

#: Longest Retry-After, s: who is told more gives up, and a debt may take longer.
LONGEST_WAIT = 120.0

_WORDS = {
    "requests": "This key's requests of the minute are used up.",
    "tokens": "This key's tokens of the minute are used up, or too few are left for this request.",
    "concurrent": "This key has as many requests running as it may.",
}


class Admission:
    """A request that was let in. `used`: its tokens so far, prompt and completion, once somebody counts; None: nobody
    here knows."""

    def __init__(self, settle: Callable[[int | None], None] | None = None) -> None:
        self._settle = settle
        self.used: Callable[[], int | None] = lambda: 0

    def settle(self) -> None:
        """Nobody waits for the request any more: what was reserved becomes what was used, at once if it is over, else at
        its end. Further calls do nothing. Never raises."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(self.used())


class Limits:
    """`store` None: nothing is counted and nobody limited (tests without a store)."""

    def __init__(self, store: redis.Redis | None) -> None:
        self._scripts = Scripts(store) if store is not None else None

    def admit(self, key: Key | None, job: Job, announce: Callable[[str, str], None]) -> Admission:
        """Lets a request in under its key's limits. `announce` gets the x-ratelimit headers.

        Raises RateLimited, or StoreUnavailable; then nothing was used up."""
        scripts = self._scripts
        if key is None or scripts is None:
            return Admission()
        limits = [_number(limit) for limit in (key.requests, key.tokens, key.concurrent)]
        if not any(limits):
            return Admission()
        try:
            answer = scripts.call("admit", key.id, job.id, *limits, reserve(job))
        except redis.RedisError as error:
            raise StoreUnavailable("The store does not answer.") from error
        verdict, wait_ms, reserved, *left = answer[0].decode(), *map(int, answer[1:])
        for kind, limit, (remaining, reset_ms) in (
            ("requests", key.requests, left[:2]),
            ("tokens", key.tokens, left[2:]),
        ):
            if limit is not None:
                announce(f"x-ratelimit-limit-{kind}", str(limit))
                announce(f"x-ratelimit-remaining-{kind}", str(remaining))
                announce(f"x-ratelimit-reset-{kind}", duration(reset_ms))
        if verdict != "ok":
            limited = RateLimited(_WORDS[verdict])
            limited.retry_after_s = min(wait_ms / 1000, LONGEST_WAIT)
            raise limited

        def settle(used: int | None) -> None:
            try:
                scripts.call("settle", key.id, job.id, limits[1], reserved, "" if used is None else used)
            except redis.RedisError as error:  # the bucket fills again by itself
                log.warning("settle_failed", job=job.id, error=str(error))

        return Admission(settle)


def reserve(job: Job) -> int:
    """Tokens that a request is taken to come to before it has run; as OpenAI does, without reading the prompt."""
    prompts = sum(len(p) // CHARACTERS + 1 if isinstance(p, str) else len(p) for p in job.prompts)
    return prompts + job.choices * (UNSAID if job.max_tokens is None else job.max_tokens)


def duration(ms: int) -> str:
    """Milliseconds as OpenAI's headers write them: `6m0s`, `1.5s`, `120ms`."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(ms / 1000, 60)
    return f"{int(minutes)}m{seconds:g}s" if minutes else f"{seconds:g}s"


def _number(limit: int | None) -> str:
    return "" if limit is None else str(limit)
