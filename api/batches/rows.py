"""A line's result, as it stands in a batch's output or error file. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from api.batches.records import Usage
from api.known_jobs import Ended
from api.relay.inspection import Holds, Inspector, feed
from api.relay.line_ends import on_one_line
from shared.errors import InternalError, SluiceError
from shared.frames import Error, Name


class Row(NamedTuple):
    """`completed`: it belongs into the output file, else into the error file."""

    completed: bool
    raw: bytes
    usage: Usage = Usage()


class Outcome(NamedTuple):
    """What came of a request: `body` of its answer, or the error that ended it."""

    body: dict[str, Any] | None = None
    error: Error | None = None


def outcome(ended: Ended, holds: Holds) -> Outcome:
    """What an ended request said; one of which nothing can be read has failed. Raises what `holds` raises."""
    if ended.known is not None and ended.frames:
        try:
            builder = ended.known.view.builder(ended.known.job)
            feed(builder, Inspector(ended.known.job, holds), Name(1, len(ended.frames)), list(ended.frames))
            if builder.error is not None:
                return Outcome(error=builder.error)
            if builder.ended:
                return Outcome(body=builder.response())
        except (IndexError, KeyError, ValueError, TypeError):  # frames that do not fit the job
            pass
    return Outcome(error=Error.of(InternalError("The result of this request cannot be read.")))


def answered(name: str, custom_id: str, request_id: str, body: dict[str, Any]) -> Row:
    """`name`: what the row itself is called."""
    used = body.get("usage") or {}
    usage = Usage(
        used.get("prompt_tokens", 0),
        (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        used.get("completion_tokens", 0),
        (used.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )
    return Row(
        True, _encode(name, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None), usage
    )


def refused(name: str, custom_id: str, request_id: str, status: int, error: dict[str, Any]) -> Row:
    """What a client would have got with an error status."""
    response = {"status_code": status, "request_id": request_id, "body": {"error": error}}
    return Row(False, _encode(name, custom_id, response, None))


def refused_by(name: str, custom_id: str, error: SluiceError) -> Row:
    """The same for one that was never queued."""
    return refused(name, custom_id, "", error.status, error.to_object())


def not_run(name: str, custom_id: str, code: str, message: str) -> Row:
    """For a line to whose turn it did not come, or that was cut off."""
    return Row(False, _encode(name, custom_id, None, {"code": code, "message": message}))


def _encode(name: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    row = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return on_one_line(msgspec.json.encode(row)) + b"\n"
