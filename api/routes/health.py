"""`GET /health` (the process is alive) and `GET /ready` (it should be sent requests)."""

from __future__ import annotations

import msgspec
from flask import Blueprint, Response

from api.services import services
from shared.errors import StoreUnavailable, WorkerShutdown

blueprint = Blueprint("health", __name__)


@blueprint.get("/health")
def health() -> Response:
    return _json({"status": "ok"})


@blueprint.get("/ready")
def ready() -> Response:
    """503 while the process is draining or the store does not answer."""
    parts = services()
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping.")
    if not parts.gateway.ping():
        raise StoreUnavailable("The store does not answer.")
    return _json({"status": "ready"})


def _json(value: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
