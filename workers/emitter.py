"""Carries frames from the lanes into the store: one thread, one connection, two round trips a step.

First one XADD a lane with all its frames since the last; then, for what was accepted, one PUBLISH a home channel
and the ends. The log's ids are the fence: a lane that was overtaken is refused by the store itself. A lane's
first write on a new connection, and any after an error, goes through emit.lua, which adds only behind the very
frame that the lane wrote last; where the store came back with older data, the lane puts back what it lost. Knows
nothing of engines and tokens.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import hiredis
import redis
import structlog

from shared import connection, frames, keys, scripts
from shared.errors import InternalError, SluiceError
from shared.frames import Error, Name
from workers.lane import Lane

log = structlog.get_logger(__name__)

#: Pause between attempts to reach the store, s.
RETRY = 0.2
#: Bytes after which an entry takes no further frames of what has piled up; the rest goes in the next round.
ENTRY_BYTES = 64 * 1024

Command = tuple[Any, ...]


class Emitter(threading.Thread):
    """`over(lane, won)` is called from this thread when a lane has said its last: `won` if its end is the request's.

    `worker` is a function because a worker that was retired goes on under a new name; its lanes keep the one that they
    were taken under.
    """

    def __init__(self, url: str, worker: Callable[[], str], over: Callable[[Lane, bool], None]) -> None:
        super().__init__(name="emitter", daemon=True)
        self._connection = connection.raw(url)
        self._connected = False
        self._worker = worker
        self._over = over
        self._dirty: dict[Lane, None] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        #: Counts connections; a lane that wrote on this one may add without emit.lua.
        self._epoch = 0
        self._refusals = 0
        self._said = ""

    def notify(self, lanes: Iterable[Lane]) -> None:
        """These lanes have something to say. Never blocks on the store."""
        with self._lock:
            self._dirty.update(dict.fromkeys(lanes))
        self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                work, self._dirty = list(self._dirty), {}
            if not work:
                continue
            try:
                self._connect()
                self.notify(self._round(work))
                if self._refusals:
                    self._stopping.wait(RETRY)
                else:
                    self._said = ""
            except (redis.RedisError, OSError) as error:
                self._say("store_lost", error)
                self._start_again(work)
            except Exception:
                log.exception("emitter_failed")
                self._start_again(work)

    def _start_again(self, work: list[Lane]) -> None:
        """After a failure answers may still be under way: on a new connection, behind a pause."""
        self._connection.disconnect()
        self._connected = False
        self.notify(work)
        self._stopping.wait(RETRY)

    def _say(self, event: str, error: Exception) -> None:
        """Logs what keeps the store from taking writes, once until it is another thing or over."""
        if self._said != (what := f"{event}: {error}"):
            self._said = what
            log.warning(event, error=str(error))

    def _connect(self) -> None:
        if self._connected:
            return
        self._connection.connect()
        self._epoch += 1
        self._exchange([("SCRIPT", "LOAD", scripts.text(name)) for name in ("emit", "end", "put_back", "release")])
        self._connected = True

    def _exchange(self, commands: list[Command]) -> list[Any]:
        """Sends all, then reads an answer each; an error answer is returned, not raised."""
        self._connection.send_packed_command([b"".join([hiredis.pack_command(command) for command in commands])])
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self._connection.read_response(disable_decoding=True))
            except redis.exceptions.NoScriptError as error:
                self._connected = False  # the store forgot its scripts: load them again before the next round
                answers.append(error)
            except redis.ResponseError as error:
                answers.append(error)
        return answers

    def _round(self, lanes: list[Lane]) -> list[Lane]:
        """Writes what the lanes have; returns those that have more to do."""
        self._refusals = 0
        for lane in lanes:
            if lane.dropped:
                self._over(lane, False)
            elif lane.lost:
                self._put_back(lane)
                lane.lost = False
        lanes = [lane for lane in lanes if not lane.dropped]
        written = self._write(lanes)
        quiet = [lane for lane in lanes if not lane.outbox and not lane.inflight and not lane.dropped]
        ending = [lane for lane in quiet if lane.terminal]
        leaving = [lane for lane in quiet if lane.handing_over and not lane.terminal]
        self._publish_and_end(written, ending, leaving)
        return [lane for lane in lanes if not lane.dropped and (lane.outbox or lane.inflight or lane.closing)]

    # -- first round trip

    def _write(self, lanes: list[Lane]) -> list[tuple[Lane, Name, bytes]]:
        """Adds the lanes' entries; returns those that must be published."""
        sending: list[tuple[Lane, Name, bytes, bool]] = []
        commands: list[Command] = []
        for lane in lanes:
            if lane.inflight is None and lane.outbox:
                lane.inflight = self._next_entry(lane)
            if lane.inflight is None:
                continue
            name, entry = lane.inflight
            plain = lane.epoch == self._epoch
            sending.append((lane, name, entry, plain))
            commands.append(_xadd(lane, name, entry) if plain else _emit(lane, name, entry))
        written: list[tuple[Lane, Name, bytes]] = []
        for (lane, name, entry, plain), answer in zip(
            sending, self._exchange(commands) if commands else (), strict=True
        ):
            if isinstance(
                answer, redis.ResponseError
            ):  # equal or smaller, out of memory, read only: emit.lua will tell
                lane.epoch = -1
                if plain:
                    continue
                if _concerns_one_key(answer):
                    self._give_up(lane, answer)
                else:  # refused twice: the store takes nothing now
                    self._say("write_refused", answer)
                    self._refusals += 1
            elif answer is None:  # there is no log any more
                lane.epoch = -1
            elif plain or answer[0] == b"ok":
                lane.epoch = self._epoch
                lane.written, lane.inflight = name, None
                lane.log.append((name, entry))
                if plain:
                    written.append((lane, name, entry))
            else:
                self._refused(lane, Name(int(answer[1]), int(answer[2])))
        return written

    def _not_let_go(self, lane: Lane, event: str, error: redis.ResponseError) -> None:
        """The store did not take a lane's end, or did not take it back."""
        if _concerns_one_key(error):
            self._give_up(lane, error)
        else:
            self._say(event, error)
            self._refusals += not isinstance(error, redis.exceptions.NoScriptError)

    def _give_up(self, lane: Lane, error: redis.ResponseError) -> None:
        log.warning("lane_given_up", job=lane.job.id, error=str(error))
        lane.dropped = True
        self._over(lane, False)

    def _next_entry(self, lane: Lane) -> tuple[Name, bytes] | None:
        """The frames of the lane's outbox as one entry, named behind what is written."""
        batch: list[bytes] = []
        size = 0
        try:
            while lane.outbox and size < ENTRY_BYTES:
                batch += (together := [frames.encode_frame(frame) for frame in lane.outbox.popleft()])
                size += sum(map(len, together))
        except Exception:  # a bug of ours, on one lane: the others go on
            log.exception("lane_failed", job=lane.job.id)
            _end_with(lane, InternalError())
            return None
        return Name(lane.attempt, lane.written.s + len(batch)), b"[" + b",".join(batch) + b"]"

    def _refused(self, lane: Lane, top: Name) -> None:
        """emit.lua found another frame on top than the one this lane wrote last."""
        if top.a > lane.attempt or top.s > lane.written.s:
            log.debug("fenced", job=lane.job.id, attempt=lane.attempt, top=str(top))
            lane.dropped = True
            self._over(lane, False)
            return
        self._put_back(lane)

    def _put_back(self, lane: Lane, end: bytes = b"") -> None:
        """The store lost what this lane had written, as it came back with older data: it gets it again, with the
        entry under way if there is one, and with `end` if the lane has ended."""
        log.warning("put_back", job=lane.job.id, written=str(lane.written))
        if lane.inflight is not None:
            lane.log.append(lane.inflight)
        answer = self._exchange([_put_back(lane, self._owner(lane), end)])[0]
        if isinstance(answer, redis.ResponseError):
            if lane.inflight is not None:
                lane.log.pop()
            self._not_let_go(lane, "put_back_refused", answer)
            return
        if lane.inflight is not None:
            lane.written, lane.inflight = lane.inflight[0], None
        if answer[0] == b"ok":
            lane.epoch = self._epoch
            return
        lane.dropped = True
        self._over(lane, answer[0] == b"ended")

    # -- second round trip

    def _publish_and_end(
        self, written: list[tuple[Lane, Name, bytes]], ending: list[Lane], leaving: list[Lane]
    ) -> None:
        channels: dict[str, list[tuple[str, Name, bytes]]] = defaultdict(list)
        for lane, name, entry in written:
            if lane.home:
                channels[keys.node_channel(lane.home)].append((lane.job.id, name, entry))
            if lane.fanout:
                channels[keys.out_channel(lane.job.id)].append((lane.job.id, name, entry))
        commands: list[Command] = [
            ("PUBLISH", channel, frames.message(entries)) for channel, entries in channels.items()
        ]
        commands += [self._end(lane) for lane in ending]
        commands += [_release(lane, self._owner(lane)) for lane in leaving]
        if not commands:
            return
        answers = self._exchange(commands)[len(channels) :]
        for lane, answer in zip(leaving, answers[len(ending) :], strict=True):
            if isinstance(answer, redis.ResponseError):
                self._not_let_go(lane, "release_refused", answer)
                continue
            lane.dropped = True
            self._over(lane, False)
        for lane, answer in zip(ending, answers[: len(ending)], strict=True):
            if isinstance(answer, redis.ResponseError):
                self._not_let_go(lane, "end_refused", answer)
                continue
            code, by = int(answer[0]), answer[1] if len(answer) > 1 else b""
            if code in (-1, -3):
                assert lane.terminal is not None
                self._put_back(lane, frames.encode_frame(lane.terminal))
                continue
            lane.dropped = True
            self._over(lane, code == 1 or (code == 0 and by == self._owner(lane).encode()))

    def _end(self, lane: Lane) -> Command:
        assert lane.terminal is not None
        seq, attempt = str(lane.written.s), str(lane.attempt)
        frame = frames.encode_frame(lane.terminal)
        return ("EVALSHA", scripts.sha("end"), "0", lane.job.id, attempt, seq, self._owner(lane), frame, lane.outcome)

    def _owner(self, lane: Lane) -> str:
        """The name that the lane was taken under."""
        return lane.fields.get(b"owner", b"").decode() or self._worker()


