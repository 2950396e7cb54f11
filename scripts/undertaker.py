"""Tells the store that a worker's process has ended: its requests go on elsewhere at once, not when its lease runs out.

Knows nothing of processes; the supervisor calls it with the name of a run that it has waited for.
"""

from __future__ import annotations

from typing import Any

from shared import keys
from shared.connection import connect
from shared.reaper import reap_worker


class Undertaker:
    """Raises redis.RedisError when called while the store is away; the lease does the same, later."""

    def __init__(self, url: str) -> None:
        self._store: Any = connect(url, max_connections=1)

    def __call__(self, run_name: str, pid: int, how: str) -> None:
        """`run_name` is what the worker was told to call itself; one that was retired has gone on under a longer name."""
        for member in self._store.smembers(keys.WORKERS):
            name = member.decode(errors="replace")
            if name == run_name or name.startswith(f"{run_name}~"):
                reap_worker(self._store, name, f"process {pid} ended with {how}", proven=True)
