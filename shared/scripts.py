"""The protocol's Lua scripts as functions.

The text of each is `lua/<name>.lua`, which documents its arguments and answers; `lua/_prelude.lua` is put before
it. All but submit may write to a full store: what was accepted must be able to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import redis

from shared import connection
from shared.frames import Name
from shared.jobs import VERSION

NAMES = (
    *("submit", "take", "emit", "end", "put_back", "attach", "detach", "beat", "book", "release", "leave"),
    *("reap", "reap_proc", "sweep", "wanted", "place", "page", "keep"),
    *("loading", "demand"),
    *("admit", "settle", "count"),
    *("ended", "forget", "file_delete", "hooks", "hook_done"),
    *("batch_create", "batch_take", "batch_beat", "batch_begin", "batch_commit", "batch_end", "batch_cancel"),
)


#: A request that was running, without a token, in so many workers that died is ended: it may be what kills them.
KILLS_ALLOWED = 2
#: Attempts cut off by a worker's death, whoever's fault, after which a request is ended.
TRIES_ALLOWED = 5
#: Time for whoever ends a request to keep its result, ms. After it, anybody does.
UNKEPT_MS = 5000


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


class ReapFrames(NamedTuple):
    """Terminal frames for requests that are not given back: past the deadline; a killer of workers; tried too often."""

    deadline: bytes
    poison: bytes
    tried: bytes


class Taken(NamedTuple):
    """One job out of take.lua. `name`: of the take's frame. `left`: seconds to its deadline; `log`: its entries,
    oldest first, the take's is the last; `fields`: the job's hash, as the store has it."""

    id: str
    name: Name
    left: float
    log: list[tuple[Name, bytes]]
    fields: dict[bytes, bytes]

    def text(self, field: str, otherwise: str = "") -> str:
        return self.fields.get(field.encode(), otherwise.encode()).decode(errors="replace")

    @property
    def needs(self) -> int:
        """Lanes, if the worker has so many."""
        text = self.text("needs")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 1

    @property
    def data(self) -> bytes:
        """RQ's data."""
        return self.fields.get(b"data", b"")


class Looked(NamedTuple):
    """A job as attach.lua finds it; "" or b"" for what the store does not have. `grace`: s; `end`: the terminal frame."""

    status: str
    terminal: str
    home: str
    data: bytes
    view: bytes
    fingerprint: str
    grace: str
    background: bool
    end: bytes
    logged: bool


class Given(NamedTuple):
    """What take.lua gives a worker. `held`: batch work waits that may not have the lanes which are free."""

    jobs: list[Taken]
    held: bool


class Swept(NamedTuple):
    """Ids of requests: those that were ended, and those whose results nobody has kept."""

    ended: list[str]
    unkept: list[str]


class Place(NamedTuple):
    """Where a request waits. `position`: 1 = next. `eta_s`: until a lane is free for it, if known. `served`: a live worker has
    its model; else `loading`, per cent that one which loads it has done, if it says so."""

    position: int
    eta_s: float | None = None
    served: bool = True
    loading: int | None = None


class Busy(NamedTuple):
    """A live worker that does not drain: its lanes, and how many of them are in use."""

    name: str
    lanes: int
    used: int


class Demand(NamedTuple):
    """What a model has to do. `wait_s`: until what waits will have been taken, if known."""

    waiting: int
    wait_s: float | None
    workers: list[Busy]


