"""What a worker is told from outside: cancelled requests, and RQ's commands (stop-job, shutdown).

One subscription that comes back by itself; after every gap the lanes are compared with the store, so that a
command that nobody heard is not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import redis
import structlog

from shared import connection, keys

log = structlog.get_logger(__name__)

#: Silence after which the connection is pinged, s.
IDLE = 3.0
RETRY = 0.3


class Control(threading.Thread):
    """`cancelled(job id)`: the request has ended in the store. `command(payload)`: an RQ command.
    `resubscribed`: the channels are heard again, anything may have been missed."""

    def __init__(
        self,
        url: str,
        worker: Callable[[], str],
        *,
        cancelled: Callable[[str], None],
        command: Callable[[dict[str, Any]], None],
        resubscribed: Callable[[], None],
    ) -> None:
        super().__init__(name="control", daemon=True)
        self._url, self._worker = url, worker
        self._cancelled, self._command, self._resubscribed = cancelled, command, resubscribed
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            channel = connection.raw(self._url)
            try:
                channel.connect()
                self._listen(channel, self._worker())
            except (redis.RedisError, OSError) as error:
                if not self._stopping.is_set():
                    log.warning("control_connection_lost", error=str(error))
            except Exception:
                log.exception("control_failed")
            finally:
                channel.disconnect()
            self._stopping.wait(RETRY)

    def _listen(self, channel: Any, worker: str) -> None:
        """Until the connection breaks or the worker has another name."""
        names = keys.control_channel(worker), f"rq:pubsub:{worker}"
        listening = connection.listen(
            channel, *names, idle=IDLE, more=lambda: not self._stopping.is_set() and worker == self._worker()
        )
        for kind, payload in listening:
            if kind == b"subscribe":
                self._resubscribed()
            elif kind == b"message":
                self._heard(payload)

    def _heard(self, payload: bytes) -> None:
        try:
            message = msgspec.json.decode(payload)
        except (ValueError, RecursionError):  # anybody may publish
            log.warning("control_bad_message")
            return
        match message:
            case ["cancel", str(job_id)]:
                self._cancelled(job_id)
            case {"command": str()}:
                self._command(message)
            case _:
                log.warning("control_unknown_message")
