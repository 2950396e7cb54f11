"""A file of requests, JSON Lines: checked as a whole before anything runs, then read line by line in the order it is
run.

What is wrong with a line as a line is found here and fails the batch, with the line's number; what is wrong with the
request in it is found when it runs, and fails that line alone. Knows nothing of the store and of jobs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, Self

from api.batches.order import Prefixes
from api.batches.records import LineError
from api.strict_json import parse
from shared.errors import InvalidJson

#: Longest custom_id, characters, as with OpenAI.
MAX_CUSTOM_ID = 512
#: Faults that are reported, at most; after so many the rest is not read.
MAX_ERRORS = 100

_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A request of a batch. `model` None: the file does not say."""

    custom_id: str
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None


class LineFault(Exception):
    """A line is no request; the message says why."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def read_line(raw: bytes, url: str) -> Line:
    """The request in a line, for the endpoint `url`. Raises LineFault."""
    try:
        found = parse(raw, "line")
    except InvalidJson as error:
        raise LineFault("invalid_json_line", error.message, error.param) from None
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise LineFault(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters.", "custom_id"
        )
    if found.get("method") != "POST":
        raise LineFault("invalid_method", 'method must be "POST".', "method")
    if found.get("url") != url:
        raise LineFault("url_mismatch", f"url must be the batch's endpoint, {url}.", "url")
    if not isinstance(found.get("body"), dict):
        raise LineFault("invalid_body", "body must be a JSON object.", "body")
    return Line(custom_id, found["body"])


class Plan:
    """Where the lines are and in which order they run: number of the line from 0, offset and length in bytes, 24 bytes
    a line."""

    def __init__(self, entries: array[int]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries) // 3

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for at in range(0, len(self._entries), 3):
            number, offset, length = self._entries[at : at + 3]
            yield number, offset, length

    def encode(self) -> bytes:
        return self._entries.tobytes()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises ValueError for what is none."""
        entries = array("Q")
        entries.frombytes(raw)
        if len(entries) % 3:
            raise ValueError("not a plan")
        return cls(entries)


class Checked(NamedTuple):
    """A file that was read to its end. `plan` is of no use if there are `errors`."""

    plan: Plan
    model: str | None
    errors: list[LineError]


def check(
    source: BinaryIO,
    url: str,
    *,
    beginning: Callable[[dict[str, Any]], str],
    max_lines: int,
    max_length: int,
    going_on: Callable[[], None] = lambda: None,
) -> Checked:
    """Reads the whole file. `beginning`: the text by which a request's neighbours are chosen; `max_length`: of a line,
    bytes; `going_on` is called now and then and may raise."""
    reading = _Reading(url, beginning)
    for number, offset, raw in _lines(source, max_length):
        if number % 256 == 0:
            going_on()
        if len(raw) > max_length:
            reading.fault(number, LineFault("line_too_large", f"The line is larger than {max_length} bytes."))
        elif len(reading.where) // 2 == max_lines:
            reading.fault(number, LineFault("too_many_lines", f"A batch has at most {max_lines} requests."))
            break
        else:
            reading.take(number, offset, raw)
        if len(reading.errors) >= MAX_ERRORS:
            break
    if not reading.errors and not reading.where:
        reading.errors.append(LineError("empty_file", "The file has no requests."))
    entries = array("Q")
    for index in reading.prefixes.order():
        entries.extend((index, *reading.where[2 * index : 2 * index + 2]))
    return Checked(Plan(entries), reading.model, reading.errors)


class _Reading:
    """What is known so far. Of custom_ids digests are kept: a file may have 50,000 long ones."""

    def __init__(self, url: str, beginning: Callable[[dict[str, Any]], str]) -> None:
        self.errors: list[LineError] = []
        self.where = array("Q")  # offset, length
        self.prefixes = Prefixes()
        self.model: str | None = None
        self._url, self._beginning = url, beginning
        self._seen: set[bytes] = set()

    def take(self, number: int, offset: int, raw: bytes) -> None:
        try:
            line = read_line(raw, self._url)
            self._compare(line)
        except LineFault as fault:
            self.fault(number, fault)
            return
        self.where.extend((offset, len(raw)))
        self.prefixes.add(self._beginning(line.body))

    def _compare(self, line: Line) -> None:
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=12).digest()
        if digest in self._seen:
            raise LineFault("duplicate_custom_id", "An earlier line has the same custom_id.", "custom_id")
        self._seen.add(digest)
        if len(self._seen) == 1:
            self.model = line.model
        elif line.model != self.model:
            raise LineFault("model_mismatch", "All requests of a batch must name the same model.", "body.model")

    def fault(self, number: int, fault: LineFault) -> None:
        self.errors.append(LineError(fault.code, fault.message, number, fault.param))


def _lines(source: BinaryIO, max_length: int) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, text) of every line that is not blank, cut only at line feeds; without what marks its end
    and the file's beginning. Of one that is too long, only the beginning."""
    number, offset = 0, source.seek(0)
    while raw := source.readline(max_length + 3):
        number += 1
        length = len(raw)
        while not raw.endswith(b"\n") and (more := source.readline(1024 * 1024)):
            length += len(more)
            if more.endswith(b"\n"):
                break
        begin = len(_BOM) if number == 1 and raw.startswith(_BOM) else 0
        text = raw[begin:].rstrip(b"\r\n")
        if text.strip():
            yield number, offset + begin, text
        offset += length
