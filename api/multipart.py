"""A multipart/form-data body (RFC 7578) with one file in it, read as it arrives: the file is never in memory as a
whole.

Knows bytes and field names, nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from shared.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

#: Parts of a body, and bytes of one that is no file, or of a part's head.
MAX_PARTS, MAX_FIELD = 32, 16_384


def boundary(content_type: str) -> bytes:
    """What divides the parts. Raises UnsupportedMediaType for another kind of body."""
    kind, options = parse_options_header(content_type)
    if kind.lower() != "multipart/form-data" or not 0 < len(options.get("boundary", "")) <= 70:
        raise UnsupportedMediaType("Content-Type must be multipart/form-data with a boundary.")
    return options["boundary"].encode("latin-1", "replace")


def read_form(
    pieces: Iterable[bytes], dividing: bytes, name: str, write: Callable[[bytes], object]
) -> tuple[dict[str, str], str | None]:
    """(fields, the file's name as sent, None if no file came). The file in the field `name` goes to `write`, piece by
    piece.

    Raises InvalidRequest, and what `pieces` and `write` raise."""
    decoder = MultipartDecoder(dividing, max_parts=MAX_PARTS)
    fields: dict[str, str] = {}
    form = _Form(name, write, fields)
    try:
        for piece in _with_whole_borders(pieces, dividing):
            decoder.receive_data(piece)
            form.take(decoder)
            if len(decoder.buffer) > MAX_FIELD + len(piece):  # a part's head that never ends
                raise BodyTooLarge("The form has a part with too large a head.")
        decoder.receive_data(None)
        form.take(decoder)
    except RequestEntityTooLarge:
        raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.") from None
    except (ValueError, UnicodeDecodeError, AttributeError):  # werkzeug's words are not for clients
        raise InvalidRequest("The body is no valid multipart/form-data.", code="invalid_form") from None
    return fields, form.filename


def _with_whole_borders(pieces: Iterable[bytes], dividing: bytes) -> Iterator[bytes]:
    """The same bytes, cut so that no piece ends within a boundary, or behind it but before the end of its line.

    There the decoder takes the carriage return before the boundary for data (werkzeug 3.1.9,
    `_last_partial_boundary_index`)."""
    border, held = b"\r\n--" + dividing, b""
    for piece in pieces:
        held += piece
        at = _open_border(held, border)
        ready, held = held[:at], held[at:]
        if len(held) > MAX_FIELD:
            raise InvalidRequest("The form has a boundary whose line does not end.")
        if ready:
            yield ready
    if held:
        yield held


def _open_border(data: bytes, border: bytes) -> int:
    """Where the boundary begins whose line is not whole at the end of `data`; its length if there is none."""
    at = data.rfind(border)
    if at >= 0 and b"\n" not in data[at + 2 : at + MAX_FIELD]:
        return at
    at = data.rfind(b"\r", max(0, len(data) - len(border) + 1))
    return at if at >= 0 and border.startswith(data[at:]) else len(data)


class _Form:
    """What is being read at the moment."""

    def __init__(self, name: str, write: Callable[[bytes], object], fields: dict[str, str]) -> None:
        self.filename: str | None = None
        self._name, self._write, self._fields = name, write, fields
        self._part: Any = None
        self._value = b""

    def take(self, decoder: MultipartDecoder) -> None:
        while not isinstance(event := decoder.next_event(), NeedData):
            if isinstance(event, Epilogue):
                return
            if isinstance(event, Field | File):
                self._begin(event)
            elif isinstance(event, Data):
                self._data(event)

    def _begin(self, part: Field | File) -> None:
        if part.name is None:
            raise ValueError("a part without a name")
        self._part, self._value = part, b""
        if isinstance(part, File):
            if part.name != self._name:
                raise InvalidRequest(f"There is no file field {part.name[:64]!a}.", param=part.name[:64])
            if self.filename is not None:
                raise InvalidRequest("One file at a time.", param=self._name)
            self.filename = part.filename

    def _data(self, event: Data) -> None:
        if isinstance(self._part, File):
            if event.data:
                self._write(event.data)
            return
        self._value += event.data
        name = self._part.name
        if len(self._value) > MAX_FIELD:
            raise InvalidRequest(f"The field {name[:64]!a} is too long.", param=name[:64])
        if not event.more_data:
            if name in self._fields:
                raise InvalidRequest(f"The field {name[:64]!a} occurs twice.", param=name[:64])
            try:
                self._fields[name] = self._value.decode()
            except UnicodeDecodeError:
                raise InvalidRequest(f"The field {name[:64]!a} is not UTF-8.", param=name[:64]) from None
