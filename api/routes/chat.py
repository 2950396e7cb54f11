"""`POST /v1/chat/completions`, streamed and not."""

from __future__ import annotations

from flask import Blueprint, Response

from api.kinds import CHAT
from api.submission import answer

blueprint = Blueprint("chat", __name__)


@blueprint.post("/v1/chat/completions")
def complete() -> Response:
    """One answer to a chat, as JSON or as a stream."""
    return answer(CHAT)
