"""The hub: one subscriber per process, fanned out to the requests that wait here.

It makes a reliable stream of an unreliable channel: every frame once, in order. What a channel message leaves
out is read from the log, which is never behind a publish. Knows frames and ids, nothing of HTTP or text.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import redis
import structlog

from api.relay.order import Order, Verdict
from shared import connection, frames, keys
from shared.errors import InternalError, JobLost, LogLost, SluiceError, StoreUnavailable
from shared.frames import Frame, Name
from shared.results import RawEntry
from shared.scripts import Scripts

log = structlog.get_logger(__name__)

#: Silence after which the channel is pinged and a stream's log is looked at, s.
IDLE = 5.0
#: Logs read in one round trip.
REPAIR_BATCH = 50
#: What a client may lag behind before the hub stops keeping frames for it and reads them from the log when it is ready:
#: so many entries, or so many bytes of them as JSON. Nor is more of one log read at once.
BACKLOG = 512
BACKLOG_BYTES = 128 * 1024
#: Entries of one log taken in one look at many; where there are more, that log is read by itself.
GLANCE = 16
#: Seconds between two looks at the logs of streams that are not pushed here.
LOOK = 0.1
#: How long a log may lack what was delivered before the stream is given up, s.
SHORT = 6.0
#: Pause between attempts to reach the store, s.
RETRY = 0.2


class ClientGone(Exception):
    """The client hung up."""


class Subscription:
    """One request's frames. Made by `Hub.open`, `Hub.attach` or `Hub.told`; `get` by one thread only.

    `pushed`: its frames come on this process's channel; else its log is looked at."""

    def __init__(self, hub: Hub, job_id: str, *, pushed: bool = True) -> None:
        self.job_id = job_id
        self.pushed = pushed
        self.order = Order()
        self.touched = time.monotonic()
        #: Since when the oldest frames lie here that the client has not got, monotonic, s.
        self.ready_at = self.touched
        #: The request is in the store; before that, it is no wonder that it is not there.
        self.submitted = False
        #: Since when the log lacks something, monotonic, s.
        self.short_since: float | None = None
        self._hub = hub
        self._ready = threading.Event()
        self._feeding = threading.Lock()  # frames come by the channel and from the log, each in a thread of its own
        self._entries: deque[tuple[Name, list[Frame], int]] = deque()  # with the bytes of each
        self._bytes = 0
        self._behind = False
        self._error: SluiceError | None = None
        self._gone = False

    @property
    def live(self) -> bool:
        """More frames may come."""
        return not (self.order.ended or self._gone or self._error)

    @property
    def waiting(self) -> int:
        """Entries that are kept here for the client."""
        return len(self._entries)

    @property
    def behind(self) -> bool:
        """Its client reads slower than frames come: what is new stays in the log until it has caught up."""
        return self._behind

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
        last, batch = self._pop()
        batch = [*batch]
        while self._entries and self._entries[0][0].a == last.a:
            last, more = self._pop()
            batch += more
        return last, batch

    def _pop(self) -> tuple[Name, list[Frame]]:
        with self._feeding:
            last, new, size = self._entries.popleft()
            self._bytes -= size
            return last, new

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

    def feed(self, last: Name, entry: list[Frame], size: int) -> bool:
        """Delivers what is new; `size`: bytes of the entry as JSON. False: frames before this entry are missing."""
        with self._feeding:
            return self._feed(last, entry, size)

    def _feed(self, last: Name, entry: list[Frame], size: int) -> bool:
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
            self.short_since = None
            if not self._entries:
                self.ready_at = self.touched
            self._entries.append((self.order.last, new, size))
            self._bytes += size
            self._behind = (len(self._entries) >= BACKLOG or self._bytes >= BACKLOG_BYTES) and not self.order.ended
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
        self._store: Any = connection.connect(url, max_connections=4)
        self._scripts = Scripts(self._store)
        self._store_wait = store_wait
        self._lost = lost
        self._subscribe_delay = subscribe_delay
        self._streams: dict[str, list[Subscription]] = {}
        self._repairs: deque[Subscription] = deque()
        self._attached = threading.Event()
        self._repair = threading.Event()
        self._stop = threading.Event()
        self._away_since: float | None = None
        #: Gaps that were filled from the log, for the metrics.
        self.repaired = 0

    def start(self) -> None:
        """Starts following the channel; returns at once."""
        for target in (self._follow, self._mend, self._look, self._look_at_attached):
            threading.Thread(target=self._guard, args=(target,), name=f"hub{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._repair.set()
        self._attached.set()

    def open(self, job_id: str) -> Subscription:
        """A subscription to a request from its first frame on. Open it before the request is submitted."""
        subscription = Subscription(self, job_id)
        self._streams.setdefault(job_id, []).append(subscription)
        return subscription

    def attach(self, job_id: str, *, pushed: bool) -> Subscription:
        """A subscription to a request that is in the store: all that it has said and will say. `pushed`: this process
        is the one that gets its frames."""
        subscription = Subscription(self, job_id, pushed=pushed)
        subscription.submitted = True
        self._streams.setdefault(job_id, []).append(subscription)
        self.repair_soon(subscription)
        if not pushed:
            self._attached.set()
        return subscription

    def told(self, job_id: str, last: Name, entry: list[Frame]) -> Subscription:
        """A subscription to frames that are all there; nothing is asked of the store."""
        subscription = Subscription(self, job_id)
        subscription.feed(last, entry, 0)
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
        for job_id, told in message.items():
            subscriptions = [*self._streams.get(job_id, ())]
            if not subscriptions:
                continue
            try:
                last, entry = frames.decode_told(told)
            except (ValueError, RecursionError) as error:  # the log has what it should have been
                log.warning("hub_bad_entry", job=job_id, error=str(error))
                for subscription in subscriptions:
                    self.repair_soon(subscription)
                continue
            for subscription in subscriptions:
                try:
                    if not subscription.feed(last, entry, len(told[1])):
                        self.repair_soon(subscription)
                except Exception:  # a bug of ours, on one stream: the others go on
                    log.exception("stream_failed", job=job_id)
                    subscription.fail(InternalError())

    # -- the log

    def _mend(self) -> None:
        while not self._stop.is_set():
            try:
                self._mend_all()
            except Exception:  # a bug of ours: who is still short of something comes again
                log.exception("repair_failed")
                self._stop.wait(RETRY)

    def _mend_all(self) -> None:
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
        wanted = [(subscription.job_id, subscription.order.last) for subscription in subscriptions]
        try:
            pages = self._scripts.pages(wanted, BACKLOG, BACKLOG_BYTES)
        except redis.RedisError:
            self._store_away()
            return False
        self._away_since = None
        for subscription, page in zip(subscriptions, pages, strict=True):
            if page is None:
                subscription.fail(LogLost("The log of this request is not readable."))
            else:
                self._feed_log(subscription, page.entries, more=page.more)
        return True

    def _feed_log(self, subscription: Subscription, entries: Sequence[RawEntry], *, more: bool) -> None:
        """`more`: the log has more than these."""
        before = subscription.order.last
        if before.s and not entries:
            subscription.fell_short()
            return
        for name, fields in entries:
            try:
                raw = fields[b"f"]
                whole = subscription.feed(Name.parse(name.decode()), frames.decode_entry(raw), len(raw))
            except (KeyError, ValueError, RecursionError):
                whole = False
            if not whole:
                subscription.fail(LogLost("The log of this request has a hole."))
                return
        if subscription.order.last != before:
            self.repaired += subscription.pushed
            if more and subscription.live and not subscription.behind:
                self.repair_soon(subscription)

    def _store_away(self) -> None:
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > self._store_wait:
            for subscription in self._all():
                subscription.fail(StoreUnavailable("The store has been away for too long."))

    # -- streams that are not pushed here

    def _look_at_attached(self) -> None:
        """Reads on in the logs of all attached streams, one command for fifty, as long as there are any."""
        while not self._stop.is_set():
            self._attached.wait()
            self._attached.clear()
            while (streams := self._not_pushed()) and not self._stop.wait(LOOK):
                for start in range(0, len(streams), REPAIR_BATCH):
                    self._read_on([stream for stream in streams[start : start + REPAIR_BATCH] if not stream.behind])

    def _not_pushed(self) -> list[Subscription]:
        return [subscription for subscription in self._all() if not subscription.pushed and subscription.live]

    def _read_on(self, subscriptions: list[Subscription]) -> None:
        """One look; of two subscriptions to one request, from the one that is further behind."""
        ahead: dict[str, Name] = {}
        for subscription in subscriptions:
            last = subscription.order.last
            ahead[subscription.job_id] = min(last, ahead.get(subscription.job_id, last))
        if not ahead:
            return
        logs = {keys.log(job_id): str(last) for job_id, last in ahead.items()}
        try:
            answer = self._store.xread(logs, count=GLANCE)
        except redis.ResponseError:  # something else lies where one's log belongs: each by itself
            self._read_logs(subscriptions)
            return
        except redis.RedisError:
            self._store_away()
            return
        self._away_since = None
        said = {name.decode(): entries for name, entries in answer}
        for subscription in subscriptions:
            if entries := said.get(keys.log(subscription.job_id)):
                self._feed_log(subscription, entries, more=len(entries) == GLANCE)

    # -- silence

    def _look(self) -> None:
        """Streams that heard nothing for a while: is there something in the log, and is the job still there?"""
        while not self._stop.wait(1.0):
            try:
                self._look_at_silent()
            except Exception:  # a bug of ours: without this thread nobody would be told that a worker is gone
                log.exception("look_failed")

    def _look_at_silent(self) -> None:
        now = time.monotonic()
        silent = [s for s in self._all() if s.live and s.submitted and not s.behind and now - s.touched > IDLE]
        for start in range(0, len(silent), REPAIR_BATCH):
            batch = silent[start : start + REPAIR_BATCH]
            try:
                pipeline = self._store.pipeline(transaction=False)
                for subscription in batch:
                    pipeline.hmget(keys.job(subscription.job_id), "status", "terminal")
                there = [*map(connection.unless_another_type, pipeline.execute(raise_on_error=False))]
            except redis.RedisError:
                self._store_away()
                break
            self._away_since = None
            for subscription, fields in zip(batch, there, strict=True):
                subscription.touched = now
                status, terminal = fields or (None, None)
                if status is None:
                    subscription.fail(JobLost("The store no longer has this request."))
                    continue
                if terminal:  # its end should be in the log
                    subscription.fell_short()
                self.repair_soon(subscription)
                self._lost(subscription.job_id)
