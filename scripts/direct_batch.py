"""The lines of a local file as requests of this machine's own: nothing is uploaded, and no batch is made on the server.

The results have the form of a batch's. They are written as they come; who starts the same command again goes on where
it was: what is in the output is not sent again. Knows HTTP by `scripts/client.py` alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from api.batches import rows
from api.batches.endpoints import ENDPOINTS
from api.batches.input_file import Line, check, read_line
from api.batches.rows import Row
from scripts.client import Client, ServerError, ServerUnreachable
from shared.settings import Settings

#: What may pass by itself, and how often a request is sent again, with a pause that doubles, s.
PASSING = (429, 503)
TRIES, FIRST_PAUSE, LAST_PAUSE = 8, 0.5, 30.0


class DirectBatch:
    """`total` requests, `known` of which are in the output already."""

    def __init__(self, client: Client, file: Path, url: str, out: Path, err: Path, parallel: int) -> None:
        self._client, self._file, self._url, self._out, self._err = client, file, url, out, err
        self._parallel = parallel
        settings = Settings()
        with file.open("rb") as source:
            checked = check(
                source,
                url,
                beginning=ENDPOINTS[url].beginning if url in ENDPOINTS else json.dumps,
                max_lines=10**9,
                max_length=settings.max_body_bytes,
            )
        #: What is wrong with the file; there is nothing to run then.
        self.faults = checked.errors
        self._plan = checked.plan
        self._there = _custom_ids(out)
        self.total, self.known, self.failed = len(checked.plan), len(self._there), 0
        self._done = self.known

    def run(self, tell: Callable[[int, int], object]) -> None:
        """Sends what is not in the output yet. `tell` gets (done, failed). Raises ServerUnreachable if the server stays
        away."""
        with (
            self._file.open("rb") as source,
            self._out.open("ab") as out,
            self._err.open("wb") as err,
            ThreadPoolExecutor(self._parallel) as threads,
        ):
            lines = self._lines(source)
            running: set[Future[Row]] = set()
            try:
                while True:
                    while len(running) < self._parallel and (line := next(lines, None)) is not None:
                        running.add(threads.submit(self._send, line))
                    if not running:
                        return
                    ended, running = wait(running, return_when=FIRST_COMPLETED)
                    for row in (future.result() for future in ended):
                        (out if row.completed else err).write(row.raw)
                        self._done += 1
                        self.failed += not row.completed
                    out.flush()
                    err.flush()
                    tell(self._done, self.failed)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def summary(self) -> dict[str, Any]:
        """As a batch object says it."""
        counts = {"total": self.total, "completed": self._done - self.failed, "failed": self.failed}
        return {"status": "completed", "endpoint": self._url, "request_counts": counts}

    def _lines(self, source: BinaryIO) -> Iterator[Line]:
        for _, offset, length in self._plan:
            source.seek(offset)
            line = read_line(source.read(length), self._url)
            if line.custom_id not in self._there:
                yield line

    def _send(self, line: Line) -> Row:
        body = {"service_tier": "flex", **line.body}
        pause = FIRST_PAUSE
        for tries in range(1, TRIES + 1):
            try:
                answer = self._client.post(self._url, body)
                return rows.answered(
                    f"batch_req_{answer['id'].rpartition('-')[2]}", line.custom_id, answer["id"], answer
                )
            except ServerError as error:
                if error.status not in PASSING or tries == TRIES:
                    described = {"message": error.message, "type": None, "param": None, "code": error.code}
                    return rows.refused("", line.custom_id, "", error.status, described)
            except ServerUnreachable:
                if tries == TRIES:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
        raise AssertionError("not reached")


def _custom_ids(out: Path) -> set[str]:
    """Of the requests in an output file; a last line that was cut off is cut away."""
    if not out.exists():
        return set()
    found: set[str] = set()
    with out.open("r+b") as file:
        whole = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            found.add(json.loads(raw)["custom_id"])
            whole += len(raw)
        file.truncate(whole)
    return found
