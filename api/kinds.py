"""The kinds of requests that generate text, and the way from a request object to its job: the same over HTTP, WebSocket
and in batches.

The order is fixed: parse, card, job, prompt, room. Knows nothing of Flask, of who asks and of queues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from api.chat_prompt import ChatPrompts
from api.constraints import Constraints
from api.gateway import Gateway
from api.relay.view import View
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.generation import Call, GenerationRequest
from api.templating import TemplateFailed
from api.tokenizers import Tokenizers
from shared.cards import ModelCard
from shared.jobs import Job
from shared.settings import Settings
from shared.tool_calls import Tools, form_of

F = TypeVar("F", bound=GenerationRequest)


class Parts(Protocol):
    """What reading a request needs."""

    @property
    def settings(self) -> Settings: ...
    @property
    def gateway(self) -> Gateway: ...
    @property
    def tokenizers(self) -> Tokenizers: ...
    @property
    def chats(self) -> ChatPrompts: ...
    @property
    def constraints(self) -> Constraints: ...


@dataclass(frozen=True, slots=True)
class Kind(Generic[F]):
    """A kind of request. `complete` puts into the job what only the model's template can say, and names a field that
    has no effect with it, if there is one."""

    fields: type[F]
    complete: Callable[[Parts, F, ModelCard, Job], tuple[Job, str | None]]


class Checked(NamedTuple):
    """A request that was read and found good. `rooms`: tokens that each prompt leaves, None where that is not known
    here; `idle`: a field that has no effect with this model."""

    call: Call
    card: ModelCard
    view: View
    rooms: list[int] | None
    idle: str | None


def check(parts: Parts, kind: Kind[F], body: dict[str, Any]) -> Checked:
    """What a request object asks for. Raises the SluiceError that says why not."""
    fields = kind.fields.read(body)
    card = parts.gateway.card(fields.model)
    call = fields.to_call(card, parts.settings, created=int(time.time()))
    job, idle = kind.complete(parts, fields, card, call.job)
    if call.demand is not None:
        job = msgspec.structs.replace(job, constraint=parts.constraints.admit(call.demand, card))
    call = call.with_job(job)
    view = View.of(
        card.fingerprint,
        call.stream_options,
        tokens_as_ids=call.tokens_as_ids,
        reasoning_field=parts.settings.reasoning_field,
    )
    return Checked(call, card, view, parts.tokenizers.rooms(call.job, card), idle)


def _without_thinking(parts: Parts, fields: CompletionRequest, card: ModelCard, job: Job) -> tuple[Job, str | None]:
    """The job with the tail that keeps the model from thinking, if that was asked for and its template has one."""
    thinking, field = fields.thinking_switch()
    if thinking is not False or field is None:
        return job, None
    try:
        tail = parts.chats.tail(card)
    except TemplateFailed as failed:
        raise TemplateFailed(failed.message, param=field) from None
    return (job, field) if tail is None else (msgspec.structs.replace(job, tail=tail), None)


def _with_prompt(parts: Parts, fields: ChatRequest, card: ModelCard, job: Job) -> tuple[Job, str | None]:
    """The job with the prompt that the model's template makes of the messages."""
    thinking, field = fields.thinking_switch()
    prompt = parts.chats.write(card, fields.read_messages(), tools=fields.offered_tools, thinking=thinking)
    job = msgspec.structs.replace(job, prompts=[prompt.text], cuts=prompt.cuts, reasoning=prompt.reasoning)
    return _with_tools(parts, fields, card, job), None if prompt.switched else field


def _with_tools(parts: Parts, fields: ChatRequest, card: ModelCard, job: Job) -> Job:
    """The job with the tools that its text may call; if it must, held to that."""
    form = form_of(card.chat_template or "")
    schemas, calls = fields.schemas_demand(form), fields.calls_demand(form)
    if schemas is not None:
        parts.constraints.admit(schemas, card)
    names = tuple(tool.name for tool in fields.callable_tools())
    if not names:
        return job
    return msgspec.structs.replace(
        job,
        tools=Tools(form, names, single=fields.single_call),
        constraint=None if calls is None else parts.constraints.admit(calls, card),
    )


COMPLETION = Kind(CompletionRequest, _without_thinking)
CHAT = Kind(ChatRequest, _with_prompt)
