"""`/v1/completions/{id}` and `/v1/chat/completions/{id}`: how a request stands, its stream from any place on, and its
cancellation.

Any API process answers for any request, whoever started it.
"""

from __future__ import annotations

from collections.abc import Collection

from flask import Blueprint, Response, request

from api.answering import LettingGo, described, streamed
from api.edge import tell_job, visible_tenant
from api.headers import GRACE, read_grace
from api.known_jobs import KnownJob
from api.relay.cursor import BEGIN, Cursor
from api.relay.exchange import STATUS_WAIT, Exchange
from api.relay.hub import SHORT, ClientGone
from api.services import Services, services
from api.visit import visit
from shared.errors import (
    Cancelled,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    StreamExpired,
    WorkerShutdown,
)

_SWITCH = {"true": True, "1": True, "false": False, "0": False}


def _routes(name: str, kind: str, path: str) -> Blueprint:
    """The routes of one kind of request. A blueprint of its own, for that is what a key's scope goes by."""
    made = Blueprint(name, __name__)

    @made.get(f"{path}/<job_id>")
    def show(job_id: str) -> Response:
        """The request with its status, or with `stream=true` its events behind the cursor."""
        parts = services()
        stream = _SWITCH.get(request.args.get("stream", "false"))
        if stream is None:
            raise InvalidRequest("stream must be true or false.", param="stream")
        if stream:
            return _stream(parts, job_id, kind)
        known = _find(parts, job_id, visible_tenant(), (kind,))
        tell_job(known.job.id)
        return described(parts, known)

    @made.post(f"{path}/<job_id>/cancel")
    def cancel(job_id: str) -> Response:
        """Ends the request if it has not ended; the request as it is then."""
        parts = services()
        known = cancelled(parts, job_id, visible_tenant(), (kind,))
        tell_job(known.job.id)
        return described(parts, known)

    return made


blueprint = _routes("jobs", "completion", "/v1/completions")
chat_blueprint = _routes("chat_jobs", "chat", "/v1/chat/completions")


def cancelled(parts: Services, job_id: str, tenant: str, kinds: Collection[str]) -> KnownJob:
    """The request, if it is of these kinds, as it is once it was told to end. Raises NotFound."""
    known = _find(parts, job_id, tenant, kinds)
    if not known.ended:
        parts.gateway.known.cancel(known.job.id)
        known = _find(parts, job_id, tenant, kinds)
    return known


def attached(
    parts: Services, job_id: str, tenant: str, kinds: Collection[str], cursor: Cursor, grace_s: int | None
) -> tuple[Exchange, float]:
    """Follows an earlier request behind the cursor: the exchange, to be closed in any case, and how long its first events
    may take, s.

    Raises NotFound, InvalidRequest, StreamExpired, WorkerShutdown."""
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping. Resume on another one.")
    known = _find(parts, job_id, tenant, kinds)
    tell_job(known.job.id)
    if known.job.candidates > known.job.n:
        raise InvalidRequest("A request with best_of above n cannot be streamed.", param="stream")
    known = _find(parts, job_id, tenant, kinds, follow=True)
    if known.ended and not known.logged:
        raise StreamExpired("This stream ended too long ago to be replayed. Its result may be there, without stream.")
    exchange = Exchange.resume(
        known,
        hub=parts.hub,
        gateway=parts.gateway,
        lifecycle=parts.lifecycle,
        graces=parts.graces,
        holds=parts.constraints.holds,
        cursor=cursor,
        grace_s=grace_s,
        relaying=visit().relaying,
    )
    return exchange, SHORT if known.ended else STATUS_WAIT


def _find(parts: Services, job_id: str, tenant: str, kinds: Collection[str], *, follow: bool = False) -> KnownJob:
    """Raises NotFound, also for what is of another kind."""
    known = parts.gateway.known.find(job_id, tenant, follow=follow)
    if known.job.kind not in kinds:
        raise NotFound("There is no such request.")
    return known


def _stream(parts: Services, job_id: str, kind: str) -> Response:
    """Nothing behind the cursor: 204, which tells an EventSource not to come again (WHATWG HTML, section 9.2.3)."""
    if request.method == "HEAD":
        raise MethodNotAllowed("A stream has no HEAD.", ["GET", "OPTIONS"])
    cursor = _cursor()
    grace_s = read_grace(request.headers.get(GRACE))
    exchange, wait = attached(parts, job_id, visible_tenant(), (kind,), cursor, grace_s)
    letting_go = LettingGo(exchange, parts.watcher)
    try:
        letting_go.watch(request.environ.get("gunicorn.socket"))
        first = exchange.first_events(wait)
    except ClientGone:
        letting_go()
        raise Cancelled("The client hung up.") from None
    except BaseException:
        letting_go()
        raise
    if exchange.builder.ended and not first:
        letting_go()
        return _nothing()
    return streamed(parts, exchange, first, letting_go)


def _cursor() -> Cursor:
    """Last-Event-ID counts before starting_after: an EventSource that comes again sends the former, and its address as
    it was. Raises InvalidRequest."""
    seen = request.headers.get("Last-Event-ID", "")
    if seen:
        return Cursor.parse(seen, "Last-Event-ID")
    after = request.args.get("starting_after", "")
    return Cursor.parse(after, "starting_after", bare=True) if after else BEGIN


def _nothing() -> Response:
    response = Response(status=204)
    del response.headers["Content-Type"]
    return response
