"""The protocol's Lua scripts as functions.

The text of each is `lua/<name>.lua`, which documents its arguments and answers; `lua/_prelude.lua` is put before
it. All but submit may write to a full store: what was accepted must be able to end.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import redis

from shared.frames import Name

NAMES = ("submit", "take", "emit", "end", "detach", "beat", "book", "release", "leave")


@cache
def text(name: str) -> str:
    """The whole text of a script, as the store gets it."""
    folder = files("shared") / "lua"
    head = "#!lua" if name == "submit" else "#!lua flags=allow-oom"
    return "\n".join((head, (folder / "_prelude.lua").read_text(), (folder / f"{name}.lua").read_text()))


@cache
def sha(name: str) -> str:
    """What EVALSHA calls the script."""
    return sha1(text(name).encode()).hexdigest()


class Taken(NamedTuple):
    """One job out of take.lua. `left`: seconds to its deadline; `log`: its entries, oldest first; `result_ttl`: s."""

    id: str
    name: Name
    data: bytes
    home: str
    left: float
    origin: str
    log: list[tuple[Name, bytes]]
    fanout: bool
    result_ttl: int


class Scripts:
    """Calls the scripts on one client. Every method raises redis.RedisError when the store does not answer."""

    def __init__(self, store: redis.Redis) -> None:
        self._store = store

    def call(self, name: str, *args: str | bytes | int) -> Any:
        """The script's raw answer. Loads the script where the store does not know it."""
        try:
            return self._store.evalsha(sha(name), 0, *args)
        except redis.exceptions.NoScriptError:
            return self._store.eval(text(name), 0, *args)

    def take(
        self, worker: str, free: int, lanes: int, model: str, fp: str, late: bytes, timeout_ms: int
    ) -> list[Taken] | None:
        """Jobs for the free lanes. None: this worker's name was retired."""
        answer = self.call("take", worker, free, lanes, model, fp, late, timeout_ms)
        if answer[0] == b"retired":
            return None
        return [
            Taken(
                job_id.decode(),
                Name(int(a), int(s)),
                data,
                home.decode(errors="replace"),
                int(left) / 1000,
                origin.decode(errors="replace"),
                [(Name.parse(name.decode()), fields[1]) for name, fields in log],
                fanout == b"1",
                int(result_ttl),
            )
            for job_id, a, s, data, home, left, origin, log, fanout, result_ttl in answer[1:]
        ]

    def end(self, job_id: str, by: str, frame: bytes, status: str, *, attempt: int | None = None) -> tuple[int, str]:
        """Ends a job for somebody who does not own it; with `attempt`, only if that one is the latest. See end.lua for
        the answer. (An owner's end goes with its last frame through the emitter.)"""
        answer = self.call("end", job_id, "" if attempt is None else attempt, "", by, frame, status)
        return int(answer[0]), _text(answer[1]) if len(answer) > 1 else ""

    def beat(self, kind: Literal["worker", "proc"], name: str, lease_ms: int, *, register: bool) -> list[str] | None:
        """Renews a lease; what the store thinks the process has (ids; a worker's with their attempts). None: retired."""
        answer = self.call("beat", kind, name, lease_ms, "1" if register else "")
        return None if answer[0] == b"retired" else [item.decode(errors="replace") for item in answer[1]]

    def book(self, worker: str, job_id: str, a: int) -> None:
        self.call("book", worker, job_id, a)

    def release(self, worker: str, job_id: str, a: int) -> bool:
        """True if the job went back to its queue."""
        return bool(self.call("release", worker, job_id, a))

    def detach(self, job_id: str, proc: str, frame: bytes) -> str:
        """The process lets go of a job; `frame` ends it if nobody else follows it. See detach.lua for the answer."""
        return _text(self.call("detach", job_id, proc, frame))

    def leave(self, kind: Literal["worker", "proc"], name: str) -> None:
        self.call("leave", kind, name)


def _text(value: bytes | int | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
