"""Which endpoints a batch may call, and how the body of a line becomes a job: as over HTTP (`api/kinds.py`).

An endpoint is one entry of `ENDPOINTS`. Knows nothing of files and of the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from api.auth import SCOPE_OF_KIND
from api.kinds import CHAT, COMPLETION, Checked, Kind, Parts, check
from shared.errors import InvalidRequest


class Endpoint(NamedTuple):
    """`scope`: what a key needs to call it; `prefix`: how its requests' ids begin. `beginning`: the text that the model reads first, by which lines that share
    it are put next to each other."""

    kind: Kind[Any]
    scope: str
    prefix: str
    beginning: Callable[[dict[str, Any]], str]

    def read(self, parts: Parts, body: dict[str, Any]) -> Checked:
        """Raises the SluiceError that says why a body is no request for a batch."""
        checked = check(parts, self.kind, body)
        if checked.call.stream:
            raise InvalidRequest("A request of a batch cannot be streamed.", param="stream")
        return checked


def _field(name: str) -> Callable[[dict[str, Any]], str]:
    def text(body: dict[str, Any]) -> str:
        value = body.get(name)
        return value if isinstance(value, str) else json.dumps(value)

    return text


#: Path -> endpoint.
ENDPOINTS = {
    "/v1/completions": Endpoint(COMPLETION, SCOPE_OF_KIND["completion"], "cmpl", _field("prompt")),
    "/v1/chat/completions": Endpoint(CHAT, SCOPE_OF_KIND["chat"], "chatcmpl", _field("messages")),
}
