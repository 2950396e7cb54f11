"""From exceptions to HTTP: every failure is the same strict JSON object, whatever raised it.

Knows Flask and the hierarchy in `shared.errors`.
"""

from __future__ import annotations

import math

import msgspec
import structlog
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from shared.errors import InternalError, InvalidRequest, MethodNotAllowed, NotFound, SluiceError

log = structlog.get_logger(__name__)

#: Retry-After where the error does not say better, s.
RETRY_AFTER = 1.0
#: Codes whose repetition is pointless although their status suggests it.
NEVER_AGAIN = frozenset({"insufficient_quota", "poison_request"})


def error_response(error: SluiceError) -> Response:
    """The response for an error, with what the official client needs to know about repeating it: it repeats 409,
    429 and 5xx unless `x-should-retry` says otherwise."""
    response = Response(
        msgspec.json.encode({"error": error.to_object()}), error.status, content_type="application/json"
    )
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = ", ".join(error.allow)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"  # RFC 9110 section 11.6.1: a 401 says how to do better
    if error.status in (409, 502, 504) or error.code in NEVER_AGAIN:
        response.headers["x-should-retry"] = "false"
    elif error.status in (429, 503):
        wait = RETRY_AFTER if error.retry_after_s is None else error.retry_after_s
        response.headers["x-should-retry"] = "true"
        response.headers["Retry-After"] = str(math.ceil(wait))
        response.headers["retry-after-ms"] = str(math.ceil(wait * 1000))
    return response


def install(app: Flask) -> None:
    app.register_error_handler(SluiceError, error_response)
    app.register_error_handler(HTTPException, _from_werkzeug)
    app.register_error_handler(Exception, _unexpected)


def _from_werkzeug(error: HTTPException) -> Response:
    if isinstance(error, WerkzeugMethodNotAllowed):
        allow = sorted({*(error.valid_methods or ()), "OPTIONS"})
        if request.method == "OPTIONS":
            return _nothing(allow)
        return error_response(MethodNotAllowed(f"{request.method} is not allowed here.", allow))
    if error.code == 404:
        return error_response(NotFound("There is nothing at this path."))
    if error.code is not None and 400 <= error.code < 500:
        return error_response(InvalidRequest("The request is malformed.", code="bad_request"))
    return _unexpected(error)


def _nothing(allow: list[str]) -> Response:
    """The answer to OPTIONS. Without a body there is no type; werkzeug would call it HTML."""
    response = Response(status=204, headers={"Allow": ", ".join(allow)})
    del response.headers["Content-Type"]
    return response


def _unexpected(error: Exception) -> Response:
    log.error("request_failed", path=request.path, exc_info=error)
    return error_response(InternalError())
