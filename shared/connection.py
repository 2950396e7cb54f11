"""Connections to the store, set so that redis-py does nothing behind our back.

redis-py 8 reads with a 5 s socket timeout and repeats a failed command up to ten times by itself; a repeated
write can be a second write. Here every command is sent once and every blocking read is shorter than the socket
timeout. Answers come as RESP2, whose shapes do not depend on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared import sentinel

#: Longest a socket may stay silent while an answer is due, s.
SOCKET_TIMEOUT = 5.0
#: Longest a blocking command may wait in the store, s; strictly below SOCKET_TIMEOUT.
BLOCK_TIMEOUT = 2.0


def _options() -> dict[str, Any]:
    return {
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": SOCKET_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "protocol": 2,
        "decode_responses": False,
    }


def _resolved(url: str) -> tuple[str, dict[str, Any]]:
    """An address that redis-py can read, and the options that go with it."""
    if not sentinel.is_watched(url):
        return url, _options()
    watched = sentinel.parse(url)
    return watched.url, {
        **_options(),
        "watched": watched,
        "connection_class": sentinel.connection_class(watched.url),
    }


def connect(url: str, *, max_connections: int = 32) -> redis.Redis:
    """A client with a bounded pool: callers beyond `max_connections` wait for a connection.

    Raises ValueError for a URL that is none. Connects on first use. `redis+sentinel://`: see shared/sentinel.py."""
    url, options = _resolved(url)
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=max_connections, timeout=SOCKET_TIMEOUT, **options
    )
    return redis.Redis(connection_pool=pool)


def raw(url: str) -> Any:
    """One connection of its own, not connected yet: a redis-py Connection (`send_packed_command`, `read_response`).

    It logs in, selects the database and speaks TLS as the URL says; what is sent and read is the caller's."""
    url, options = _resolved(url)
    pool = redis.ConnectionPool.from_url(url, **options)
    return pool.make_connection()


def listen(channel: Any, *names: str | bytes, idle: float, more: Callable[[], bool]) -> Iterator[tuple[bytes, bytes]]:
    """Subscribes a raw connection to channels and yields (kind, payload): `subscribe` for each that is heard now,
    `message`, and `pong` after a silence of `idle` seconds.

    Ends when `more()` is false (looked at after each answer and each silence). A connection that only seems open is
    found by the ping: raises redis.ConnectionError, as for one that breaks."""
    channel.send_command("SUBSCRIBE", *names)
    pinged = False
    while more():
        if not channel.can_read(timeout=idle):
            if pinged:
                raise redis.ConnectionError("no answer to PING on the subscription")
            channel.send_command("PING")
            pinged = True
            continue
        pinged = False
        answer = channel.read_response(disable_decoding=True)
        if isinstance(answer, list) and len(answer) >= 2:
            yield answer[0], answer[-1] if answer[0] == b"message" else b""


def unless_another_type(answer: Any) -> Any:
    """An answer of a pipeline that returns errors; None where the key is of another type, which says nothing about the
    other answers and nothing about the store. Raises any other error."""
    if isinstance(answer, redis.RedisError):
        if "WRONGTYPE" not in str(answer):
            raise answer
        return None
    return answer
