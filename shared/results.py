"""What is kept of a request once its log is gone: its frames, folded, in RQ's result of the job.

Folding joins the deltas of each choice, so that the API's builder makes the same object of a result as of a log. Who
ends a request folds it (worker, API, reaper). Knows frames and the store; nothing of HTTP, engines and RQ's classes,
whose format of a result this writes (rq 3.0, `Result.serialize`).
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import structlog

from shared import connection, frames, keys
from shared.frames import Delta, End, Error, Finish, Frame, Name, Prompt, Start, Take
from shared.scripts import Scripts

log = structlog.get_logger(__name__)

#: RQ's numbers for how a job went.
SUCCESSFUL, FAILED, STOPPED = 1, 2, 3
#: How long a result is kept where the job does not say, s.
DEFAULT_TTL = 3600
#: The longest that is believed, s (as in the scripts).
LONGEST_TTL = 10 * 365 * 86400

#: A log entry as the store gives it: its stream id and its fields.
RawEntry = tuple[bytes, dict[bytes, bytes]]


class _Value(msgspec.Struct):
    """What a result is read for; RQ's users find `choices` and `usage` beside it."""

    frames: list[Frame]


_values = msgspec.json.Decoder(_Value)


def entries(raw: Iterable[RawEntry]) -> list[tuple[Name, list[Frame]]]:
    """A log, decoded: (name of the last frame, frames) an entry. Raises ValueError for what is none."""
    try:
        return [(Name.parse(name.decode()), frames.decode_entry(fields[b"f"])) for name, fields in raw]
    except (KeyError, msgspec.MsgspecError) as error:
        raise ValueError(f"not a log entry: {error!r}") from None


def fold(log_frames: Iterable[Frame]) -> list[Frame]:
    """The frames of a whole request as few: the first take, the start, the prompts' scores, one delta and one finish a
    choice, the end. What a builder makes of them as a whole is the same."""
    takes: list[Frame] = []
    starts: list[Frame] = []
    prompts: list[Prompt] = []
    deltas: dict[int, list[Delta]] = {}
    finishes: dict[int, Finish] = {}
    end: list[Frame] = []
    for frame in log_frames:
        if isinstance(frame, Take):
            takes = takes or [frame]
        elif isinstance(frame, Start):
            starts = starts or [frame]
        elif isinstance(frame, Prompt):
            prompts.append(frame)
        elif isinstance(frame, Delta):
            deltas.setdefault(frame.i, []).append(frame)
        elif isinstance(frame, Finish):
            finishes.setdefault(frame.i, frame)
        else:
            end = [frame]
            break
    scored: list[Prompt | Delta] = [*prompts, *(_joined(of_choice) for _, of_choice in sorted(deltas.items()))]
    return [*takes, *starts, *_told_first(scored), *finishes.values(), *end]


def _joined(deltas: Sequence[Delta]) -> Delta:
    """One delta with what these say, of one choice."""
    return Delta(
        deltas[0].i,
        [token for delta in deltas for token in delta.t],
        "".join(delta.text for delta in deltas),
        deltas[-1].n,
        _all(delta.lp for delta in deltas),
        _all(delta.o for delta in deltas),
        {token: piece for delta in deltas for token, piece in delta.p.items()},
        r=sum(delta.r for delta in deltas),
    )


def _all(lists: Iterable[list[Any] | None]) -> list[Any] | None:
    """The lists as one; None where there is none."""
    there = [items for items in lists if items is not None]
    return [item for items in there for item in items] if there else None


def _told_first(scored: list[Prompt | Delta]) -> list[Prompt | Delta]:
    """With all ids' bytes in the first: a frame tells only what none before it told, and they stand in another order
    now."""
    pieces = {token: piece for frame in scored for token, piece in frame.p.items()}
    return [msgspec.structs.replace(frame, p={} if n else pieces) for n, frame in enumerate(scored)]


def value(folded: list[Frame]) -> dict[str, Any]:
    """The result's value: `frames`, and in plain words `choices` and, of a request that ended well, `usage`."""
    texts = {frame.i: frame.text for frame in folded if isinstance(frame, Delta)}
    reasons = {frame.i: frame.reason for frame in folded if isinstance(frame, Finish)}
    last = folded[-1] if folded else None
    return {
        "choices": [
            {"index": i, "text": texts.get(i, ""), "finish_reason": reasons.get(i)}
            for i in sorted(texts.keys() | reasons.keys())
        ],
        "usage": last.usage if isinstance(last, End) else None,
        "frames": folded,
    }


def keep(store: Any, job_ids: Sequence[str], *, worker: str = "") -> None:
    """Writes the results of requests that have ended, two round trips for all. What cannot be read is left out: it fails
    one request's result, no other's. Raises redis.RedisError; whatever is not written then, a reaper finds later."""
    if not job_ids:
        return
    reading = store.pipeline(transaction=False)
    for job_id in job_ids:
        reading.hmget(keys.job(job_id), "terminal", "status", "result_ttl")
        reading.xrange(keys.log(job_id), "-", "+")
    answers = [*map(connection.unless_another_type, reading.execute(raise_on_error=False))]
    writing: list[tuple[str | bytes | int, ...]] = []
    nothing: list[str] = []
    for job_id, state, raw in zip(job_ids, answers[::2], answers[1::2], strict=True):
        if not (state and state[0] and raw):
            nothing.append(job_id)
            continue
        try:
            folded = fold([frame for _, entry in entries(raw) for frame in entry])
        except (ValueError, RecursionError) as error:
            log.warning("result_not_kept", job=job_id, error=str(error))
            nothing.append(job_id)
            continue
        fields = _fields(folded, state[1], worker)
        writing.append((job_id, _ttl(state[2]), *(part for pair in fields.items() for part in pair)))
    for (key, *_), answer in zip(writing, Scripts(store).each("keep", writing) if writing else (), strict=True):
        if connection.unless_another_type(answer) is None:
            log.warning("result_not_kept", job=key, error="something else lies there")
            nothing.append(str(key))
    if nothing:
        store.zrem(keys.UNKEPT, *nothing)


def _ttl(raw: bytes | None) -> int:
    """Seconds; the default for what somebody else may have written there."""
    return int(raw) if raw is not None and raw.isdigit() and 0 < int(raw) <= LONGEST_TTL else DEFAULT_TTL


def _fields(folded: list[Frame], status: bytes, worker: str) -> dict[Any, Any]:
    """As RQ writes a result."""
    last = folded[-1] if folded else None
    kind = {b"finished": SUCCESSFUL, b"stopped": STOPPED}.get(status, FAILED)
    fields: dict[Any, Any] = {
        "type": kind,
        "worker_name": worker,
        "return_value": b64encode(msgspec.json.encode(value(folded))),
    }
    if isinstance(last, Error):
        fields["exc_string"] = b64encode(zlib.compress(str(last.error.get("message", "")).encode()))
    return fields


def read(raw: Sequence[RawEntry]) -> list[Frame]:
    """The folded frames of a job's results, newest first as XREVRANGE gives them; none where there is no result of ours."""
    try:
        return _values.decode(b64decode(raw[0][1][b"return_value"])).frames
    except (IndexError, KeyError, ValueError, msgspec.MsgspecError):
        return []
