"""One request between its client and the store: submission or return to it, waiting, hanging up, letting go.

Used by streamed and plain answers alike. Knows frames and errors, nothing of HTTP, SSE or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from api.gateway import Gateway
from api.known_jobs import KnownJob
from api.lifecycle import Lifecycle
from api.relay.builder import Builder, Event
from api.relay.cursor import BEGIN, Behind, Cursor
from api.relay.grace import Graces
from api.relay.hub import SHORT, Hub, Subscription
from api.relay.inspection import Holds, Inspector
from api.relay.observer import Observer
from shared.errors import LogLost, SluiceError, StructuredOutputFailed, WorkerShutdown, revive
from shared.frames import Error, Frame, Name, Take
from shared.jobs import Job, Placement
from shared.scripts import Place
from shared.tracing import Span

log = structlog.get_logger(__name__)

#: How long a stream's status waits for what the first frame says, s.
STATUS_WAIT = 0.25
#: Longest single wait for frames, s; only bounds how long a lost wake-up could go unnoticed.
LONGEST_WAIT = 60.0


class Exchange:
    """Follows one job: a new one, to be submitted, or with `subscription` one that is in the store already, from
    `cursor` on. `holds` says of finished texts whether they are what they were to be; `observer` measures. `relaying`
    begins a span, at the first frames. Then either `run` or `first_events` and `next_events`; `close` in any case."""

    def __init__(
        self,
        job: Job,
        builder: Builder,
        *,
        hub: Hub,
        gateway: Gateway,
        lifecycle: Lifecycle,
        graces: Graces,
        holds: Holds,
        placement: Placement = Placement(),  # noqa: B008 - frozen
        subscription: Subscription | None = None,
        cursor: Cursor = BEGIN,
        observer: Observer | None = None,
        relaying: Callable[[], Span] = Span,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        self.builder = builder
        self._placement = placement
        self._hub = hub
        self._gateway = gateway
        self._lifecycle = lifecycle
        self._graces = graces
        self._clock = clock
        self._observer = observer
        self._relaying = relaying
        self._relay: Span | None = None
        self._inspector = Inspector(job, holds)
        self._behind = Behind(builder, cursor)
        self._reach_by = clock() + SHORT
        self._followed = subscription is not None
        self._subscription = hub.open(job.id) if subscription is None else subscription
        self._left_behind = False
        self._closed = False
        lifecycle.follow(self)

    @classmethod
    def resume(
        cls,
        known: KnownJob,
        *,
        hub: Hub,
        gateway: Gateway,
        lifecycle: Lifecycle,
        graces: Graces,
        holds: Holds,
        cursor: Cursor = BEGIN,
        grace_s: int | None = None,
        relaying: Callable[[], Span] = Span,
    ) -> Exchange:
        """Follows a request that this process has attached to; `grace_s`: for this client, else as for its first.

        Raises StreamExpired, if it has ended and nothing is left of it."""
        job_id = known.job.id
        if known.ended and not known.logged:
            subscription = hub.told(job_id, *gateway.known.told(known))
        else:
            subscription = hub.attach(job_id, pushed=known.home == gateway.proc)
        return cls(
            known.job,
            known.view.builder(known.job),
            hub=hub,
            gateway=gateway,
            lifecycle=lifecycle,
            graces=graces,
            holds=holds,
            placement=Placement(background=known.background, grace_s=known.grace_s if grace_s is None else grace_s),
            subscription=subscription,
            cursor=cursor,
            relaying=relaying,
        )

    def submit(self) -> str:
        """Queues the job; its id, or that of an earlier request that is the same: then this exchange follows nothing and
        is to be closed. Raises NoWorker, QueueFull, StoreUnavailable, IdempotencyConflict."""
        job_id = self._gateway.submit(self.job, self._placement)
        self._followed = self._subscription.submitted = job_id == self.job.id
        return job_id

    def next_events(self, timeout: float) -> list[Event] | None:
        """The next frames' events (maybe none); None = `timeout` seconds passed without frames.

        Raises ClientGone, or the SluiceError that ended the stream on this side."""
        got = self._next(timeout)
        return None if got is None else got[0]

    def _next(self, timeout: float) -> tuple[list[Event], list[Frame]] | None:
        """(events, frames) that pass the inspection, behind the cursor. A cursor beyond all frames is waited for a while: the
        store may have lost them, and a worker be putting them back."""
        if not self._behind.reached:
            timeout = max(0.0, min(timeout, self._reach_by - self._clock()))
        got = self._subscription.get(timeout)
        if got is not None and self._observer is not None:
            self._observer.feed(got[1], self._subscription.ready_at)
        if got is not None and self._relay is None:
            self._relay = self._relaying()
        new = None if got is None else self._inspected(*got)
        if not self._behind.reached and (self.builder.ended or self._clock() >= self._reach_by):
            raise LogLost("The store does not have what this client saw of the stream.")
        return new

    def _inspected(self, last: Name, frames: list[Frame]) -> tuple[list[Event], list[Frame]]:
        events: list[Event] = []
        seen: list[Frame] = []
        for passed in self._inspector.feed(last, frames):
            if passed.silent:
                self.builder.feed(passed.last, passed.frames)
            else:
                made, new = self._behind.feed(passed.last, passed.frames)
                events += made
                seen += new
        return events, seen

    def first_events(self, wait: float = STATUS_WAIT) -> list[Event]:
        """What comes before the status of a stream has to be sent: up to the first frame other than `take`, `wait`
        seconds at most. Raises the error, if that is what the frame says; of a text that is not what it was to be, the
        stream tells."""
        deadline = self._clock() + wait
        events: list[Event] = []
        while not self.builder.ended and (left := deadline - self._clock()) > 0:
            got = self._next(left)
            if got is None:
                break
            events += got[0]
            decisive = next((frame for frame in got[1] if not isinstance(frame, Take)), None)
            if isinstance(decisive, Error) and decisive.error.get("code") != StructuredOutputFailed.code:
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

    def position(self) -> Place | None:
        """Place in the queue; None: not waiting, or nobody knows."""
        if self.builder.taken:
            return None
        try:
            return self._gateway.position(self.job.id)
        except SluiceError:
            return None

    def hang_up(self) -> None:
        """The client is gone. Frees the lane at once, also while the request's own thread is stuck in a send."""
        self._subscription.hang_up()
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
        if self._observer is not None and self._followed:
            self._observer.close(self.builder)
        if self._relay is not None:
            self._relay.end("" if self.builder.error is None else str(self.builder.error.error.get("code")))
        self._lifecycle.unfollow(self)
        if self._left_behind:
            self._followed = False
        self._let_go()

    def _let_go(self) -> None:
        """Once, after the last client here: the job is cancelled, runs on in the background, or is kept for a client
        that comes back."""
        self._subscription.close()
        followed, self._followed = self._followed, False
        job_id = self.job.id
        if not followed or job_id in self._hub.following():
            return
        if self.builder.ended and self._subscription.pushed:
            return  # the end has booked it out
        if self._placement.grace_s and not (self._placement.background or self.builder.ended):
            self._graces.keep(job_id, self._placement.grace_s)
        else:
            self._gateway.detach(job_id)


def _raised(frame: Error) -> SluiceError:
    return revive(frame.error, frame.status, frame.retryable)
