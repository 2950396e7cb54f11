"""Reading a request's body: the right type, not too much of it, strict JSON.

Knows WSGI and, where the server hands it over, the client's socket; no fields and no routes.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from werkzeug.http import parse_options_header

from api.strict_json import parse
from shared.errors import BodyTooLarge, InvalidJson, UnsupportedMediaType

#: Longest wait for the next piece of a body, s.
BODY_TIMEOUT = 30.0
#: What is read and thrown away before a connection is closed, so that a client that writes first reads the answer.
LINGER_BYTES = 16 * 1024 * 1024
LINGER_SECONDS = 2.0
#: A body is read in steps of at most so many bytes, and of as few as take about STEP_SECONDS.
LEAST_STEP, MOST_STEP = 1024, 1024 * 1024
STEP_SECONDS = 0.01
#: Pause after a longer step, s. Not 0: gevent comes back from sleep(0) up to 50 times before it looks at any socket.
TURN = 0.001
#: An unread body up to this size is skipped and the connection goes on.
SKIP_BYTES = 64 * 1024

#: Set in the environ once the body was read to its end.
READ = "sluice.body_read"
#: A callable in the environ: the connection ends after this response. Put there by the server.
CLOSE = "sluice.close"


def read_json(environ: dict[str, Any], limit: int) -> dict[str, Any]:
    """The body's object. Raises UnsupportedMediaType, BodyTooLarge, InvalidJson."""
    _check_type(environ.get("CONTENT_TYPE", ""))
    return parse(read_body(environ, limit))


def read_body(environ: dict[str, Any], limit: int) -> bytes:
    """The whole body, with or without a length given. Raises BodyTooLarge beyond `limit` bytes, as early as it shows,
    and InvalidJson if less arrives than was announced."""
    return b"".join(body_pieces(environ, limit))


def body_pieces(environ: dict[str, Any], limit: int) -> Iterator[bytes]:
    """The same piece by piece, as it arrives. What is not read to its end counts as unread."""
    length = content_length(environ)
    if length is not None and length > limit:
        raise _too_large(limit)
    if length is None and "chunked" not in environ.get("HTTP_TRANSFER_ENCODING", "").lower():
        length = 0
    read = 0
    for piece in _as_it_arrives(environ, limit + 1 if length is None else length):
        read += len(piece)
        if read > limit:
            raise _too_large(limit)
        yield piece
    if length is not None and read < length:
        close_after(environ)
        raise InvalidJson("The body is shorter than its Content-Length.")
    environ[READ] = True


def _as_it_arrives(environ: dict[str, Any], size: int) -> Iterator[bytes]:
    """Up to `size` bytes. Raises InvalidJson if they come too slowly, or the connection breaks."""
    connection = environ.get("gunicorn.socket")
    pieces = _in_turns(environ["wsgi.input"], size)
    while True:
        if connection is not None:
            connection.settimeout(BODY_TIMEOUT)
        try:
            piece = next(pieces, None)
        except TimeoutError:
            close_after(environ)
            raise InvalidJson("The body did not arrive in time.") from None
        except Exception as error:  # noqa: BLE001 - a malformed chunk, or the connection broke; each server has its own exceptions
            close_after(environ)
            raise InvalidJson(f"The body cannot be read ({type(error).__name__}).") from None
        finally:
            if connection is not None:
                connection.settimeout(None)
        if piece is None:
            return
        yield piece


def _in_turns(source: Any, size: int) -> Iterator[bytes]:
    """Up to `size` bytes, less only at the end of the body. Between the steps other requests have their turn.

    gunicorn's parser needs some 10 us for each chunk, and gevent lets nobody else run while a socket has something to
    read: megabytes in chunks of one byte would stop all streams of the process for a minute."""
    step = 4 * LEAST_STEP
    while size > 0:
        began, asked = time.monotonic(), min(step, size)
        piece: bytes = source.read(asked)
        took = time.monotonic() - began
        yield piece
        size -= len(piece)
        if len(piece) < asked:
            return
        if took > STEP_SECONDS:
            time.sleep(TURN)
            step = max(LEAST_STEP, step // 2)
        else:
            step = min(MOST_STEP, 2 * step)


def content_length(environ: dict[str, Any]) -> int | None:
    """None = not given. Raises InvalidJson for what is no length."""
    text = environ.get("CONTENT_LENGTH") or ""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidJson("Content-Length is not a number.")
    return int(text)


def leftover_is_large(environ: dict[str, Any]) -> bool:
    """Whether so much of the body is unread that closing is better than skipping it."""
    if environ.get(READ):
        return False
    if "HTTP_TRANSFER_ENCODING" in environ:
        return True
    try:
        length = content_length(environ)
    except InvalidJson:
        return True
    return length is not None and length > SKIP_BYTES


def close_after(environ: dict[str, Any]) -> None:
    """Has the server close the connection after this response."""
    close = environ.get(CLOSE)
    if close is not None:
        close()


def linger(connection: Any) -> None:
    """After an early answer: half-closes, then reads and drops what the client still sends (RFC 9112 section 9.6).

    Closing at once would make the kernel reset the connection, and the answer could be lost on the way."""
    if connection is None:
        return
    deadline, dropped = time.monotonic() + LINGER_SECONDS, 0
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while dropped < LINGER_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(64 * 1024)
            if not piece:
                return
            dropped += len(piece)


def _check_type(value: str) -> None:
    kind, options = parse_options_header(value)
    if kind.lower() != "application/json" or options.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("Content-Type must be application/json in UTF-8.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the limit of {limit} bytes.")
