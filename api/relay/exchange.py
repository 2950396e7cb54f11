"""One request between its client and the store: submission, waiting, hanging up, letting go.

Used by streamed and plain answers alike. Knows frames and errors, nothing of HTTP, SSE or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from api.gateway import Gateway
from api.lifecycle import Lifecycle
from api.relay.builder import CompletionBuilder, Event
from api.relay.hub import Hub
from shared.errors import SluiceError, WorkerShutdown, revive
from shared.frames import Error, Take
from shared.jobs import Job, Placement

log = structlog.get_logger(__name__)

#: How long a stream's status waits for what the first frame says, s.
STATUS_WAIT = 0.25
#: Longest single wait for frames, s; only bounds how long a lost wake-up could go unnoticed.
LONGEST_WAIT = 60.0


class Exchange:
    """Follows one job. `submit`, then either `run` or `first_events` and `next_events`; `close` in any case."""

    def __init__(
        self,
        job: Job,
        builder: CompletionBuilder,
        *,
        hub: Hub,
        gateway: Gateway,
        lifecycle: Lifecycle,
        placement: Placement = Placement(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        self.builder = builder
        self._placement = placement
        self._gateway = gateway
        self._lifecycle = lifecycle
        self._clock = clock
        self._subscription = hub.open(job.id)
        self._submitted = False
        self._left_behind = False
        self._closed = False
        lifecycle.follow(self)

    def submit(self) -> None:
        """Queues the job. Raises NoWorker, StoreUnavailable."""
        self._gateway.submit(self.job, self._placement)
        self._submitted = True
        self._subscription.submitted = True

    def next_events(self, timeout: float) -> list[Event] | None:
        """The next frames' events (maybe none); None = `timeout` seconds passed without frames.

        Raises ClientGone, or the SluiceError that ended the stream on this side."""
        got = self._subscription.get(timeout)
        return None if got is None else self.builder.feed(*got)

    def first_events(self, wait: float = STATUS_WAIT) -> list[Event]:
        """What comes before the status of a stream has to be sent: up to the first frame other than `take`, `wait`
        seconds at most. Raises the error, if that is what the frame says."""
        deadline = self._clock() + wait
        events: list[Event] = []
        while (left := deadline - self._clock()) > 0:
            got = self._subscription.get(left)
            if got is None:
                break
            events += self.builder.feed(*got)
            decisive = next((frame for frame in got[1] if not isinstance(frame, Take)), None)
            if isinstance(decisive, Error):
                raise _raised(decisive)
            if decisive is not None:
                break
        return events

    def run(self) -> dict[str, Any]:
        """Waits for the end: the response object. Raises the error that ended the request."""
        while not self.builder.ended:
            self.next_events(LONGEST_WAIT)
        if self.builder.error is not None:
            raise _raised(self.builder.error)
        return self.builder.response()

    def position(self) -> tuple[int, float | None] | None:
        """Place in the queue, 1 = next, and the seconds it may take; None: not waiting, or nobody knows."""
        if self.builder.taken:
            return None
        try:
            return self._gateway.position(self.job.id)
        except SluiceError:
            return None

    def hang_up(self) -> None:
        """The client is gone. Frees the lane at once, also while the request's own thread is stuck in a send."""
        self._subscription.hang_up()
        if self._submitted:
            self._let_go()

    def give_up(self) -> None:
        """This process stops: the client gets an error; the job runs on for a client that comes back elsewhere."""
        self._left_behind = True
        self._subscription.fail(WorkerShutdown("This server is stopping. The request can be repeated."))

    def close(self) -> None:
        """Lets go of the job; one that has not ended is cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._lifecycle.unfollow(self)
        self._subscription.close()
        if self._submitted and not self._left_behind:
            self._let_go()

    def _let_go(self) -> None:
        self._submitted = False
        if not self.builder.ended:
            self._gateway.detach(self.job.id)


def _raised(frame: Error) -> SluiceError:
    return revive(frame.error, frame.status, frame.retryable)
