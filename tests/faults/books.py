"""What the store knows of requests and workers, for tests that have to hit the right one at the right moment."""

from __future__ import annotations

from typing import Any

from shared import frames, keys
from shared.frames import Delta, Frame, Take

Store = Any  # a redis client; its stubs know both bytes and str answers, ours are bytes


def running(store: Store) -> dict[str, str]:
    """Id -> worker of every request that runs."""
    found: dict[str, str] = {}
    for member in store.smembers(keys.WORKERS):
        worker = member.decode()
        found |= {job_id.decode(): worker for job_id in store.hkeys(keys.lanes(worker))}
    return found


def pid_of(store: Store, worker: str) -> int:
    return int(store.hget(keys.stat(worker), "pid"))


def worker_of(store: Store, pid: int) -> str | None:
    """The name a process goes by, once it is registered."""
    for member in store.smembers(keys.WORKERS):
        if store.hget(keys.stat(member.decode()), "pid") == str(pid).encode():
            return str(member.decode())
    return None


def owner(store: Store, job_id: str) -> int:
    """pid of the worker that runs a request."""
    return pid_of(store, store.hget(keys.job(job_id), "owner").decode())


def logged(store: Store, job_id: str) -> list[Frame]:
    """All frames of a request, so far."""
    return [frame for _, fields in store.xrange(keys.log(job_id)) for frame in frames.decode_entry(fields[b"f"])]


def ids(told: list[Frame], choice: int = 0) -> list[int]:
    """Tokens of a choice."""
    return [token for frame in told if isinstance(frame, Delta) and frame.i == choice for token in frame.t]


def attempts(told: list[Frame]) -> list[list[Frame]]:
    """Frames by attempt, without the takes."""
    found: list[list[Frame]] = []
    for frame in told:
        if isinstance(frame, Take):
            found.append([])
        else:
            found[-1].append(frame)
    return found


#: Keys that stay: of the process, of RQ's books, and what is there as long as the model is.
STAY = ("rq:job:", "sluice:log:", "rq:results:", "rq:finished:", "rq:failed:", "rq:canceled:", "rq:worker", "rq:queues")
STAY = (*STAY, "sluice:workers", "sluice:procs", "sluice:alive:", "sluice:lease:", "sluice:stat:", "sluice:card")
STAY = (*STAY, "sluice:tokenizer:", "sluice:bell:", "sluice:starter:", "sluice:sweep", "sluice:alone:")
#: Figures and short notes of the admission.
STAY = (*STAY, "sluice:served:", "sluice:pace:", "sluice:full", "sluice:yield:", "sluice:limit:", "sluice:idem:")
#: What /metrics and /monitor count.
STAY = (*STAY, "sluice:counts", "sluice:counted:", "sluice:lately:", "sluice:recent")


def left_behind(store: Store) -> list[str]:
    """What nothing that has ended may leave: lanes, lists, rings, executions; and keys of one request without a TTL."""
    found = []
    for raw in store.scan_iter(count=1000):
        key = raw.decode()
        if not key.startswith(STAY):
            found.append(key)
        elif key.startswith(STAY[:3]) and store.ttl(key) < 0:
            found.append(f"{key} without a TTL")
    return found
