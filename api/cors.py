"""Cross-origin requests from browsers (the Fetch standard's CORS protocol), for the origins that a setting names.

Off by default: then no response says anything about origins. Errors carry the same headers as successes, or a browser
would hide them from the page.
"""

from __future__ import annotations

import re

from flask import Response, request

#: What a page may send: whatever headers it names (clients add their own, such as x-stainless-*), else these.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, -]{1,1024}")
ALLOWED_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, x-api-key, x-client-request-id, x-request-deadline-ms, "
    "x-request-id, x-resume-grace"
)
#: Response headers that a page may read.
EXPOSED_HEADERS = (
    "openai-processing-ms, retry-after, retry-after-ms, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens, "
    "x-request-id, x-should-retry, x-sluice-id, x-sluice-ignored, x-sluice-max-tokens"
)
#: How long a browser may keep the answer to a preflight, s.
MAX_AGE = "600"


def is_preflight() -> bool:
    """Whether this is a browser's question before a request of a page; it never carries a key."""
    return request.method == "OPTIONS" and {"Origin", "Access-Control-Request-Method"} <= set(request.headers.keys())


def tell_origin(response: Response, origins: frozenset[str]) -> None:
    """Adds what the request's origin may do, if it is one of `origins` (compared as written: scheme, host, port)."""
    if not origins:
        return
    response.vary.add("Origin")
    origin = request.environ.get("HTTP_ORIGIN")
    if origin not in origins:
        return
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    if is_preflight():
        response.headers["Access-Control-Allow-Methods"] = response.headers.get("Allow", "")
        asked = request.headers.get("Access-Control-Request-Headers", "")
        response.headers["Access-Control-Allow-Headers"] = asked if _HEADER_NAMES.fullmatch(asked) else ALLOWED_HEADERS
        response.vary.add("Access-Control-Request-Headers")
        response.headers["Access-Control-Max-Age"] = MAX_AGE
