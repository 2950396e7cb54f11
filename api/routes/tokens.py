"""`/tokenize`, `/detokenize`, `/tokenizer_info`, also under `/v1`: a model's tokenizer, without the model.

They answer from the card and the tokenizer.json in the store, so no worker has to run.
"""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Blueprint, Response, request

from api.body import read_json
from api.edge import tell_ignored
from api.schemas.messages import read_messages
from api.schemas.strict import StrictRequest
from api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from api.services import Services, services
from api.templating import TemplateFailed
from api.thinking import SWITCHES
from api.tokenizers import aside, special_tokens, template_tokens
from shared.cards import ModelCard
from shared.errors import InvalidRequest, Unavailable
from shared.tokenizer import JsonTokenizer

blueprint = Blueprint("tokens", __name__)


class NoTokenizer(Unavailable):
    """The model's card has no tokenizer, because none could be proven equal to the engine's."""

    code = "no_tokenizer"


@blueprint.post("/tokenize")
@blueprint.post("/v1/tokenize")
def tokenize() -> Response:
    """Ids of a prompt, or of a chat as the model's template writes it."""
    parts = services()
    fields = TokenizeRequest.read(_body(parts, TokenizeRequest))
    card, tokenizer = _model(parts, fields.model)
    text = fields.prompt if fields.prompt is not None else _chat(parts, fields, card, tokenizer)
    add_special = fields.adds_special

    def read() -> tuple[list[int], list[str | None] | None]:
        ids = tokenizer.encode(text, add_special=add_special)
        return ids, [tokenizer.name(number) for number in ids] if fields.return_token_strs else None

    ids, names = aside(len(text), read)
    return _json(
        {
            "count": len(ids),
            "max_model_len": card.context,
            "tokens": ids,
            "token_strs": names,
        }
    )


@blueprint.post("/detokenize")
@blueprint.post("/v1/detokenize")
def detokenize() -> Response:
    """The text of ids, special tokens shown."""
    parts = services()
    fields = DetokenizeRequest.read(_body(parts, DetokenizeRequest))
    card, tokenizer = _model(parts, fields.model)
    fields.check(card)
    return _json({"prompt": aside(len(fields.tokens), lambda: tokenizer.decode(fields.tokens))})


@blueprint.get("/tokenizer_info")
@blueprint.get("/v1/tokenizer_info")
def tokenizer_info() -> Response:
    """What a client that renders templates itself has to know."""
    parts = services()
    card, tokenizer = _model(parts, request.args.get("model"))
    return _json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special_tokens(card, tokenizer),
            "chat_template": card.chat_template,
            "add_bos_token": card.add_bos,
            "model_max_length": card.context,
        }
    )


def _body(parts: Services, fields: type[StrictRequest]) -> dict[str, Any]:
    body = read_json(request.environ, parts.settings.max_body_bytes)
    tell_ignored(fields.unknown(body), strict=parts.settings.strict_fields)
    return body


def _model(parts: Services, name: str | None) -> tuple[ModelCard, JsonTokenizer]:
    card = parts.gateway.card(name, unserved=True)
    tokenizer = parts.tokenizers.of(card)
    if tokenizer is None:
        raise NoTokenizer(f"There is no tokenizer for {card.id} outside its workers.", param="model")
    return card, tokenizer


def _chat(parts: Services, fields: TokenizeRequest, card: ModelCard, tokenizer: JsonTokenizer) -> str:
    if card.chat_template is None:
        raise InvalidRequest(f"{card.id} has no chat template.", param="messages")
    variables: dict[str, Any] = {
        **template_tokens(card, tokenizer),
        "messages": read_messages(fields.messages or []),
        "add_generation_prompt": fields.add_generation_prompt,
    }
    thinking, _ = fields.thinking_switch()
    if thinking is not None:
        variables |= dict.fromkeys(SWITCHES, thinking)
    try:
        return parts.renderer.render(card.chat_template, variables)
    except TemplateFailed as failed:
        raise TemplateFailed(failed.message, param="messages") from None


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
