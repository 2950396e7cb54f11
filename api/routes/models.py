"""`GET /v1/models` and `/v1/models/{id}`: what can be asked for."""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Blueprint, Response

from api.services import services
from shared.cards import ModelCard
from shared.errors import ModelNotFound

blueprint = Blueprint("models", __name__)


@blueprint.get("/v1/models")
def listing() -> Response:
    """Every model that a worker serves or could be started for."""
    return _json({"object": "list", "data": [_shown(card) for card in services().gateway.cards()]})


@blueprint.get("/v1/models/<path:model>")
def one(model: str) -> Response:
    """One model, by id (which may hold slashes) or alias."""
    gateway = services().gateway
    card = gateway.card(model)
    if card not in gateway.cards():
        raise ModelNotFound(f"The model {model!r} is served by nobody at the moment.", param="model")
    return _json(_shown(card))


def _shown(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "sluice",
        "max_model_len": card.context,
        "aliases": list(card.aliases),
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
