"""Stores behind Sentinel: `redis+sentinel://host:26379,host2:26379/name/0` finds the primary at each new connection.

A connection that finds itself at a replica after a failover ends; the next one asks again. So whoever handles a lost
connection handles a failover. Knows nothing of what is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.connection import Connection, SSLConnection

#: Scheme -> that of the stores themselves. With `rediss`, the sentinels speak TLS too.
SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
#: Longest time one sentinel may take to answer, s: another one may know.
ASK_TIMEOUT = 1.0
PORT = 26379


class Watched(NamedTuple):
    """A store that sentinels watch. `url`: that of the stores, whose host is to be found; it may hold a password."""

    sentinels: list[tuple[str, int]]
    name: str
    url: str
    username: str | None
    password: str | None


def is_watched(url: str) -> bool:
    return urlsplit(url).scheme in SCHEMES


def parse(url: str) -> Watched:
    """`scheme://[user:password@]host[:port][,host[:port]...]/name[/db][?db=...&sentinel_username=...&sentinel_password=...]`

    User and password are the store's; other parameters are those of a plain address (`ssl_ca_certs`, ...). Raises
    ValueError."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    name, _, db = unquote(parts.path.strip("/")).partition("/")
    if not name or not hosts:
        raise ValueError("it looks like redis+sentinel://host:26379,host2:26379/name-of-the-primary/0")
    options = dict(parse_qsl(parts.query))
    username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
    if db:
        options["db"] = db
    if not options.get("db", "0").isdecimal():
        raise ValueError(f"{options['db']!r} is no database number")
    store = f"{SCHEMES[parts.scheme]}://{login}{at}{name}"
    return Watched([_host(h) for h in hosts.split(",")], name, f"{store}?{urlencode(options)}", username, password)


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host")
    return parts.hostname, parts.port or PORT


def connection_class(url: str) -> type[Connection]:
    """The class whose connections go to the primary that is named by a `Watched.url`."""
    return _TlsToPrimary if url.startswith("rediss") else _ToPrimary


class _ToPrimary(Connection):
    """`watched` comes with the pool's options."""

    def __init__(self, *, watched: Watched, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._watched = watched

    def _connect(self) -> Any:
        self.host, self.port = self._find_primary()
        return super()._connect()  # type: ignore[no-untyped-call]

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        # sentinels may be behind: an old primary that came back takes writes which it will throw away
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        if bytes(self.read_response(disable_decoding=True)[0]) != b"master":
            raise redis.ConnectionError(f"{self.host}:{self.port} is not the primary any more")

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.exceptions.ReadOnlyError as error:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError(f"{self.host}:{self.port} became a replica") from error

    def _find_primary(self) -> tuple[str, int]:
        asking, failures = list(self._watched.sentinels), []
        for sentinel in asking:
            try:
                found = self._ask(*sentinel)
            except (redis.RedisError, OSError) as error:
                failures.append(str(error))
                continue
            if found is None:
                failures.append(f"{sentinel[0]}:{sentinel[1]} knows no primary {self._watched.name}")
                continue
            # who answers is asked first the next time; other threads look for the primary meanwhile
            self._watched.sentinels[:] = [sentinel, *(other for other in asking if other != sentinel)]
            return found
        raise redis.ConnectionError(f"No sentinel tells where the store is: {'; '.join(failures)}")

    def _ask(self, host: str, port: int) -> tuple[str, int] | None:
        asked = self._to_sentinel(host, port)
        try:
            asked.connect()
            asked.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._watched.name)
            answer = asked.read_response(disable_decoding=True)
        finally:
            asked.disconnect()
        return None if answer is None else (answer[0].decode(), int(answer[1]))

    def _to_sentinel(self, host: str, port: int, **more: Any) -> Any:
        base: type[Connection] = SSLConnection if isinstance(self, SSLConnection) else Connection
        return base(
            host=host,
            port=port,
            username=self._watched.username,
            password=self._watched.password,
            socket_timeout=ASK_TIMEOUT,
            socket_connect_timeout=ASK_TIMEOUT,
            retry=self.retry,
            protocol=2,
            **more,
        )


class _TlsToPrimary(_ToPrimary, SSLConnection):
    """The same over TLS."""

    def __init__(self, *, watched: Watched, **options: Any) -> None:
        super().__init__(watched=watched, **options)
        self._tls = {name: value for name, value in options.items() if name.startswith("ssl_")}

    def _to_sentinel(self, host: str, port: int, **more: Any) -> Any:
        return super()._to_sentinel(host, port, **self._tls)
