"""The hub: one subscriber per process, fanned out to the requests that wait here.

It makes a reliable stream of an unreliable channel: every frame once, in order. What a channel message leaves
out is read from the log, which is never behind a publish. Knows frames and ids, nothing of HTTP or text.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import redis
import structlog

from api.relay.order import Order, Verdict
from shared import connection, frames, keys
from shared.errors import InternalError, JobLost, LogLost, SluiceError, StoreUnavailable
from shared.frames import Frame, Name

log = structlog.get_logger(__name__)

#: Silence after which the channel is pinged and a stream's log is looked at, s.
IDLE = 5.0
#: Logs read in one round trip.
REPAIR_BATCH = 50
#: Entries a client may lag behind before the hub stops keeping them and reads them from the log when it is ready.
BACKLOG = 512
#: How long a log may lack what was delivered before the stream is given up, s.
SHORT = 6.0
#: Pause between attempts to reach the store, s.
RETRY = 0.2


class ClientGone(Exception):
    """The client hung up."""


class Subscription:
    """One request's frames. Made by `Hub.open`; `get` by one thread only."""

    def __init__(self, hub: Hub, job_id: str) -> None:
        self.job_id = job_id
        self.order = Order()
        self.touched = time.monotonic()
        #: The request is in the store; before that, it is no wonder that it is not there.
        self.submitted = False
        #: Since when the log lacks something, monotonic, s.
        self.short_since: float | None = None
        self._hub = hub
        self._ready = threading.Event()
        self._entries: deque[tuple[Name, list[Frame]]] = deque()
        self._behind = False
        self._error: SluiceError | None = None
        self._gone = False

    @property
    def live(self) -> bool:
        """More frames may come."""
        return not (self.order.ended or self._gone or self._error)

    def get(self, timeout: float) -> tuple[Name, list[Frame]] | None:
        """The next frames, in order, with the name of the last; None when `timeout` seconds passed without one.

        What lies ready of one attempt comes at once. Raises ClientGone, or the SluiceError that ended the stream."""
        until = time.monotonic() + timeout
        while not (self._entries or self._gone or self._error):
            if self._behind:
                self._behind = False
                self._hub.repair_soon(self)
            self._ready.clear()
            if self._entries or self._gone or self._error:
                break
            left = until - time.monotonic()
            if left <= 0 or not self._ready.wait(left):
                break
        if self._gone:
            raise ClientGone
        if not self._entries:
            if self._error:
                raise self._error
            return None
        last, batch = self._entries.popleft()
        while self._entries and self._entries[0][0].a == last.a:
            last, more = self._entries.popleft()
            batch = batch + more
        return last, batch

    def hang_up(self) -> None:
        """The client is gone: wakes `get`."""
        self._gone = True
        self._ready.set()

    def fail(self, error: SluiceError) -> None:
        """Ends the stream with an error of this side, after what was already delivered."""
        self._error = self._error or error
        self._ready.set()

    def close(self) -> None:
        self._hub.forget(self)

    def fell_short(self) -> None:
        """The log lacks what was delivered, or the end of a request that has one. Somebody may be putting it back."""
        now = time.monotonic()
        self.short_since = self.short_since or now
        if now - self.short_since > SHORT:
            self.fail(LogLost("The store lost part of this stream, or kept it no longer."))

    def feed(self, last: Name, entry: list[Frame]) -> bool:
        """Delivers what is new. False: frames before this entry are missing."""
        if not self.live or self._behind:
            return True
        try:
            new = self.order.feed(last, entry)
        except LogLost as error:
            self.fail(error)
            return True
        if new is Verdict.GAP:
            return False
        self.touched = time.monotonic()
        if isinstance(new, list):
            self._entries.append((self.order.last, new))
            self._behind = len(self._entries) >= BACKLOG and not self.order.ended
            self._ready.set()
        return True


