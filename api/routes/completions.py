"""`POST /v1/completions`, streamed and not.

The order is fixed: parse, card, job, tail, room, subscription, submission. Whatever happens after the subscription, the exchange
is closed, which cancels a job nobody waits for any more.
"""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
from flask import Blueprint, Response, request

from api.body import read_json
from api.edge import announce, tell_ignored
from api.relay import sse
from api.relay.builder import CompletionBuilder
from api.relay.exchange import Exchange
from api.relay.hub import ClientGone
from api.relay.watcher import Watch, Watcher
from api.schemas.completions import CompletionCall, CompletionRequest
from api.services import Services, services
from api.templating import TemplateFailed
from api.tokenizers import template_tokens
from shared.cards import ModelCard
from shared.errors import Cancelled, WorkerShutdown

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
def complete() -> Response:
    """One completion, as JSON or as a stream."""
    parts = services()
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping. The request can be repeated.")
    body = read_json(request.environ, parts.settings.max_body_bytes)
    ignored = CompletionRequest.unknown(body)
    tell_ignored(ignored, strict=parts.settings.strict_fields)
    fields = CompletionRequest.read(body)
    card = parts.gateway.card(fields.model)
    call = fields.to_call(card, parts.settings, created=int(time.time()))
    call = _without_thinking(parts, call, card, ignored)
    fitted = _check_room(parts, call, card)
    builder = CompletionBuilder(
        call.job, fingerprint=card.fingerprint, options=call.stream_options, tokens_as_ids=call.tokens_as_ids
    )
    exchange = Exchange(
        call.job,
        builder,
        hub=parts.hub,
        gateway=parts.gateway,
        lifecycle=parts.lifecycle,
        placement=call.placement,
    )
    letting_go = _LettingGo(exchange, parts.watcher)
    try:
        letting_go.watch(request.environ.get("gunicorn.socket"))
        exchange.submit()
        announce("x-sluice-id", call.job.id)
        if call.stream:
            return _stream(parts, None if fitted else call, card, exchange, letting_go)
        answer = msgspec.json.encode(exchange.run())
        if not fitted:
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
    parts: Services, unfitted: CompletionCall | None, card: ModelCard, exchange: Exchange, letting_go: _LettingGo
) -> Response:
    first = exchange.first_events()
    if unfitted is not None:
        _tell_fit(unfitted, card, exchange.builder)
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


def _without_thinking(parts: Services, call: CompletionCall, card: ModelCard, ignored: list[str]) -> CompletionCall:
    """The call with the tail that keeps the model from thinking, if that was asked for and its template has one."""
    field = call.thinking_off
    if field is None:
        return call
    try:
        tail = parts.tails.of(card.chat_template, **template_tokens(card, parts.tokenizers.of(card)))
    except TemplateFailed as failed:
        raise TemplateFailed(failed.message, param=field) from None
    if tail is None:
        tell_ignored([*ignored, field])
        return call
    return replace(call, job=msgspec.structs.replace(call.job, tail=tail))


def _check_room(parts: Services, call: CompletionCall, card: ModelCard) -> bool:
    """Refuses what cannot fit before it is queued, and says what becomes of a max_tokens that may be cut. False: it
    is not known here how long the prompts are."""
    rooms = parts.tokenizers.rooms(call.job, card)
    if rooms is None:
        return False
    if call.fit_from is not None and min(rooms) < call.fit_from:
        announce("x-sluice-max-tokens", str(min(rooms)))
    return True


def _tell_fit(call: CompletionCall, card: ModelCard, builder: CompletionBuilder) -> None:
    """Says what became of a max_tokens that the client allowed to be cut, where that is known by now."""
    if call.fit_from is None or builder.start is None:
        return
    room = card.context - builder.start.prompt_tokens
    if room < call.fit_from:
        announce("x-sluice-max-tokens", str(room))
