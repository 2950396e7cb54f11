"""`GET /metrics`, for Prometheus."""

from __future__ import annotations

from flask import Blueprint, Response

from api.metrics import CONTENT_TYPE
from api.services import services

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics")
def metrics() -> Response:
    return Response(services().metrics.text(), content_type=CONTENT_TYPE)
