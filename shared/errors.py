"""The one hierarchy of errors that a client may see.

Each class knows its HTTP status, its `type`, its `code` and whether repeating the request can help.
Knows nothing of Flask, Redis or engines.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SluiceError(Exception):
    """An error with a place in the HTTP contract. `message` is shown to the client as it is."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = "internal_error"
    retryable: ClassVar[bool] = False
    #: Seconds after which a retry makes sense, for Retry-After; None = the server's default.
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def to_object(self) -> dict[str, Any]:
        """The value of the `error` key: always these four keys."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class InternalError(SluiceError):
    """Something of ours broke. The message never carries a path or a stack trace."""

    def __init__(self, message: str = "Internal error. The details are in the server's log.") -> None:
        super().__init__(message)


class InvalidRequest(SluiceError):
    """A field of the request is wrong; `param` names it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidJson(InvalidRequest):
    """The body is not one strict JSON object."""

    code = "invalid_json"


class UnsupportedParameter(InvalidRequest):
    """The field is known, but this server or this model's engine does not offer it."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens do not fit into the model's context."""

    code = "context_length_exceeded"


class Unauthorized(SluiceError):
    """No key, or one that is not known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(SluiceError):
    """Known, but not allowed (also an unknown Host or a foreign Origin in open mode)."""

    status = 403
    type = "permission_error"
    code = None


class NotFound(SluiceError):
    """No such path, job or file."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """No served model has this id or alias."""

    code = "model_not_found"


class MethodNotAllowed(SluiceError):
    """The path exists, the method does not. `allow` lists the methods that do."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allow: list[str]) -> None:
        super().__init__(message)
        self.allow = allow


class Cancelled(SluiceError):
    """The request was cancelled while its client waited."""

    status = 409
    type = "invalid_request_error"
    code = "cancelled"


class IdempotencyConflict(SluiceError):
    """The Idempotency-Key belongs to another request."""

    status = 409
    type = "invalid_request_error"
    code = "idempotency_conflict"


class FileInUse(SluiceError):
    """An unfinished batch needs the file."""

    status = 409
    type = "invalid_request_error"
    code = "file_in_use"


class StreamExpired(SluiceError):
    """The stream ended too long ago to be replayed; its result may still be there."""

    status = 410
    type = "invalid_request_error"
    code = "stream_expired"


class BodyTooLarge(SluiceError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(SluiceError):
    """The Content-Type is not application/json (a missing one neither)."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimited(SluiceError):
    """The key has used up its minute, or has as many requests running as it may. `retry_after_s`: when there is room."""

    status = 429
    type = "rate_limit_error"
    retryable = True
    code = "rate_limit_exceeded"


class QueueFull(RateLimited):
    """So many requests wait that this one would wait too long. `retry_after_s`: when there may be room."""

    code = "queue_full"


class StructuredOutputFailed(SluiceError):
    """The text does not have the demanded form, or cannot get it."""

    status = 502
    type = "structured_output_failed"
    code = "structured_output_failed"


class Unavailable(SluiceError):
    """Not now; the same request may go through later. Base of the 503 family."""

    status = 503
    retryable = True
    code = "engine_overloaded"


class NoWorker(Unavailable):
    """No worker serves the model, and nothing known could start one in time."""

    code = "no_worker"


class WorkerLost(Unavailable):
    """The worker that had the request died."""

    code = "worker_lost"


class PoisonRequest(Unavailable):
    """Workers died while they ran this request, each before its first token: it may be what kills them."""

    code = "poison_request"
    retryable = False


class WorkerShutdown(Unavailable):
    """The worker was told to stop before the request was done."""

    code = "worker_shutdown"


class EngineOverloaded(Unavailable):
    """The engine ran out of memory on this request."""

    code = "engine_overloaded"


class StoreUnavailable(Unavailable):
    """The store is away or full."""

    code = "store_unavailable"


class LogLost(Unavailable):
    """The store no longer has what this client saw; going on would mix two texts."""

    code = "log_lost"


class JobLost(Unavailable):
    """The store lost the request before it ended."""

    code = "job_lost"


class DeadlineExceeded(SluiceError):
    """The request's deadline passed."""

    status = 504
    code = "deadline_exceeded"


#: By code, for errors that travel through the log (`errors.revive`).
BY_CODE: dict[str, type[SluiceError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        InvalidJson,
        UnsupportedParameter,
        ContextLengthExceeded,
        ModelNotFound,
        Cancelled,
        StructuredOutputFailed,
        NoWorker,
        WorkerLost,
        PoisonRequest,
        WorkerShutdown,
        EngineOverloaded,
        StoreUnavailable,
        LogLost,
        JobLost,
        DeadlineExceeded,
    )
    if cls.code is not None
}


def revive(error: dict[str, Any], status: int, retryable: bool = False) -> SluiceError:
    """The exception for an error object that came through the log, with the status it was written with."""
    code = error.get("code")
    known = BY_CODE.get(code) if isinstance(code, str) else None
    if known is None or known.status != status:
        kind = {"status": status, "type": str(error.get("type", "server_error")), "retryable": retryable, "code": None}
        known = type("RevivedError", (SluiceError,), kind)
    return known(str(error.get("message", "")), param=error.get("param"), code=code)