class Hub:
    """Follows the node's channel and keeps every open subscription whole.

    `lost` is asked about a request whose log is silent (job id -> None) and may end it in the store.
    `subscribe_delay` is a fault hook of the tests: seconds between connecting and subscribing.
    """

    def __init__(
        self,
        url: str,
        proc: str,
        *,
        store_wait: float,
        lost: Callable[[str], None] = lambda job_id: None,
        subscribe_delay: float = 0.0,
    ) -> None:
        self._url = url
        self._channel = keys.node_channel(proc).encode()
        self._store = connection.connect(url, max_connections=4)
        self._store_wait = store_wait
        self._lost = lost
        self._subscribe_delay = subscribe_delay
        self._streams: dict[str, list[Subscription]] = {}
        self._repairs: deque[Subscription] = deque()
        self._repair = threading.Event()
        self._stop = threading.Event()
        self._away_since: float | None = None
        #: Gaps that were filled from the log, for the metrics.
        self.repaired = 0

    def start(self) -> None:
        """Starts following the channel; returns at once."""
        for target in (self._follow, self._mend, self._look):
            threading.Thread(target=self._guard, args=(target,), name=f"hub{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._repair.set()

    def open(self, job_id: str) -> Subscription:
        """A subscription to a request from its first frame on. Open it before the request is submitted."""
        subscription = Subscription(self, job_id)
        self._streams.setdefault(job_id, []).append(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        streams = self._streams.get(subscription.job_id, [])
        if subscription in streams:
            streams.remove(subscription)
        if not streams:
            self._streams.pop(subscription.job_id, None)

    def following(self) -> set[str]:
        """Ids of the requests that somebody waits for here."""
        return set(self._streams)

    def repair_soon(self, subscription: Subscription) -> None:
        """Has the subscription's log read from its last frame on."""
        self._repairs.append(subscription)
        self._repair.set()

    def _guard(self, target: Callable[[], None]) -> None:
        """A hub thread never ends by an exception: its streams would wait for ever."""
        while not self._stop.is_set():
            try:
                target()
            except Exception:
                log.exception("hub_thread_failed", thread=target.__name__)
                for subscription in self._all():
                    subscription.fail(InternalError())
                self._stop.wait(RETRY)

    def _all(self) -> list[Subscription]:
        return [subscription for streams in list(self._streams.values()) for subscription in streams]

    # -- the channel

    def _follow(self) -> None:
        said = ""  # each failure once, not at every attempt
        while not self._stop.is_set():
            channel = connection.raw(self._url)
            try:
                channel.connect()
                self._stop.wait(self._subscribe_delay)
                for kind, payload in connection.listen(channel, self._channel, idle=IDLE, more=self._running):
                    self._away_since = None
                    if kind == b"message":
                        self._dispatch(payload)
                    elif kind == b"subscribe":
                        for subscription in self._all():
                            self.repair_soon(subscription)
            except (redis.RedisError, OSError) as error:
                if not self._stop.is_set() and said != str(error):
                    said = str(error)
                    log.warning("hub_connection_lost", error=said)
            finally:
                channel.disconnect()
            self._stop.wait(RETRY)

    def _running(self) -> bool:
        return not self._stop.is_set()

    def _dispatch(self, payload: bytes) -> None:
        try:
            message = frames.decode_message(payload)
        except (ValueError, RecursionError) as error:  # whoever publishes garbage harms nobody
            log.warning("hub_bad_message", error=str(error))
            return
        for job_id, (last, entry) in message.items():
            for subscription in self._streams.get(job_id, ()):
                try:
                    if not subscription.feed(last, entry):
                        self.repair_soon(subscription)
                except Exception:  # a bug of ours, on one stream: the others go on
                    log.exception("stream_failed", job=job_id)
                    subscription.fail(InternalError())

    # -- the log

    def _mend(self) -> None:
        while not self._stop.is_set():
            self._repair.wait()
            self._repair.clear()
            while self._repairs and not self._stop.is_set():
                batch: dict[int, Subscription] = {}
                while self._repairs and len(batch) < REPAIR_BATCH:
                    subscription = self._repairs.popleft()
                    if subscription.live:
                        batch[id(subscription)] = subscription
                if batch and not self._read_logs(list(batch.values())):
                    self._repairs.extend(batch.values())
                    self._stop.wait(RETRY)

    def _read_logs(self, subscriptions: list[Subscription]) -> bool:
        """Feeds each what its log has from its last frame on. False: the store did not answer."""
        try:
            pipeline = self._store.pipeline(transaction=False)
            for subscription in subscriptions:
                pipeline.xrange(keys.log(subscription.job_id), str(subscription.order.last), "+")
            answers = pipeline.execute()
        except redis.RedisError:
            self._store_away()
            return False
        self._away_since = None
        for subscription, entries in zip(subscriptions, answers, strict=True):
            self._feed_log(subscription, entries)
        return True

    def _feed_log(self, subscription: Subscription, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        before = subscription.order.last
        entries = list(entries)
        if before.s and not entries:
            subscription.fell_short()
            return
        for name, fields in entries:
            try:
                entry = frames.decode_entry(fields[b"f"])
                whole = subscription.feed(Name.parse(name.decode()), entry)
            except (KeyError, ValueError):
                whole = False
            if not whole:
                subscription.fail(LogLost("The log of this request has a hole."))
                return
        if subscription.order.last != before:
            self.repaired += 1
            subscription.short_since = None

    def _store_away(self) -> None:
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > self._store_wait:
            for subscription in self._all():
                subscription.fail(StoreUnavailable("The store has been away for too long."))

    # -- silence

    def _look(self) -> None:
        """Streams that heard nothing for a while: is there something in the log, and is the job still there?"""
        while not self._stop.wait(1.0):
            now = time.monotonic()
            silent = [s for s in self._all() if s.live and s.submitted and now - s.touched > IDLE]
            for start in range(0, len(silent), REPAIR_BATCH):
                batch = silent[start : start + REPAIR_BATCH]
                try:
                    pipeline = self._store.pipeline(transaction=False)
                    for subscription in batch:
                        pipeline.hmget(keys.job(subscription.job_id), "status", "terminal")
                    there = pipeline.execute()
                except redis.RedisError:
                    self._store_away()
                    break
                self._away_since = None
                for subscription, (status, terminal) in zip(batch, there, strict=True):
                    subscription.touched = now
                    if status is None:
                        subscription.fail(JobLost("The store no longer has this request."))
                        continue
                    if terminal:  # its end should be in the log
                        subscription.fell_short()
                    self.repair_soon(subscription)
                    self._lost(subscription.job_id)