class Page(NamedTuple):
    """Entries of a log, as XRANGE gives them. `more`: there are others behind them."""

    entries: list[tuple[bytes, dict[bytes, bytes]]]
    more: bool


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

    def each(self, name: str, calls: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """The script once for each of these arguments, in one round trip: raw answers, and errors that are returned."""
        answers = self._each(name, calls)
        if any(isinstance(answer, redis.exceptions.NoScriptError) for answer in answers):
            self._store.script_load(text(name))
            answers = self._each(name, calls)
        return answers

    def _each(self, name: str, calls: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        pipeline = self._store.pipeline(transaction=False)
        for args in calls:
            pipeline.evalsha(sha(name), 0, *args)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def take(
        self,
        worker: str,
        free: int,
        lanes: int,
        model: str,
        fp: str,
        late: bytes,
        timeout_ms: int,
        broken: bytes,
        reserve: int = 0,
    ) -> Given | None:
        """Jobs for the free lanes, of which batch work leaves `reserve`. None: this worker's name was retired. `late` and `broken`: the frames that end what is past its deadline, and what the store cannot give out."""
        answer = self.call("take", worker, free, lanes, model, fp, late, timeout_ms, broken, VERSION, reserve)
        if answer[0] == b"retired":
            return None
        taken = [
            Taken(
                job_id.decode(),
                Name(int(a), int(s)),
                int(left) / 1000,
                [(Name.parse(name.decode()), fields[1]) for name, fields in log],
                dict(zip(fields[::2], fields[1::2], strict=True)),
            )
            for job_id, a, s, left, log, fields in answer[1:]
        ]
        return Given(taken, answer[0] == b"held")

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

    def attach(self, job_id: str, proc: str, tenant: str) -> Looked | None:
        """What the store has of a job. The process follows it from now on unless it has ended; "" only looks. None:
        there is none of that id, or it is another tenant's."""
        answer = self.call("attach", job_id, proc, tenant)
        if answer[0] == b"missing":
            return None
        status, terminal, home, data, view, fingerprint, grace, background, end, logged = answer[1:]
        return Looked(
            _text(status),
            _text(terminal),
            _text(home),
            data,
            view,
            _text(fingerprint),
            _text(grace),
            background == b"1",
            end,
            logged == b"1",
        )

    def attach_again(self, job_id: str, proc: str) -> None:
        """A process that follows a job tells so once more."""
        self.call("attach", job_id, proc, "*")

    def detach(self, job_id: str, proc: str, frame: bytes) -> str:
        """The process lets go of a job; `frame` ends it if nobody else follows it. See detach.lua for the answer."""
        return _text(self.call("detach", job_id, proc, frame))

    def reap(self, worker: str, why: str, *, proven: bool, frames: ReapFrames) -> tuple[int, list[str]] | None:
        """Gives back what a dead worker ran; how many were given back, and the ids of those that ended. None: it lives.
        `proven`: its process has been waited for."""
        answer = self.call(
            "reap",
            *(worker, why, "1" if proven else "", frames.deadline, frames.poison, frames.tried),
            *(KILLS_ALLOWED, TRIES_ALLOWED),
        )
        return None if answer[0] == b"alive" else (int(answer[1]), [_text(item) for item in answer[2]])

    def reap_proc(self, proc: str, frame: bytes) -> list[str] | None:
        """Lets go of what a dead API process followed; ids of those that ended by that. None: it lives."""
        answer = self.call("reap_proc", proc, frame)
        return None if answer[0] == b"alive" else [_text(item) for item in answer[1]]

    def sweep(
        self,
        cold_start_ms: int,
        *,
        late: bytes,
        no_worker: bytes,
        lost: bytes,
        not_loaded: bytes,
        most: int,
        batch_age_ms: int,
    ) -> Swept:
        """Ends what waits in vain, and finds what ended UNKEPT_MS ago and still has no result."""
        args = (cold_start_ms, late, no_worker, lost, most, batch_age_ms, UNKEPT_MS, not_loaded)
        _, ended, unkept = self.call("sweep", *args)
        return Swept([_text(item) for item in ended], [_text(item) for item in unkept])

    def wanted(self, worker: str, model: str, fp: str, *, free: int, batch: int, yielding: int, lanes: int) -> int:
        """Lanes with batch work that the worker shall give up now. See wanted.lua."""
        return int(self.call("wanted", worker, model, fp, free, batch, yielding, lanes, VERSION))

    def place(self, job_id: str) -> Place | None:
        """None: it does not wait."""
        position, *more = map(int, self.call("place", job_id))
        if not position:
            return None
        ms, workers, percent = more
        return Place(position, _seconds(ms), workers > 0, None if percent < 0 or workers else percent)

    def loading(self, worker: str, model: str, percent: int | None) -> None:
        """How far a worker has loaded its model; None: it does not load it any more."""
        self.call("loading", worker, model, "" if percent is None else percent)

    def demand(self, model: str) -> Demand:
        waiting, wait_ms, flat = self.call("demand", model)
        workers = [
            Busy(_text(name), int(lanes), int(used))
            for name, lanes, used in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]
        return Demand(int(waiting), _seconds(int(wait_ms)), workers)

    def pages(self, wanted: Sequence[tuple[str, Name]], most: int, size: int) -> list[Page | None]:
        """Of each request's log its entries from a frame on, that one included: `most` of them, or about `size` bytes,
        but two in any case. None: something else lies where the log belongs. One round trip for all."""
        answers = self.each("page", [(job_id, str(last), most, size) for job_id, last in wanted])
        return [
            None
            if answer is None
            else Page([(name, dict(zip(f[::2], f[1::2], strict=True))) for name, f in answer[1]], bool(answer[0]))
            for answer in map(connection.unless_another_type, answers)
        ]

    def leave(self, kind: Literal["worker", "proc"], name: str, frame: bytes = b"") -> None:
        """`frame` ends what an API process still follows and nobody else does."""
        self.call("leave", kind, name, frame)


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000


def _text(value: bytes | int | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
