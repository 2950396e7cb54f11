"""From a request object to its answer, the same for every kind of request: checks, limits, submission, relay.

The order is fixed: checks (`kinds.py`), limits, subscription, submission. Whatever happens after the
subscription, the exchange is closed, which cancels a job nobody waits for any more. A request whose Idempotency-Key is
known is not submitted: its client follows the earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from flask import Response, request
from werkzeug.datastructures import Headers

from api.admission import read_deadline
from api.answering import LettingGo, described, streamed
from api.auth import caller
from api.body import read_json
from api.edge import admit, announce, asks_for, tell_ignored, tell_job, tenant
from api.headers import GRACE, KEY, read_grace, read_key
from api.kinds import Kind, check
from api.known_jobs import KnownJob
from api.limits import Admission, Limits
from api.relay.builder import Builder
from api.relay.exchange import Exchange
from api.relay.hub import ClientGone
from api.relay.observer import Observer
from api.relay.view import View
from api.schemas.generation import Call
from api.services import Services, services
from api.visit import visit
from shared.cards import ModelCard
from shared.errors import Cancelled, StoreUnavailable, WorkerShutdown
from shared.jobs import Job, Placement


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was read, checked and let in; not queued yet. `fitted`: it is known to fit the context;
    `began`: when it had arrived, monotonic, s."""

    call: Call
    card: ModelCard
    view: View
    placement: Placement
    admission: Admission
    fitted: bool
    began: float

    def exchange(self, parts: Services) -> Exchange:
        """The exchange that will submit it, to be closed in any case. What it makes is counted from now on."""
        job = self.call.job
        follower = parts.recent.follower(job, self.placement, self.began)
        exchange = Exchange(
            job,
            self.view.builder(job),
            hub=parts.hub,
            gateway=parts.gateway,
            lifecycle=parts.lifecycle,
            graces=parts.graces,
            holds=parts.constraints.holds,
            placement=self.placement,
            observer=Observer(parts.counts, job, self.began, follower=follower),
            relaying=visit().relaying,
        )
        builder = exchange.builder
        self.admission.used = lambda: builder.tokens_used
        return exchange


def prepare(
    parts: Services,
    kind: Kind[Any],
    body: dict[str, Any],
    headers: Headers,
    *,
    let_in: Callable[[Limits, Job], Admission],
) -> Prepared:
    """What a request object asks for, whichever way it came. `let_in` applies the limits of who asks.

    Raises the SluiceError that says why not."""
    began = time.monotonic()
    ignored = kind.fields.unknown(body)
    tell_ignored(ignored, strict=parts.settings.strict_fields)
    call, card, view, rooms, idle = check(parts, kind, body)
    asks_for(card.id)
    call = call.with_job(_traced(call.job))
    if idle is not None:
        tell_ignored([*ignored, idle])
    if rooms is not None and call.fit_from is not None and min(rooms) < call.fit_from:
        announce("x-sluice-max-tokens", str(min(rooms)))
    grace_s = read_grace(headers.get(GRACE)) or 0
    waits = not (call.stream or call.placement.background or grace_s)
    deadline_s = read_deadline(headers, waits=waits)
    admission = let_in(parts.limits, call.job)
    placement = msgspec.structs.replace(
        caller().place(call.placement),
        view=view.encode(),
        grace_s=grace_s,
        deadline_s=deadline_s,
        idempotency=read_key(headers.get(KEY), body, call.job.kind),
    )
    return Prepared(call, card, view, placement, admission, fitted=rooms is not None, began=began)


def _traced(job: Job) -> Job:
    """The job with what tells whose it is: to the logs and traces of whoever runs it."""
    visit().asks(job)
    return msgspec.structs.replace(job, request_id=visit().request_id, trace=visit().span.traceparent)


def answer(kind: Kind[Any]) -> Response:
    """The response to the current request, as JSON or as a stream."""
    parts = services()
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping. The request can be repeated.")
    body = read_json(request.environ, parts.settings.max_body_bytes)
    prepared = prepare(parts, kind, body, request.headers, let_in=admit)
    call, card, fitted = prepared.call, prepared.card, prepared.fitted
    if prepared.placement.background and not call.stream:
        return _accepted(parts, prepared)
    exchange = prepared.exchange(parts)
    letting_go = LettingGo(exchange, parts.watcher)
    try:
        letting_go.watch(request.environ.get("gunicorn.socket"))
        job_id = exchange.submit()
        tell_job(job_id)
        if job_id != call.job.id:
            letting_go()
            exchange = _earlier(parts, job_id)
            letting_go = LettingGo(exchange, parts.watcher)
            letting_go.watch(request.environ.get("gunicorn.socket"))
        if call.stream:
            first = exchange.first_events()
            if not fitted:
                _tell_fit(call, card, exchange.builder)
            return streamed(parts, exchange, first, letting_go)
        whole = msgspec.json.encode(exchange.run())
        if not fitted:
            _tell_fit(call, card, exchange.builder)
    except ClientGone:
        letting_go()
        raise Cancelled("The client hung up.") from None
    except BaseException:
        letting_go()
        raise
    letting_go()
    return Response(whole, content_type="application/json")


def _accepted(parts: Services, prepared: Prepared) -> Response:
    """A background request: nobody waits for it here. Once it is queued, it is accepted, also if the store is gone before
    it can tell more."""
    job, placement = prepared.call.job, prepared.placement
    prepared.admission.used = lambda: None
    job_id = parts.gateway.submit(job, placement, followed=False)
    tell_job(job_id)
    try:
        known = parts.gateway.known.find(job_id, placement.tenant)
    except StoreUnavailable:
        if job_id != job.id:  # an earlier one
            raise
        known = KnownJob.queued(job, prepared.view)
    return described(parts, known, 202)


def _earlier(parts: Services, job_id: str) -> Exchange:
    """Follows the request that has the same Idempotency-Key, from its first frame on."""
    known = parts.gateway.known.find(job_id, tenant(), follow=True)
    return Exchange.resume(
        known,
        hub=parts.hub,
        gateway=parts.gateway,
        lifecycle=parts.lifecycle,
        graces=parts.graces,
        holds=parts.constraints.holds,
        relaying=visit().relaying,
    )


def _tell_fit(call: Call, card: ModelCard, builder: Builder) -> None:
    """Says what became of a max_tokens that the client allowed to be cut, where that is known by now."""
    if call.fit_from is None or builder.start is None:
        return
    room = card.context - builder.start.prompt_tokens
    if room < call.fit_from:
        announce("x-sluice-max-tokens", str(room))
