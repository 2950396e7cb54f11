"""`GET /v1/status`: models, workers, queues and nodes."""

from __future__ import annotations

import msgspec
from flask import Blueprint, Response

from api.services import services

blueprint = Blueprint("status", __name__)


@blueprint.get("/v1/status")
def status() -> Response:
    return Response(msgspec.json.encode(services().gateway.status()), content_type="application/json")
