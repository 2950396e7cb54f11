"""`/tokenize`, `/detokenize`, `/tokenizer_info`, also under `/v1`: a model's tokenizer, without the model.

They answer from the card and the tokenizer.json in the store, so no worker has to run.
"""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Blueprint, Response, request

from api.body import read_json
from api.chat_prompt import ChatPrompt
from api.edge import tell_ignored
from api.schemas.messages import read_messages
from api.schemas.strict import StrictRequest
from api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from api.services import Services, services
from api.tokenizers import aside, special_tokens
from shared.cards import ModelCard
from shared.errors import Unavailable
from shared.prompts import check_cuts, encode_cut
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
    body = _body(parts, TokenizeRequest)
    fields = TokenizeRequest.read(body)
    card, tokenizer = _model(parts, fields.model)
    _, switch = fields.thinking_switch()
    prompt = ChatPrompt(fields.prompt) if fields.prompt is not None else _chat(parts, fields, card)
    if switch is not None and not prompt.switched:
        tell_ignored([*TokenizeRequest.unknown(body), switch])
    check_cuts(prompt.cuts, card.context)

    def read() -> tuple[list[int], list[str | None] | None]:
        ids = encode_cut(
            prompt.text,
            prompt.cuts,
            add_special=fields.adds_special,
            encode=tokenizer.encode,
            decode=tokenizer.decode,
        )
        return ids, [tokenizer.name(number) for number in ids] if fields.return_token_strs else None

    ids, names = aside(len(prompt.text), read)
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


def _chat(parts: Services, fields: TokenizeRequest, card: ModelCard) -> ChatPrompt:
    thinking, _ = fields.thinking_switch()
    return parts.chats.write(
        card,
        read_messages(fields.messages or []),
        thinking=thinking,
        add_generation_prompt=fields.add_generation_prompt,
    )


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
