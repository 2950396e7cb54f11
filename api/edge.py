"""What happens to every request and response, whatever the route.

Around Flask (`Edge`): a trailing slash goes, requests are counted. Inside (`install`): ids and timings, the gate of
the mode without keys, and the orderly end of a connection whose body was not read. Knows no resource.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, g, request
from werkzeug.wsgi import ClosingIterator

from api.body import close_after, leftover_is_large, linger
from api.cors import tell_origin
from api.lifecycle import Lifecycle
from shared.errors import Forbidden, InvalidRequest, UnsupportedParameter
from shared.settings import Settings

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: Open whatever the Host says: probes come by address.
PROBES = frozenset({"/health", "/ready"})

_REQUEST_ID = re.compile(r"[ -~]{1,128}")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]/@?#\s]+)(:[0-9]{1,5})?")
_IGNORABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Most names in x-sluice-ignored.
MAX_IGNORED = 10


class Edge:
    """The WSGI layer around the app."""

    def __init__(self, app: Callable[..., Iterable[bytes]], lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if len(path) > 1 and path.endswith("/"):
            environ["PATH_INFO"] = path[:-1]
        self._lifecycle.begin()
        try:
            return ClosingIterator(self._app(environ, start_response), self._lifecycle.end)
        except BaseException:
            self._lifecycle.end()
            raise


def install(app: Flask, settings: Settings) -> None:
    known_hosts = LOOPBACK_HOSTS | {host.lower() for host in settings.allowed_hosts}
    origins = frozenset(settings.cors_origins)

    @app.before_request
    def arrive() -> None:
        g.started = time.perf_counter()
        g.request_id = _request_id()
        _check_framing()
        if request.path not in PROBES:
            _check_host(known_hosts, origins)

    @app.after_request
    def leave(response: Response) -> Response:
        response.headers["x-request-id"] = g.request_id
        response.headers["openai-processing-ms"] = str(round((time.perf_counter() - g.started) * 1000))
        for header in ("x-sluice-id", "x-sluice-ignored", "x-sluice-max-tokens"):
            if header in g:
                response.headers[header] = g.get(header)
        tell_origin(response, origins)
        if leftover_is_large(request.environ):
            close_after(request.environ)
            connection = request.environ.get("gunicorn.socket")
            response.call_on_close(lambda: linger(connection))
        return response


def announce(header: str, value: str) -> None:
    """Puts one of Sluice's own headers on this request's response, also if that turns out to be an error."""
    setattr(g, header, value)


def ignored_header(names: list[str]) -> str:
    """x-sluice-ignored: at most ten names that are fit for a header, then how many more there are."""
    shown = [name for name in names if _IGNORABLE.fullmatch(name)][:MAX_IGNORED]
    rest = len(names) - len(shown)
    return ", ".join(shown + ([f"+{rest}"] if rest else []))


def tell_ignored(names: list[str], *, strict: bool = False) -> None:
    """Names the fields that had no effect; if `strict`, refuses them. Raises UnsupportedParameter."""
    if not names:
        return
    if strict:
        raise UnsupportedParameter(f"There is no field {names[0][:64]!a}.", param=names[0][:64])
    announce("x-sluice-ignored", ignored_header(names))


def _request_id() -> str:
    for header in ("X-Request-Id", "X-Client-Request-Id"):
        value = request.headers.get(header, "")
        if _REQUEST_ID.fullmatch(value):
            return value
    return f"req-{secrets.token_hex(12)}"


def _check_framing() -> None:
    """A transfer coding other than chunked alone may be read in another way by a server in front of this one, and what
    one takes for a body be a request to the other (RFC 9112 section 6.1, CVE-2024-1135): refused, and the connection
    ends with it."""
    if request.environ.get("HTTP_TRANSFER_ENCODING", "chunked").lower() != "chunked":
        close_after(request.environ)
        raise InvalidRequest("Transfer-Encoding must be chunked, or absent.", code="bad_request")


def _check_host(known: frozenset[str], origins: frozenset[str]) -> None:
    """Without keys, a web page must not reach us by way of its visitor's browser: neither under a name of its own
    (DNS rebinding) nor by a request across origins."""
    host = _HOST.fullmatch(request.environ.get("HTTP_HOST", ""))
    if host is None or host["name"].lower() not in known:
        raise Forbidden("This Host is not known here; see the setting allowed_hosts.")
    origin = request.environ.get("HTTP_ORIGIN")
    if origin is None or origin in origins:
        return
    try:
        parts = urlsplit(origin)
        foreign = parts.scheme not in ("http", "https") or _host_of(parts.netloc) not in known
    except ValueError:
        foreign = True
    if foreign:
        raise Forbidden("Requests from this Origin are not allowed.")


def _host_of(netloc: str) -> str:
    match = _HOST.fullmatch(netloc)
    return match["name"].lower() if match else ""
