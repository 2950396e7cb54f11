"""`GET /monitor`, the page; `GET /monitor/state` and `GET /monitor/events`, what it shows: once, and each second.

A state names the running requests that the caller may see. The last requests with their texts (`api/recent.py`) are for
those who see everybody's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from flask import Blueprint, Response, request, stream_with_context

from api import pages
from api.auth import caller
from api.edge import visible_tenant
from api.relay import sse
from api.relay.builder import Event, error_data
from api.services import Services, services
from shared.errors import MethodNotAllowed, SluiceError, StoreUnavailable, WorkerShutdown

blueprint = Blueprint("monitor", __name__)

#: Seconds between two events.
PAUSE = 1.0


@blueprint.get("/monitor")
def page() -> Response:
    return pages.page("monitor.html", page="monitor")


@blueprint.get("/monitor/state")
def state() -> Response:
    return Response(msgspec.json.encode(_state(services())[0]), content_type="application/json")


@blueprint.get("/monitor/events")
def events() -> Response:
    """Each event is a state; its `recent` has only what no earlier event had."""
    if request.method == "HEAD":
        raise MethodNotAllowed("A stream has no HEAD.", ["GET", "OPTIONS"])
    parts = services()
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping.")
    first = _state(parts)  # what goes wrong now is an error with a status
    response = Response(stream_with_context(_events(parts, *first)), content_type=sse.CONTENT_TYPE, headers=sse.HEADERS)
    return response


def _events(parts: Services, known: dict[str, Any], place: str) -> Iterator[bytes]:
    """Until the client leaves, its key is revoked, or the process stops: then the client comes again."""
    over = threading.Event()
    parts.lifecycle.at_drain(over.set)
    try:
        number = 1
        while True:
            yield sse.encode([Event(str(number), msgspec.json.encode(known))])
            if over.wait(PAUSE) or parts.lifecycle.draining:
                return
            try:
                parts.gate.enter(late=True)
                known, place = _state(parts, place)
                number += 1
            except StoreUnavailable as error:  # it may come back
                known = {"error": error.to_object()}
            except SluiceError as error:
                yield b"data: %b\n\n" % error_data(error.to_object())
                return
    finally:
        parts.lifecycle.not_at_drain(over.set)


def _state(parts: Services, after: str = "") -> tuple[dict[str, Any], str]:
    """A state as the caller may see it, with the last requests behind a place in the ring, and the place to go on from."""
    open_to_all = caller().key is None
    known = parts.monitor.state("*" if open_to_all else visible_tenant())
    known["recent"] = None
    if parts.recent.on and (open_to_all or caller().sees_all):
        found = parts.recent.read(after)
        known["recent"] = [item.record for item in found]
        after = found[-1].place if found else after
    return known, after
