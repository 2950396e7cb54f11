"""From a request under way, or one that is known, to a response: the watch on the client's socket, streams, job objects.

Shared by the routes that start a request and those that come back to one. Knows Flask, no fields.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
from flask import Response, request

from api.known_jobs import KnownJob
from api.relay import sse
from api.relay.builder import Event
from api.relay.exchange import Exchange
from api.relay.job_object import job_object
from api.relay.watcher import Watch, Watcher
from api.services import Services
from api.wire import UNSENT
from shared.errors import StoreUnavailable, StreamExpired


class LettingGo:
    """Ends the watch on the client's socket and the exchange, once, whichever way the request ends."""

    def __init__(self, exchange: Exchange, watcher: Watcher | None) -> None:
        self._exchange = exchange
        self._watcher = watcher
        self._watch: Watch | None = None

    def watch(self, connection: object) -> None:
        fileno = getattr(connection, "fileno", None)
        if self._watcher is not None and fileno is not None:
            self._watch = self._watcher.watch(fileno(), self._exchange.hang_up)

    def __call__(self) -> None:
        if self._watcher is not None and self._watch is not None:
            self._watcher.forget(self._watch)
        self._exchange.close()


def streamed(parts: Services, exchange: Exchange, first: list[Event], letting_go: LettingGo) -> Response:
    """The response whose body is the stream, from the events already there."""
    settings = parts.settings
    connection: Any = request.environ.get("gunicorn.socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
    heartbeat = settings.sse_heartbeat_s if settings.sse_heartbeat == "comment" else None
    response = Response(
        sse.stream(exchange, first, heartbeat=heartbeat), content_type=sse.CONTENT_TYPE, headers=sse.HEADERS
    )
    response.call_on_close(letting_go)
    return response


def described(parts: Services, known: KnownJob, status: int = 200) -> Response:
    """The job object as a response; without its place in the queue if the store has gone meanwhile."""
    told = place = None
    if known.ended:
        try:
            told = parts.gateway.known.told(known)
        except StreamExpired:  # its end is known all the same
            told = None
    elif known.status == "queued":
        with contextlib.suppress(StoreUnavailable):
            place = parts.gateway.position(known.job.id)
    answer = job_object(known, told, place.position if place else None, parts.constraints.holds)
    return Response(msgspec.json.encode(answer), status, content_type="application/json")
