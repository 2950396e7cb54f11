"""`POST /v1/completions`, streamed and not.

The order is fixed: parse, card, job, subscription, submission. Whatever happens after the subscription, the exchange
is closed, which cancels a job nobody waits for any more.
"""

from __future__ import annotations

import time

import msgspec
from flask import Blueprint, Response, request

from api.body import read_json
from api.edge import announce, ignored_header
from api.relay import sse
from api.relay.builder import CompletionBuilder
from api.relay.exchange import Exchange
from api.relay.hub import ClientGone
from api.relay.watcher import Watch, Watcher
from api.schemas.completions import CompletionCall, CompletionRequest
from api.services import Services, services
from shared.cards import ModelCard
from shared.errors import Cancelled, UnsupportedParameter, WorkerShutdown

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
def complete() -> Response:
    """One completion, as JSON or as a stream."""
    parts = services()
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping. The request can be repeated.")
    body = read_json(request.environ, parts.settings.max_body_bytes)
    _tell_ignored(CompletionRequest.unknown(body), strict=parts.settings.strict_fields)
    fields = CompletionRequest.read(body)
    card = parts.gateway.card(fields.model)
    call = fields.to_call(card, parts.settings, created=int(time.time()))
    builder = CompletionBuilder(
        call.job, fingerprint=card.fingerprint, options=call.stream_options, tokens_as_ids=call.tokens_as_ids
    )
    exchange = Exchange(call.job, builder, hub=parts.hub, gateway=parts.gateway, lifecycle=parts.lifecycle)
    letting_go = _LettingGo(exchange, parts.watcher)
    try:
        letting_go.watch(request.environ.get("gunicorn.socket"))
        exchange.submit()
        announce("x-sluice-id", call.job.id)
        if call.stream:
            return _stream(parts, call, card, exchange, letting_go)
        answer = msgspec.json.encode(exchange.run())
        _tell_fit(call, card, builder)
    except ClientGone:
        letting_go()
        raise Cancelled("The client hung up.") from None
    except BaseException:
        letting_go()
        raise
    letting_go()
    return Response(answer, content_type="application/json")


def _stream(
    parts: Services, call: CompletionCall, card: ModelCard, exchange: Exchange, letting_go: _LettingGo
) -> Response:
    first = exchange.first_events()
    _tell_fit(call, card, exchange.builder)
    settings = parts.settings
    heartbeat = settings.sse_heartbeat_s if settings.sse_heartbeat == "comment" else None
    response = Response(
        sse.stream(exchange, first, heartbeat=heartbeat), content_type=sse.CONTENT_TYPE, headers=sse.HEADERS
    )
    response.call_on_close(letting_go)
    return response


class _LettingGo:
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


def _tell_ignored(names: list[str], *, strict: bool) -> None:
    if not names:
        return
    if strict:
        raise UnsupportedParameter(f"There is no field {names[0][:64]!a}.", param=names[0][:64])
    announce("x-sluice-ignored", ignored_header(names))


def _tell_fit(call: CompletionCall, card: ModelCard, builder: CompletionBuilder) -> None:
    """Says what became of a max_tokens that the client allowed to be cut, where that is known by now."""
    if call.fit_from is None or builder.start is None:
        return
    room = card.context - builder.start.prompt_tokens
    if room < call.fit_from:
        announce("x-sluice-max-tokens", str(room))
