"""What Sluice demands of its store, asked at boot.

Works on any Redis >= 7.0 or Valkey, also on hosted ones that refuse CONFIG: everything is read from INFO.
Knows nothing of who starts the store.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import redis

from shared.connection import connect
from shared.sentinel import is_watched

#: The oldest Redis whose scripts know `flags=allow-oom`. Valkey reports 7.2.4 here, whatever its own version.
MIN_VERSION = (7, 0)


_PASSWORD_PARAMETER = re.compile(r"([?&][a-z_]*password=)[^&#]*", re.IGNORECASE)


class StoreRefused(Exception):
    """The store cannot be used; the message says why and what to do."""


def check_store(url: str) -> list[str]:
    """Asks the store behind `url` whether it can keep Sluice's promises.

    Returns warnings, one sentence each. Raises StoreRefused for a store that is out of reach, too old, a replica, a
    cluster, or one that may evict keys (a log that vanishes under a running stream).
    """
    try:
        client = connect(url, max_connections=1)
    except ValueError as error:
        raise StoreRefused(f"REDIS_URL {without_password(url)} is no store address: {error}") from None
    try:
        info: dict[str, Any] = client.info()
    except redis.AuthenticationError as error:
        raise StoreRefused(f"The store at {without_password(url)} refuses the login: {error}") from None
    except redis.RedisError as error:
        raise StoreRefused(f"The store at {without_password(url)} cannot be reached: {error}") from None
    finally:
        client.close()
    return judge(info, without_password(url), watched=is_watched(url))


def judge(info: dict[str, Any], name: str, *, watched: bool = False) -> list[str]:
    """`check_store` on the answer of INFO; `name` is what messages call the store. `watched`: by sentinels."""
    version = str(info.get("redis_version", "0"))
    if parse_version(version) < MIN_VERSION:
        raise StoreRefused(f"The store at {name} is Redis {version}; Sluice needs Redis 7.0 or newer, or Valkey.")
    if info.get("redis_mode") == "cluster" or info.get("cluster_enabled") == 1:
        raise StoreRefused(
            f"The store at {name} is a cluster, which Sluice cannot use: give each model a store of its own."
        )
    if info.get("role") == "slave":
        raise StoreRefused(f"The store at {name} is a read-only replica; REDIS_URL must name the primary.")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreRefused(
            f"The store at {name} throws keys away when memory is short (maxmemory-policy {policy}), also those of "
            "running requests. Set it to noeviction: redis-cli CONFIG SET maxmemory-policy noeviction"
        )
    warnings = []
    if info.get("aof_enabled") != 1:
        warnings.append(
            f"The store at {name} keeps no append-only file: after a restart of the store, requests are lost. "
            "To change that: redis-cli CONFIG SET appendonly yes"
        )
    if watched and "min_slaves_good_slaves" not in info:  # INFO has it where the setting is above 0
        warnings.append(
            f"The store at {name} takes writes while no replica hears them: a primary that is cut off goes on taking "
            "requests that a failover then loses. To change that, on every one: redis-cli CONFIG SET min-replicas-to-write 1"
        )
    return warnings


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of `7.2.4`; zeros where there is no number."""
    numbers = [int(part) if part.isdigit() else 0 for part in text.split(".")]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor


def without_password(url: str) -> str:
    """The address as it may stand in a log."""
    shown = _PASSWORD_PARAMETER.sub(r"\1***", url)
    login, at, _ = urlsplit(shown).netloc.rpartition("@")
    username, colon, _ = login.partition(":")
    return shown.replace(f"//{login}@", f"//{username}:***@", 1) if at and colon else shown
