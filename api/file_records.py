"""What is known of files: whose they are, what for, for how long. Their bytes are in the file store.

A running batch's output and error file are there before they are whole: pieces, that are joined at its end. Knows
nothing of HTTP and of what is in a file.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import redis

from api.file_store import FileStore
from api.listing import page
from api.reaching import reaching_the_store
from shared import keys
from shared.errors import FileInUse, NotFound
from shared.scripts import Scripts

Purpose = Literal["batch", "batch_output"]


class File(msgspec.Struct, frozen=True):
    """`path`: its name in the file store; "" while its batch runs. `batch` and `kind` ("out", "err"): whose result it
    is. `created`, `expires`: s since 1970 by the store's clock; `expires` None: not known yet, or never."""

    id: str
    tenant: str
    bytes: int
    created: int
    filename: str
    purpose: str
    status: str
    path: str = ""
    batch: str = ""
    kind: str = ""
    expires: int | None = None

    def shown(self) -> dict[str, Any]:
        """The file object of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "status_details": None,
        }


class Part(msgspec.Struct, frozen=True):
    """A piece of a running batch's output (`kind` "out") or error file ("err")."""

    kind: str
    path: str
    bytes: int


def new_id() -> str:
    return f"file-{secrets.token_hex(16)}"


class FileRecords:
    """Methods raise StoreUnavailable when the store or the file store does not answer, NotFound for files that are not
    there or are another tenant's ("*": any tenant's are seen)."""

    def __init__(self, store: Any, files: FileStore) -> None:
        self._store = store
        self._scripts = Scripts(store)
        self._files = files

    def add(self, file_id: str, tenant: str, *, size: int, filename: str, path: str, ttl_s: int) -> File:
        """An uploaded file, whose bytes are there; it goes after `ttl_s`."""
        with reaching_the_store():
            seconds, microseconds = self._store.time()
            file = File(file_id, tenant, size, seconds, filename, "batch", "processed", path, expires=seconds + ttl_s)
            created = seconds * 1_000_000 + microseconds
            pipeline = self._store.pipeline(transaction=True)
            pipeline.hset(keys.file(file_id), mapping=_fields(file))
            pipeline.zadd(keys.FILES, {file_id: created})
            pipeline.zadd(keys.files_of(tenant), {file_id: created})
            pipeline.zadd(keys.FILES_EXPIRE, {file_id: seconds + ttl_s})
            pipeline.execute()
        return file

    def find(self, file_id: str, tenant: str) -> File:
        with reaching_the_store():
            [file] = self._read([file_id])
        if file is None or tenant not in ("*", file.tenant):
            raise NotFound("There is no such file.")
        return file

    def listed(
        self, tenant: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None
    ) -> tuple[list[File], bool]:
        """(files, whether there are more). Raises InvalidRequest for an `after` that is not there."""
        with reaching_the_store():
            return page(
                self._store,
                keys.files_of(tenant),
                self._read,
                after=after,
                limit=limit,
                ascending=ascending,
                wanted=lambda file: purpose in (None, file.purpose),
            )

    def delete(self, file_id: str, tenant: str) -> None:
        """Raises FileInUse for a file that an unfinished batch needs."""
        with reaching_the_store():
            verdict, *path = self._scripts.call("file_delete", file_id, tenant)
        if verdict == b"missing":
            raise NotFound("There is no such file.")
        if verdict == b"used":
            raise FileInUse("An unfinished batch needs this file. Cancel the batch first.")
        if path[0]:
            self._files.remove([path[0].decode()])

    def delete_expired(self) -> int:
        """Deletes the files whose time is over and that nobody uses; how many."""
        with reaching_the_store():
            ids = self._store.zrange(keys.FILES_EXPIRE, "-inf", self._store.time()[0], byscore=True, offset=0, num=1000)
        count = 0
        for file_id in ids:
            try:
                self.delete(file_id.decode(errors="replace"), "*")
                count += 1
            except (NotFound, FileInUse):
                continue
        return count

    def content(self, file: File, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The file's bytes from `start` to before `end` (its length now), in blocks.

        A result that is put together meanwhile goes on where it was. Raises NotFound if it is deleted meanwhile."""
        at, end = start, file.bytes if end is None else min(end, file.bytes)
        for _ in range(3):
            try:
                for block in self._blocks(file, at, end):
                    yield block
                    at += len(block)
                return
            except FileNotFoundError:
                file = self.find(file.id, "*")
        raise NotFound("This file is gone.")

    def _blocks(self, file: File, start: int, end: int) -> Iterator[bytes]:
        if file.path:
            yield from self._files.read(file.path, start, end)
            return
        offset = 0
        for part in self.parts(file.batch):
            if part.kind != file.kind:
                continue
            if offset + part.bytes > start and offset < end:
                yield from self._files.read(part.path, max(start - offset, 0), min(end - offset, part.bytes))
            offset += part.bytes
        if offset < end:  # its batch has ended between the two looks
            raise FileNotFoundError(file.id)

    def parts(self, batch_id: str) -> list[Part]:
        """The pieces of a running batch's results, oldest first; damaged ones are left out."""
        with reaching_the_store():
            raw = self._store.lrange(keys.batch_parts(batch_id), 0, -1)
        found = []
        for item in raw:
            try:
                found.append(msgspec.json.decode(item, type=Part))
            except msgspec.MsgspecError:
                continue
        return found

    def exists(self, file_id: str) -> bool:
        with reaching_the_store():
            return bool(self._store.exists(keys.file(file_id)))

    def _read(self, ids: list[str]) -> list[File | None]:
        pipeline = self._store.pipeline(transaction=False)
        for file_id in ids:
            pipeline.hgetall(keys.file(file_id))
        answers = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, redis.RedisError) and not isinstance(answer, redis.ResponseError):
                raise answer
        return [None if isinstance(answer, Exception) else _file(answer) for answer in answers]


def _fields(file: File) -> dict[Any, Any]:
    return {name: value for name, value in msgspec.structs.asdict(file).items() if value is not None}


def _file(fields: dict[bytes, bytes]) -> File | None:
    """None for what is no file of ours."""
    try:
        texts = {name.decode(): value.decode() for name, value in fields.items()}
        return msgspec.convert(texts, File, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
