"""A batch's results on their way into its files: rows are collected, written in pieces, and counted once each.

Only what is counted (`batch_commit.lua`) is done; a piece that was written and not counted is of no batch, and goes
with the batch's folder. Knows rows and files, nothing of what runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import structlog

from api.batches.records import COMPLETED, FAILED, Batch, BatchRecords, Held, Usage
from api.batches.rows import Row
from api.file_records import FileRecords, Part
from api.file_store import FileStore
from api.known_jobs import KnownJobs

log = structlog.get_logger(__name__)

#: Rows are written when so many, or so many bytes, are there, or after a hundredth of the time that the batch has been
#: run, within these bounds, s: a batch that takes a day need not have a piece for each second of it.
MOST_ROWS, MOST_BYTES = 1000, 4_000_000
SOONEST, LATEST = 1.0, 15.0

#: How long whoever ended a request may take to write its result, s; a worker that died right then never does.
BOOKED = 5.0

KINDS = ("out", "err")


class Results:
    """Of the batch that is `held`. Methods raise StoreUnavailable, and Lost."""

    def __init__(
        self, held: Held, records: BatchRecords, file_records: FileRecords, files: FileStore, known: KnownJobs
    ) -> None:
        self._held, self._records, self._file_records = held, records, file_records
        self._files, self._known = files, known
        self._began = self._written = time.monotonic()
        #: Requests whose rows count and that are not forgotten yet.
        self._counted: list[str] = []
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
        self._done: dict[int, int] = {}
        self._jobs: list[str] = []
        self._usage = Usage()
        self._bytes = 0

    @property
    def crowded(self) -> bool:
        """So much could not be written yet that no more should come."""
        return self._bytes >= 2 * MOST_BYTES

    def add(self, line: int, row: Row, job_ids: Sequence[str] = ()) -> None:
        """`job_ids`: of the requests that it is the result of; they are forgotten once the row counts."""
        self._rows["out" if row.completed else "err"].append(row.raw)
        self._done[line] = COMPLETED if row.completed else FAILED
        self._usage = self._usage.plus(row.usage)
        self._bytes += len(row.raw)
        self._jobs += job_ids

    def write(self, *, at_once: bool = False) -> None:
        """Writes what there is, if it is time to, or `at_once`."""
        now = time.monotonic()
        due = now - self._written >= min(max(SOONEST, (now - self._began) / 100), LATEST)
        if not self._done or not (at_once or due or len(self._done) >= MOST_ROWS or self._bytes >= MOST_BYTES):
            return
        parts = []
        for kind in KINDS:
            if self._rows[kind]:
                raw = b"".join(self._rows[kind])
                path = f"{folder(self._held.id)}/{secrets.token_hex(8)}-{kind}.jsonl"
                self._files.put(path, raw)
                parts.append(Part(kind, path, len(raw)))
        self._records.commit(self._held, parts, self._done, self._usage)
        self._counted += self._jobs
        self._clear()
        self._written = time.monotonic()
        self._counted = self._known.forget(self._counted)

    def forget_later(self, job_ids: Sequence[str]) -> None:
        """Requests of rows that count already."""
        self._counted += job_ids

    def forget(self) -> None:
        """Forgets the last requests, once their results have been written by whoever ended them, or after a while."""
        until = time.monotonic() + BOOKED
        while self._counted:
            self._counted = self._known.forget(self._counted, all_of_them=time.monotonic() > until)
            time.sleep(0.02)

    def join(self, batch: Batch) -> list[Part]:
        """The pieces as one file of each kind. A runner that dies here leaves files that are nobody's."""
        pieces = self._file_records.parts(batch.id)
        joined = []
        for kind, file_id in zip(KINDS, (batch.out, batch.err), strict=True):
            mine = [piece for piece in pieces if piece.kind == kind]
            if not mine:
                continue
            path = f"files/{file_id}-{self._held.fence}"
            with self._files.create(path) as new:
                for piece in mine:
                    try:
                        for block in self._files.read(piece.path, 0, piece.bytes):
                            new.write(block)
                    except FileNotFoundError:
                        log.error("piece_lost", batch=batch.id, piece=piece.path)
            joined.append(Part(kind, path, new.size))
        return joined


def folder(batch_id: str) -> str:
    """Where all is that a batch needs only while it runs."""
    return f"batches/{batch_id}"
