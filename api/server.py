"""gunicorn, set up in code: gevent workers that drain well and never answer in HTML.

One app per process, created after the fork. Expects to run in a process that gevent has patched (`api/__main__.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gevent
import gevent.event
import gevent.pool
import gevent.server
import structlog
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from gunicorn.http.errors import ParseException
from gunicorn.workers.ggevent import GeventWorker

from api.app import create_app
from api.body import CLOSE, linger
from api.errors import error_response
from api.relay.watcher import Watcher
from api.services import Services, services_of
from shared.api_keys import keys_configured
from shared.errors import InternalError, InvalidRequest, SluiceError
from shared.exposure import check_exposure
from shared.parent import die_with_parent
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Open connections of one process, idle ones included.
CONNECTIONS = 10_000
#: Longest idle time of a kept connection, s; above the 60 s that proxies keep theirs.
KEEPALIVE = 75
#: A process whose event loop stands still for this long is replaced, s. Says nothing about how long a stream may take.
STUCK = 60
#: What gunicorn grants a draining process beyond `drain_s`, to end what is left in good order, s.
LAST_WORDS = 5
#: A peer that vanished without a word is found after KEEPIDLE + KEEPCNT x KEEPINTVL s.
KEEPIDLE, KEEPINTVL, KEEPCNT = 30, 10, 3

#: Makes a process's app; tests wire their own.
AppFactory = Callable[[Settings, Watcher], Any]


def serve(settings: Settings, make_app: AppFactory | None = None) -> None:
    """Runs the API until it is told to stop. Raises Exposed when the settings would open it to everyone."""
    check_exposure(settings, keys=keys_configured(settings.redis_url))
    _Server(settings, make_app or (lambda settings, watcher: create_app(settings, watcher=watcher))).run()


class _Logger(Logger):  # type: ignore[misc]
    """What gunicorn itself has to say, among our lines and in their form (`shared/logs.py`)."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


class _Server(BaseApplication):  # type: ignore[misc]
    """gunicorn's application object: its configuration, and the app of each process."""

    def __init__(self, settings: Settings, make_app: AppFactory) -> None:
        self.settings = settings
        self._make_app = make_app
        super().__init__()

    def load_config(self) -> None:
        settings = self.settings
        host = f"[{settings.host}]" if ":" in settings.host and not settings.host.startswith("[") else settings.host
        for name, value in {
            "bind": [f"{host}:{settings.port}"],
            "workers": settings.api_workers,
            "worker_class": ApiWorker,
            "worker_connections": CONNECTIONS,
            "worker_tmp_dir": "/dev/shm" if os.access("/dev/shm", os.W_OK) else None,
            "timeout": STUCK,
            "graceful_timeout": int(settings.drain_s) + LAST_WORDS,
            "keepalive": KEEPALIVE,
            # no proxy is believed unless it is named; gunicorn would believe those on this machine
            "forwarded_allow_ips": ",".join(settings.trusted_proxies),
            "forwarder_headers": "",  # and none may say which path was asked for (SCRIPT_NAME, PATH_INFO)
            "accesslog": None,
            "errorlog": "-",
            "logger_class": _Logger,
            # at its debug level it says paths, which may hold anything
            "loglevel": "info" if settings.log_level == "DEBUG" else settings.log_level.lower(),
            "preload_app": False,
            "control_socket_disable": True,
            "proc_name": "sluice-api",
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        return self._make_app(self.settings, Watcher())


class ApiWorker(GeventWorker):  # type: ignore[misc]
    """One API process.

    Told to stop, it goes on listening and answering 503 while its running requests come to their end, up to `drain_s`
    seconds; an idle one ends at once, kept connections or not. (gunicorn's own worker stops listening first and waits
    for kept connections to time out.)
    """

    services: Services
    wsgi: Any

    def init_signals(self) -> None:
        self._stopping = gevent.event.Event()
        super().init_signals()

    def init_process(self) -> None:
        die_with_parent()  # first of all: fork has cleared the death signal
        super().init_process()

    def load_wsgi(self) -> None:
        super().load_wsgi()
        app = self.wsgi
        self.services = services_of(app)

        def with_close(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            environ[CLOSE] = start_response.__self__.force_close
            answer: Iterable[bytes] = app(environ, start_response)
            return answer

        self.wsgi = with_close

    def run(self) -> None:
        servers = []
        for listener in self.sockets:
            listener.setblocking(1)
            pool = gevent.pool.Pool(self.worker_connections)
            server = gevent.server.StreamServer(listener, handle=partial(self.handle, listener), spawn=pool)
            if self.cfg.workers > 1:
                server.max_accept = 1
            server.start()
            servers.append(server)
        while self.alive:
            self.notify()
            self._stopping.wait(1.0)
        left_behind = self._drain()
        for server in servers:
            server.stop(timeout=0.5)
        self.services.close(left_behind=left_behind)

    def _drain(self) -> bool:
        """True if requests were given up."""
        lifecycle = self.services.lifecycle
        lifecycle.drain()
        if self._idle_within(self.services.settings.drain_s):
            return False
        log.warning("drain_time_over", seconds=self.services.settings.drain_s)
        given_up = lifecycle.give_up()
        self._idle_within(LAST_WORDS - 2)
        return given_up

    def _idle_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.notify()
            if self.services.lifecycle.wait_idle(min(1.0, left)):
                return True
        return self.services.lifecycle.wait_idle(0)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        if client.family in (socket.AF_INET, socket.AF_INET6):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPIDLE)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPINTVL)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPCNT)
        super().handle(listener, client, addr)

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        self._stopping.set()

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """What is no HTTP, or went wrong outside the app: gunicorn would answer in HTML."""
        if isinstance(exc, gevent.GreenletExit):  # the process ends; this connection was idle
            return
        if isinstance(exc, ParseException):
            error: SluiceError = InvalidRequest(f"This is not valid HTTP ({type(exc).__name__}).", code="bad_request")
        else:
            log.error("connection_failed", exc_info=exc)
            error = InternalError()
        response = error_response(error)
        head = [f"HTTP/1.1 {response.status}", "Connection: close", f"x-request-id: req-{secrets.token_hex(12)}"]
        head += [f"{name}: {value}" for name, value in response.headers]
        with contextlib.suppress(OSError):
            client.sendall("\r\n".join([*head, "", ""]).encode("latin-1") + response.data)
        linger(client)
