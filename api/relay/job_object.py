"""What `GET /v1/completions/{id}` shows: the completion, as far as it is final, and how its request stands.

A pure function of what the store has. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Any

from api.known_jobs import KnownJob
from api.relay.inspection import Holds, Inspector, feed
from shared.errors import StructuredOutputFailed
from shared.frames import End, Error, Frame, Name, Take

_TIMINGS = ("queued_ms", "first_token_ms", "total_ms")


def job_object(
    known: KnownJob, told: tuple[Name, list[Frame]] | None, position: int | None, holds: Holds
) -> dict[str, Any]:
    """`told`: all frames of a request that has ended, if they are still there; `position`: place in the queue.

    Choices and usage are empty until the end. A request that failed or was cancelled has the text it had got to, with a
    null finish_reason, and counts the tokens of it. A text of which it is not known that it is what it was to be is not shown."""
    builder = known.view.builder(known.job)
    if told is not None:
        feed(builder, Inspector(known.job, holds), *told)
    shown = builder.response()
    failed = builder.error or (known.end if isinstance(known.end, Error) else None)
    error = None if failed is None else failed.error
    constraint = known.job.constraint
    unchecked = constraint is not None and constraint.whole
    if builder.start is None or (error is not None and (unchecked or error.get("code") == StructuredOutputFailed.code)):
        shown["choices"] = []
    if builder.start is not None and builder.ended:
        shown["usage"] = builder.usage_so_far()
    return {
        **shown,
        "status": "failed" if known.status == "completed" and error is not None else known.status,
        "queue_position": position,
        "error": error,
        "timings": {name: _times(known, told).get(name) for name in _TIMINGS},
    }


def _times(known: KnownJob, told: tuple[Name, list[Frame]] | None) -> dict[str, float]:
    """ms: in the queue, from there to the first token and to the end."""
    take = next((frame for frame in (told[1] if told else ()) if isinstance(frame, Take)), None)
    waited: dict[str, float] = {} if take is None else {"queued_ms": take.queued_ms}
    return waited | (known.end.timings if isinstance(known.end, End) else {})
