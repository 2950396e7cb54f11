"""`POST /v1/completions`, streamed and not."""

from __future__ import annotations

from flask import Blueprint, Response

from api.kinds import COMPLETION
from api.submission import answer

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
def complete() -> Response:
    """One completion, as JSON or as a stream."""
    return answer(COMPLETION)
