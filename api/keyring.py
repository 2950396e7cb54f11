"""The API keys as this process knows them: a copy of the store's table that is at most REFRESH seconds old.

A request costs no round trip for its key. Never lets anybody in because the store is away, and never turns open again
once it has seen a key. Knows nothing of HTTP.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from typing import Protocol

import redis
import structlog

from shared.api_keys import Key, digest
from shared.errors import StoreUnavailable

log = structlog.get_logger(__name__)

#: Seconds for which the table is used without a look at the store: so long may a revoked key go on working.
REFRESH = 0.5
#: The same for a key that is not in the table: it may have been added just now.
JUST_NOW = 0.05
#: Seconds between two notes that a key is in use.
NOTED = 60.0


class Source(Protocol):
    """`shared.api_keys.KeyStore`, or what stands for it in tests."""

    def version(self) -> bytes | None: ...

    def read(self) -> dict[str, Key]: ...

    def note_used(self, key_id: str) -> None: ...


class Keyring:
    """`source` None: there are no keys and none can come (tests without a store)."""

    def __init__(self, source: Source | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._reading = threading.Lock()
        self._read_at = -REFRESH
        self._failed_at = -REFRESH
        self._version: bytes | None = None
        self._table: dict[str, Key] = {}
        self._seen = False
        self._noted: dict[str, float] = {}

    def configured(self) -> bool:
        """Whether there is any key, or was one since this process began. Raises StoreUnavailable."""
        self._refresh(REFRESH)
        return self._seen

    def find(self, secret: str) -> Key | None:
        """The key, if it is one and not revoked. Raises StoreUnavailable."""
        wanted = digest(secret)
        self._refresh(REFRESH)
        if wanted not in self._table:
            self._refresh(JUST_NOW)
        found = None
        for known, key in self._table.items():  # all of them, each in constant time: a thousand take 0.2 ms
            if hmac.compare_digest(known.encode(), wanted.encode()):
                found = key
        if found is None or found.revoked is not None:
            return None
        self._note(found)
        return found

    def _note(self, key: Key) -> None:
        """Writes down that the key is in use, once in a while. Nobody is refused because that cannot be done."""
        now = self._clock()
        if self._source is None or now - self._noted.get(key.id, -NOTED) < NOTED:
            return
        self._noted[key.id] = now
        try:
            self._source.note_used(key.id)
        except redis.RedisError as error:
            log.warning("key_use_not_noted", error=str(error))

    def _refresh(self, oldest: float) -> None:
        if self._source is None:
            return
        with self._reading:
            now = self._clock()
            if now - self._read_at <= oldest:
                return
            if now - self._failed_at <= JUST_NOW:  # who waited for the lock meanwhile need not wait once more
                raise StoreUnavailable("The store does not answer.")
            try:
                self._read(self._source)
            except redis.RedisError as error:
                self._failed_at = self._clock()
                raise StoreUnavailable("The store does not answer.") from error
            self._read_at = now

    def _read(self, source: Source) -> None:
        version = source.version()
        if version is None or version != self._version:
            self._table = source.read()
            self._version = version
            self._seen = self._seen or bool(self._table)
