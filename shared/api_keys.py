"""API keys: what a key may do, and how keys lie in the store.

A key is 256 random bits, so one round of SHA-256 is enough at rest: nobody can guess their way back from the digest, which
is what slow password hashes are for. Knows nothing of HTTP; `api/keyring.py` asks this file for each request's key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import Any, NamedTuple

import msgspec
import redis

from shared import keys
from shared.connection import connect
from shared.jobs import DEFAULT_TENANT, Class
from shared.store_rules import StoreRefused, without_password

#: What every key begins with, so that people and scanners of leaked secrets know it.
PREFIX = "sk-sluice-"
#: Scope -> what it allows. Models, the API's description and errors are for every key.
SCOPES = {
    "completions": "completions, and those of one's own tenant by id",
    "chat": "chat completions",
    "batches": "files and batches, of those endpoints that the key may use",
    "tokenize": "tokenize, detokenize, tokenizer_info",
    "monitor": "status, metrics and the figures of the monitor page",
    "admin": "everything, and every tenant's requests",
}
DEFAULT_SCOPES = ("completions", "chat", "batches", "tokenize")

#: Tenants are part of queue names, whose parts a colon divides.
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Key(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a key; the key itself is not.

    `requests` and `tokens` are a minute's, `concurrent` at one time; None = no limit. `klass`: "batch" makes a batch request of each of the
    key's requests, "interactive" leaves the choice to them. `keep` False: log and result of its requests go soon after their end, as with
    `store: false`. `hint`: the key's last characters. `created`, `revoked`: s since 1970.
    """

    id: str
    tenant: str = DEFAULT_TENANT
    name: str = ""
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None
    klass: Class = "interactive"
    keep: bool = True
    hint: str = ""
    created: int = 0
    revoked: int | None = None

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class Listed(NamedTuple):
    """`used`: about when the key was last used, s since 1970; None: never."""

    key: Key
    used: int | None


def digest(secret: str) -> str:
    """What stands in the store for a key."""
    return hashlib.sha256(secret.encode()).hexdigest()


class KeyStore:
    """The keys in the store. Every method raises redis.RedisError when the store does not answer."""

    def __init__(self, store: redis.Redis) -> None:
        self._store: Any = store  # its stubs know both bytes and str answers; ours are bytes

    def add(self, **fields: Any) -> tuple[str, Key]:
        """Makes a key; returns the secret, which nobody can see again, and what is kept. Raises ValueError."""
        secret = PREFIX + secrets.token_hex(32)
        key = Key(id=f"key-{secrets.token_hex(6)}", created=int(time.time()), hint=secret[-4:], **fields)
        _check(key)
        self._write(digest(secret), key)
        return secret, key

    def revoke(self, key_id: str) -> Key:
        """Ends a key for good; one that is revoked already stays as it is. Raises KeyError for an id that is none.

        It stays in the list: while there is any key, revoked or not, nobody is let in without one."""
        for hashed, key in self.read().items():
            if key.id == key_id:
                if key.revoked is None:
                    key = msgspec.structs.replace(key, revoked=int(time.time()))
                    self._write(hashed, key)
                return key
        raise KeyError(key_id)

    def listed(self) -> list[Listed]:
        """All keys, oldest first."""
        used = {name.decode(): int(when) for name, when in self._store.hgetall(keys.KEYS_USED).items()}
        every = sorted(self.read().values(), key=lambda key: (key.created, key.id))
        return [Listed(key, used.get(key.id)) for key in every]

    def version(self) -> bytes | None:
        """Another one after each change; None where there are no keys."""
        found: bytes | None = self._store.get(keys.KEYS_VERSION)
        return found

    def read(self) -> dict[str, Key]:
        """digest -> key, the revoked ones too. An entry that is none is as good as absent, but does not open the door:
        it stands there as revoked."""
        found: dict[bytes, bytes] = self._store.hgetall(keys.KEYS)
        return {hashed.decode(errors="replace"): decoded(raw) for hashed, raw in found.items()}

    def note_used(self, key_id: str) -> None:
        """Writes down that the key was used now, by the store's clock."""
        self._store.hset(keys.KEYS_USED, key_id, int(self._store.time()[0]))

    def _write(self, hashed: str, key: Key) -> None:
        pipeline = self._store.pipeline(transaction=True)
        pipeline.hset(keys.KEYS, hashed, msgspec.json.encode(key))
        # random, not counted: a store that lost its last seconds may count to the same number twice
        pipeline.set(keys.KEYS_VERSION, secrets.token_hex(8))
        pipeline.execute()


def keys_configured(url: str | None) -> bool:
    """Whether the store has any key, revoked or not. Raises StoreRefused if it cannot be asked. `url`
    None: there is no store."""
    if url is None:
        return False
    client = connect(url, max_connections=1)
    try:
        return bool(KeyStore(client).read())
    except redis.RedisError as error:
        raise StoreRefused(f"The store at {without_password(url)} cannot be asked for API keys: {error}") from None
    finally:
        client.close()


def decoded(raw: bytes) -> Key:
    """A key as it is kept; for what is none, one that is revoked."""
    try:
        return msgspec.json.decode(raw, type=Key)
    except msgspec.DecodeError:
        return Key(id="unreadable", scopes=(), revoked=0)


def _check(key: Key) -> None:
    if not _TENANT.fullmatch(key.tenant):
        raise ValueError(f"A tenant is 1 to 64 letters, digits, dots, dashes or underscores, not {key.tenant!r}.")
    unknown = [scope for scope in key.scopes if scope not in SCOPES]
    if unknown or not key.scopes:
        raise ValueError(f"There is no scope {', '.join(unknown) or '(none given)'}. There are: {', '.join(SCOPES)}.")
    if any(limit is not None and not 1 <= limit <= 10**12 for limit in (key.requests, key.tokens, key.concurrent)):
        raise ValueError("A limit is a whole number from 1 on.")
    if len(key.name) > 200 or not key.name.isprintable():
        raise ValueError("A name is at most 200 printable characters.")