def _xadd(lane: Lane, name: Name, entry: bytes) -> Command:
    """Never makes a log: what comes late, when the request has long been forgotten, would stay for ever."""
    return ("XADD", keys.log(lane.job.id), "NOMKSTREAM", str(name), "f", entry)


def _emit(lane: Lane, name: Name, entry: bytes) -> Command:
    before = lane.written
    return (
        "EVALSHA",
        scripts.sha("emit"),
        "0",
        lane.job.id,
        str(name.a),
        str(name.s),
        str(before.a),
        str(before.s),
        entry,
        lane.home,
        "1" if lane.fanout else "",
    )


def _release(lane: Lane, worker: str) -> Command:
    return ("EVALSHA", scripts.sha("release"), "0", worker, lane.job.id, str(lane.attempt))


def _put_back(lane: Lane, worker: str, end: bytes) -> Command:
    fields = [part for pair in lane.fields.items() for part in pair]
    entries = [part for name, entry in lane.log for part in (str(name), entry)]
    head = ("EVALSHA", scripts.sha("put_back"), "0", lane.job.id, str(lane.attempt), worker, end, lane.outcome)
    return (*head, str(len(fields)), *fields, *entries)


def _end_with(lane: Lane, error: SluiceError) -> None:
    """Ends a lane from the emitter's side; the engine's thread sees it at the next step."""
    lane.outbox.clear()
    lane.inflight = None
    lane.outcome = "failed"
    lane.terminal = Error.of(error)


def _concerns_one_key(error: redis.ResponseError) -> bool:
    """Somebody put something else where this lane's log or job belongs: nothing it writes will ever be taken."""
    return "WRONGTYPE" in str(error)
