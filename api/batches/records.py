"""What the store knows of batches, and the steps by which they go on.

Each step of a runner carries its fence, the number it got with the batch: a runner that was taken for dead changes
nothing any more. Knows nothing of HTTP, files' bytes and jobs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import redis

from api.file_records import Part, new_id
from api.listing import page
from api.reaching import reaching_the_store
from shared import keys
from shared.errors import InvalidRequest, NotFound, QueueFull, StoreUnavailable
from shared.scripts import Scripts

#: Batches of one tenant that run at one time, at most, and of one runner.
PER_TENANT, PER_RUNNER = 4, 32
#: Statuses in which nothing more happens.
OVER = frozenset({"completed", "failed", "expired", "cancelled"})
#: A batch's state of its lines (`keys.batch_lines`).
OPEN, COMPLETED, FAILED, SKIPPED = b"0cfs"

_TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Usage(NamedTuple):
    """Tokens."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, more: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self, more, strict=True)))


class Fields(NamedTuple):
    """What a new batch is. `window_s`: how long it may take; `output_ttl_s`: how long its results are kept;
    `replay_of`: the batch whose lines that did not complete these are, or ""; `webhook`: who is told of its end, or
    ""."""

    tenant: str
    endpoint: str
    input: str
    window: str
    window_s: int
    metadata: dict[str, str] | None
    output_ttl_s: int
    replay_of: str = ""
    webhook: str = ""


