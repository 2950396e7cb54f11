"""Request headers of Sluice's own meaning. Pure; knows nothing of Flask."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from shared.errors import InvalidRequest

#: Longest grace after a hang-up, s. Who needs more wants `background`.
MAX_GRACE = 600
GRACE = "X-Resume-Grace"
KEY = "Idempotency-Key"

_SECONDS = re.compile(r"[0-9]{1,6}")
_KEY = re.compile(r"[!-~]{1,255}")


def read_grace(value: str | None) -> int | None:
    """X-Resume-Grace, s; None where there is none. Raises InvalidRequest."""
    if value is None:
        return None
    if not _SECONDS.fullmatch(value) or int(value) > MAX_GRACE:
        raise InvalidRequest(f"{GRACE} must be a number of seconds from 0 to {MAX_GRACE}.", param=GRACE)
    return int(value)


def read_key(value: str | None, body: dict[str, Any], kind: str) -> tuple[str, str] | None:
    """Idempotency-Key and what it stands for; None where there is none. Raises InvalidRequest.

    `kind`: of the request; another kind is another request. Two bodies are the same if they are the same JSON, whatever the order of their keys and the space between them; a
    field that is null is absent."""
    if value is None:
        return None
    if not _KEY.fullmatch(value):
        raise InvalidRequest(f"{KEY} must be 1 to 255 printable ASCII characters without spaces.", param=KEY)
    given = {name: item for name, item in body.items() if item is not None}
    canonical = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return value, hashlib.sha256(f"{kind} {canonical}".encode()).hexdigest()
