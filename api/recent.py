"""The request monitor: the last requests with the beginnings of their prompts and texts. Off unless the settings say so.

They lie in the store, so that every API process shows those of all; no more than MOST of them, each bounded. Of a request
that is not to be stored there are figures only. Knows no keys: headers never get here, and what looks like a key in a text
is left out.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import redis

from api.reaching import reaching_the_store
from api.relay.builder import Builder
from shared import connection, keys
from shared.frames import Delta, Finish, Frame, Take
from shared.jobs import Job, Placement
from shared.settings import Settings

#: Requests in the ring.
MOST = 100
#: Characters shown of a prompt, and of a text.
SHOWN = 500
#: Token ids shown of a prompt that came as ids.
SHOWN_IDS = 64
#: Begins like the keys of this server or of others.
_KEY = re.compile(r"\b(sk-[A-Za-z]{0,8})[-_A-Za-z0-9]{16,}")


class Record(msgspec.Struct, frozen=True):
    """One request. Times in s, `at` since 1970. `outcome`: completed, the code of its error, or left: its client hung up.
    `text`: of its first choice, reasoning and calls of tools as the model wrote them. `prompt` and `text` None: the request
    was not to be stored."""

    id: str
    at: float
    kind: str
    model: str
    klass: str = msgspec.field(name="class")
    tenant: str
    outcome: str
    finish_reason: str | None
    seconds: float
    queued: float | None
    first_token: float | None
    prompt_tokens: int
    completion_tokens: int
    choices: int
    max_tokens: int | None
    temperature: float
    prompt: str | None
    text: str | None


class Recorded(NamedTuple):
    """`place`: where in the ring, for asking what came after."""

    place: str
    record: Record


class Recent:
    """`note` collects, `write` brings it into the store, `read` shows it."""

    def __init__(self, store: redis.Redis | None, settings: Settings) -> None:
        self.on = settings.request_monitor and store is not None
        self._store: Any = store
        self._ttl = settings.result_ttl_s
        self._new: deque[Record] = deque(maxlen=MOST)

    def follower(self, job: Job, placement: Placement, began: float) -> Excerpt | None:
        """What follows a new request; None: the monitor is off."""
        return Excerpt(job, placement, began, self._new) if self.on else None

    def write(self) -> None:
        """Brings what is new into the store. Raises redis.RedisError."""
        while self._new:
            pipeline = self._store.pipeline(transaction=False)
            for record in (first := list(self._new)):
                pipeline.xadd(keys.RECENT, {"d": msgspec.json.encode(record)}, maxlen=MOST, approximate=False)
            pipeline.expire(keys.RECENT, self._ttl)
            pipeline.execute()
            for record in first:
                if self._new and self._new[0] is record:
                    self._new.popleft()

    def read(self, after: str = "") -> list[Recorded]:
        """The records behind a place, oldest first. Raises StoreUnavailable."""
        if not self.on:
            return []
        pipeline = self._store.pipeline(transaction=False)
        pipeline.xrange(keys.RECENT, f"({after}" if after else "-", "+", count=MOST)
        with reaching_the_store():
            raw = connection.unless_another_type(pipeline.execute(raise_on_error=False)[0])
        found = []
        for place, fields in raw or ():
            try:
                found.append(Recorded(place.decode(), msgspec.json.decode(fields[b"d"], type=Record)))
            except (KeyError, msgspec.MsgspecError):  # another version's, or anybody's
                continue
        return found


class Excerpt:
    """Follows one request and leaves its record in `into`. `began`: monotonic, s."""

    def __init__(self, job: Job, placement: Placement, began: float, into: deque[Record]) -> None:
        self._job = job
        self._placement = placement
        self._began = began
        self._into = into
        self._queued: float | None = None
        self._first_token: float | None = None
        self._finish: str | None = None
        self._text = ""

    def feed(self, frames: Sequence[Frame], now: float) -> None:
        for frame in frames:
            if isinstance(frame, Delta):
                if self._first_token is None and frame.t:
                    self._first_token = now - self._began
                if frame.i == 0 and len(self._text) <= SHOWN:
                    self._text += frame.text[: SHOWN + 1]
            elif isinstance(frame, Take):
                self._queued = frame.queued_ms / 1000 if self._queued is None else self._queued
            elif isinstance(frame, Finish) and frame.i == 0:
                self._finish = frame.reason

    def close(self, builder: Builder, now: float) -> None:
        job, usage, shown = self._job, builder.usage_so_far(), self._placement.keep
        outcome = "completed" if builder.ended else "left"
        if builder.error is not None:
            outcome = str(builder.error.error.get("code") or "failed")
        record = Record(
            id=job.id,
            at=time.time() - (now - self._began),
            kind=job.kind,
            model=job.model,
            klass=self._placement.klass,
            tenant=self._placement.tenant,
            outcome=outcome,
            finish_reason=self._finish,
            seconds=round(now - self._began, 4),
            queued=self._queued,
            first_token=None if self._first_token is None else round(self._first_token, 4),
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            choices=job.choices,
            max_tokens=job.max_tokens,
            temperature=job.params.temperature,
            prompt=_excerpt(_prompt(job)) if shown else None,
            text=_excerpt(self._text) if shown else None,
        )
        self._into.append(record)


def _prompt(job: Job) -> str:
    prompt = job.prompts[0]
    if isinstance(prompt, str):
        return prompt
    more = ", …" if len(prompt) > SHOWN_IDS else ""
    return f"[{', '.join(map(str, prompt[:SHOWN_IDS]))}{more}]"


def _excerpt(text: str) -> str:
    shown = _KEY.sub(r"\1…", text[: SHOWN + 200])
    return shown[:SHOWN] + "…" if len(shown) > SHOWN or len(text) > SHOWN + 200 else shown
