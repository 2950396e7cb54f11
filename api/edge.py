"""What happens to every request and response, whatever the route.

Around Flask (`Edge`): a trailing slash goes, requests are counted. Inside (`install`): ids and timings, the gate
(`api/auth.py`), and the orderly end of a connection whose body was not read. Knows no resource.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from flask import Flask, Response, g, request
from werkzeug.wsgi import ClosingIterator

from api.auth import Gate, caller
from api.body import close_after, leftover_is_large, linger
from api.cors import tell_origin
from api.lifecycle import Lifecycle
from api.limits import RATE_HEADERS, Admission, Limits
from api.visit import VISIT, Visit, visit
from shared.counts import Counts
from shared.errors import InvalidRequest, UnsupportedParameter
from shared.jobs import Job
from shared.measures import OTHER
from shared.settings import Settings
from shared.tracing import Tracer

_REQUEST_ID = re.compile(r"[ -~]{1,128}")
_IGNORABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: The headers that `announce` sets.
TOLD = ("x-sluice-id", "x-sluice-ignored", "x-sluice-max-tokens", *RATE_HEADERS)
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

        def end() -> None:
            self._lifecycle.end()
            if VISIT in environ:
                environ[VISIT].close()

        try:
            return ClosingIterator(self._app(environ, start_response), end)
        except BaseException:
            end()
            raise


def install(app: Flask, settings: Settings, gate: Gate, counts: Counts, tracer: Tracer) -> None:
    origins = frozenset(settings.cors_origins)

    @app.before_request
    def arrive() -> None:
        route = request.url_rule.rule if request.url_rule is not None else ""
        traceparent = request.headers.get("traceparent", "")
        g.visit = request.environ[VISIT] = Visit(tracer, request.method, route, traceparent, _request_id())
        _check_framing()
        gate.enter()

    @app.after_request
    def leave(response: Response) -> Response:
        visit().answered(response.status_code)
        response.headers["x-request-id"] = visit().request_id
        response.headers["openai-processing-ms"] = str(round((time.perf_counter() - visit().began) * 1000))
        response.headers.update(told())
        if "admission" in g:
            response.call_on_close(g.admission.settle)  # behind those of the route: it has let go of the job by then
        _count(counts, response)
        tell_origin(response, origins)
        if leftover_is_large(request.environ):
            close_after(request.environ)
            connection = request.environ.get("gunicorn.socket")
            response.call_on_close(lambda: linger(connection))
        return response


def _count(counts: Counts, response: Response) -> None:
    """For the metrics; how long it took, when the last byte is out."""
    endpoint = request.url_rule.rule if request.url_rule is not None else OTHER
    counts.add("http_requests", [endpoint, f"{response.status_code // 100}xx", g.get("model", "")])
    duration, began = counts.histogram("http_request_duration", endpoint), visit().began
    response.call_on_close(lambda: duration.observe(time.perf_counter() - began))


def asks_for(model: str) -> None:
    """The id of the model that the current request is for, where that is one."""
    g.model = model


def tenant() -> str:
    """Whose request this is; other tenants' requests do not exist for it."""
    return caller().tenant


def visible_tenant() -> str:
    """Whose requests there are for this one: its own tenant's, or "*", everybody's."""
    return "*" if caller().sees_all else tenant()


def admit(limits: Limits, job: Job) -> Admission:
    """Lets a request in under the limits of its key, which are told in headers; settled when the response is closed.

    Raises RateLimited or StoreUnavailable."""
    admission: Admission = limits.admit(caller().key, job, announce)
    g.admission = admission
    return admission


def announce(header: str, value: str) -> None:
    """Puts one of Sluice's own headers on this request's response, also if that turns out to be an error."""
    setattr(g, header, value)


def tell_job(job_id: str) -> None:
    """Names the job that this request is about: in x-sluice-id, and to who reads logs and traces."""
    announce("x-sluice-id", job_id)
    visit().of_job(job_id)


def told() -> dict[str, str]:
    """What was announced so far."""
    return {header: g.get(header) for header in TOLD if header in g}


def forget_told() -> None:
    """Before another request of the same connection."""
    for header in TOLD:
        g.pop(header, None)


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
