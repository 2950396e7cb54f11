"""The one writer of server-sent events (WHATWG HTML, section 9.2).

Whatever happens once the headers are out, the client gets its end here: the finish the builder made, or one error,
then `[DONE]`. Knows nothing of frames and of what an event says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from math import inf

import structlog

from api.relay.builder import Event, error_data
from api.relay.exchange import LONGEST_WAIT, Exchange
from api.relay.hub import ClientGone
from shared.errors import Cancelled, InternalError, SluiceError

log = structlog.get_logger(__name__)

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
#: Seconds between two looks at the place in the queue; while no worker is there, which is when something changes and the
#: store has little to do.
QUEUE_LOOK, START_LOOK = 2.0, 0.5


def stream(
    exchange: Exchange,
    first: list[Event],
    *,
    heartbeat: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """The body of a stream, from the events already there to `[DONE]`.

    `heartbeat`: longest silence in seconds, None = no comments at all. Closes the exchange at its end; never raises.
    """
    exchange.builder.only_streams()
    try:
        yield from _events(exchange, first, heartbeat, clock)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets its end
        yield b"data: %b\n\n" % error_data(for_client(exchange, error).to_object())
    finally:
        exchange.close()
    yield DONE


def _events(
    exchange: Exchange, first: list[Event], heartbeat: float | None, clock: Callable[[], float]
) -> Iterator[bytes]:
    silence = inf if heartbeat is None else heartbeat
    place, pause = (b"", inf) if heartbeat is None else _place(exchange)
    yield encode(first) or place  # also when empty: the first write is what sends the headers
    sent = looked = clock()
    while not exchange.builder.ended:
        due = min(sent + silence, looked + pause)
        out = encode(exchange.next_events(max(0.0, min(due - clock(), LONGEST_WAIT))) or ())
        now = clock()
        if not out and now >= looked + pause:
            looked, before = now, place
            place, pause = _place(exchange)
            out = place if place != before else b""
        if not out and now >= sent + silence:
            out = place or KEEP_ALIVE
        if out:
            yield out
            sent = clock()


def encode(events: Iterable[Event]) -> bytes:
    return b"".join([b"id: %b\ndata: %b\n\n" % (event.id.encode(), event.data) for event in events])


def _place(exchange: Exchange) -> tuple[bytes, float]:
    """A comment on what the request waits for, and after how many seconds to look again; nothing and never if it does not
    wait in a queue.

    One line with no blank line after it: some clients dispatch an empty event at a blank line."""
    place = exchange.position()
    if place is None:
        return b"", inf
    pause = QUEUE_LOOK if place.served else START_LOOK
    if place.loading is not None:
        return b": loading %d %%\n" % place.loading, pause
    eta = b"" if place.eta_s is None else b" eta=%ds" % round(place.eta_s)
    return b": queued position=%d%b\n" % (place.position, eta), pause


def for_client(exchange: Exchange, error: Exception) -> SluiceError:
    """What a client is told of whatever ended its stream."""
    if isinstance(error, ClientGone):
        return Cancelled("The client hung up.")
    if isinstance(error, SluiceError):
        return error
    log.exception("stream_failed", job=exchange.job.id)
    return InternalError()