class Batch:
    """A batch as the store has it. What somebody has damaged there reads as absent."""

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self._fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
        self.id = self._text("id")
        self.tenant = self._text("tenant")
        self.status = self._text("status")
        self.endpoint = self._text("endpoint")
        self.input = self._text("input")
        self.secret = self._text("secret")
        self.expires = self._number("expires") or 0
        self.created = self._number("created") or 0
        self.output_ttl_s = self._number("output_ttl_s") or 0
        self.checked = self._text("checked") == "1"
        self.out, self.err = self._text("out"), self._text("err")

    @property
    def over(self) -> bool:
        return self.status in OVER

    def shown(self) -> dict[str, Any]:
        """The batch object of the API. `partial_*`: where what there is of the results can be read before the end."""
        counts = {name: self._number(name) or 0 for name in ("total", "completed", "failed")}
        begun = {kind: self._text(kind) if self._text(f"{kind}_begun") else None for kind in ("out", "err")}
        usage = {
            name: self._number(name) or 0
            for name in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self._text("model") or None,
            "errors": self._errors(),
            "input_file_id": self.input,
            "completion_window": self._text("window"),
            "status": self.status,
            "output_file_id": self._text("out_file") or None,
            "error_file_id": self._text("err_file") or None,
            "created_at": self.created,
            "expires_at": self.expires,
            **{name: self._number(name) for name in _TIMES},
            "request_counts": counts,
            "usage": {
                "input_tokens": usage["input_tokens"],
                "input_tokens_details": {"cached_tokens": usage["cached_tokens"]},
                "output_tokens": usage["output_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
                "total_tokens": usage["input_tokens"] + usage["output_tokens"],
            },
            "metadata": self._json("metadata", dict[str, str]),
            "partial_output_file_id": begun["out"],
            "partial_error_file_id": begun["err"],
            "replay_of": self._text("replay_of") or None,
        }

    def _errors(self) -> dict[str, Any] | None:
        found = self._json("errors", list[LineError])
        return None if found is None else {"object": "list", "data": [msgspec.structs.asdict(error) for error in found]}

    def _json(self, name: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(self._text(name), type=kind)
        except msgspec.MsgspecError:
            return None

    def _text(self, name: str) -> str:
        return self._fields.get(name, "")

    def _number(self, name: str) -> int | None:
        text = self._text(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


class Held(NamedTuple):
    """A batch that this runner has, and the fence it writes with."""

    id: str
    fence: int


class Lost(Exception):
    """Another runner has the batch now, or it is gone."""


class BatchRecords:
    """Methods raise StoreUnavailable when the store does not answer; those of a runner that has lost the batch, Lost.
    `lease_s`: how long a runner is believed without a word from it."""

    def __init__(self, store: Any, lease_s: float) -> None:
        self.lease_s = lease_s
        self._store = store
        self._scripts = Scripts(store)

    # -- for clients

    def create(self, fields: Fields, most: int) -> Batch:
        """`most`: unfinished batches of the tenant. Raises NotFound, InvalidRequest, QueueFull or StoreUnavailable."""
        batch_id = f"batch_{secrets.token_hex(16)}"
        hashed: dict[str, str | int] = {
            "endpoint": fields.endpoint,
            "window": fields.window,
            "output_ttl_s": fields.output_ttl_s,
            "replay_of": fields.replay_of,
            "hook": fields.webhook,
            "secret": secrets.token_hex(16),
            "out": new_id(),
            "err": new_id(),
        }
        if fields.metadata is not None:
            hashed["metadata"] = msgspec.json.encode(fields.metadata).decode()
        arguments = (
            *(batch_id, fields.tenant, fields.input, fields.window_s, most, fields.replay_of),
            *(item for pair in hashed.items() for item in pair),
        )
        with reaching_the_store():
            try:
                verdict, *figure = self._scripts.call("batch_create", *arguments)
            except (redis.ConnectionError, redis.TimeoutError):  # a client that asks again would get a second batch
                verdict, *figure = self._scripts.call("batch_create", *arguments)
        if verdict == b"no file":
            raise NotFound("There is no such file.", param="input_file_id")
        if verdict == b"purpose":
            raise InvalidRequest(f"The file's purpose is {figure[0].decode()}, not batch.", param="input_file_id")
        if verdict == b"crowd":
            raise QueueFull(f"You have as many unfinished batches as you may have ({int(figure[0])}).")
        if verdict == b"memory":
            raise StoreUnavailable("The store is almost full: nothing new is accepted.")
        if verdict == b"no lines":
            raise InvalidRequest("All requests of this batch were completed, or it is too old to be replayed.")
        return self.find(batch_id, fields.tenant)

    def find(self, batch_id: str, tenant: str) -> Batch:
        """Raises NotFound, also for another tenant's ("*": any tenant's are seen)."""
        with reaching_the_store():
            [batch] = self._read([batch_id])
        if batch is None or tenant not in ("*", batch.tenant):
            raise NotFound("There is no such batch.")
        return batch

    def listed(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """(batches, newest first, whether there are more). Raises InvalidRequest for an `after` that is not there."""
        with reaching_the_store():
            return page(self._store, keys.batches_of(tenant), self._read, after=after, limit=limit)

    def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Has the batch end, unless it has all its results. Raises NotFound."""
        with reaching_the_store():
            self._scripts.call("batch_cancel", batch_id, tenant)
        return self.find(batch_id, tenant)

    def _read(self, ids: list[str]) -> list[Batch | None]:
        pipeline = self._store.pipeline(transaction=False)
        for batch_id in ids:
            pipeline.hgetall(keys.batch(batch_id))
        answers = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, redis.RedisError) and not isinstance(answer, redis.ResponseError):
                raise answer
        return [Batch(answer) if isinstance(answer, dict) and b"status" in answer else None for answer in answers]

    # -- for runners

    def take(self, wanted: int) -> list[Held]:
        """Unfinished batches that nobody has."""
        with reaching_the_store():
            answer = self._scripts.call("batch_take", int(self.lease_s * 1000), wanted, PER_TENANT)
        return [Held(batch_id.decode(), int(fence)) for batch_id, fence in zip(answer[::2], answer[1::2], strict=True)]

    def beat(self, held: Sequence[Held], *, leave: bool = False) -> tuple[float, list[str]]:
        """Renews the leases, or gives them back: (the store's time, s; each batch's status, or "lost")."""
        with reaching_the_store():
            lease_ms = 0 if leave else int(self.lease_s * 1000)
            now, *statuses = self._scripts.call("batch_beat", lease_ms, *(item for batch in held for item in batch))
        return int(now) / 1000, [status.decode() for status in statuses]

    def anything_open(self) -> bool:
        with reaching_the_store():
            return bool(self._store.exists(keys.BATCHES_OPEN))

    def begin(self, held: Held, lines: int, model: str) -> None:
        self._step("batch_begin", *held, lines, model)

    def lines(self, held: Held) -> bytearray:
        """A byte for each line."""
        with reaching_the_store():
            return bytearray(self._store.get(keys.batch_lines(held.id)) or b"")

    def commit(self, held: Held, parts: Iterable[Part], done: Mapping[int, int], usage: Usage) -> None:
        """`done`: line, from 0 -> COMPLETED or FAILED. May be repeated if its answer was lost."""
        described = [item for part in parts for item in (part.kind, msgspec.json.encode(part), part.bytes)]
        lines = [item for line, state in done.items() for item in (line, chr(state))]
        try:
            self._step("batch_commit", *held, *usage, len(described) // 3, *described, *lines)
        except Lost as lost:
            if str(lost) != "twice":
                raise
            known = self.lines(held)
            if any(known[line] != state for line, state in done.items()):
                raise

    def expire(self, held: Held) -> None:
        """Its time is over: what is not completed will not be."""
        self._step("batch_end", *held, "expiring", 0, 0, "")

    def finalize(self, held: Held) -> None:
        self._step("batch_end", *held, "finalizing", 0, 0, "")

    def end(
        self,
        held: Held,
        how: str,
        *,
        ttl_s: int,
        output_ttl_s: int,
        files: Iterable[Part] = (),
        errors: Sequence[LineError] = (),
    ) -> None:
        """`how`: completed or failed; one that has expired or is being cancelled ends so instead."""
        described = [item for file in files for item in (file.kind, file.path, file.bytes)]
        written = msgspec.json.encode(errors).decode() if errors else ""
        self._step("batch_end", *held, how, ttl_s, output_ttl_s, written, *described)

    def _step(self, script: str, *arguments: str | bytes | int) -> None:
        with reaching_the_store():
            answer = self._scripts.call(script, *arguments)
        if answer != b"ok":
            raise Lost(answer.decode())
