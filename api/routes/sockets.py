"""`/v1/stream`: completions and chats over a WebSocket (RFC 6455), with the chunks and the event ids of the SSE streams.

One request at a time on a connection; `cancel` at any time. Reading and checking, submission and resumption are those of
`api/submission.py` and `api/routes/jobs.py`. docs/websocket.md is the protocol.
"""

from __future__ import annotations

import base64
import binascii
import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from flask import Blueprint, copy_current_request_context, request
from flask_sock import Sock
from simple_websocket import ConnectionClosed
from werkzeug.datastructures import Headers
from wsproto.utilities import LocalProtocolError

from api.admission import DEADLINE
from api.auth import SCOPE_OF_KIND, caller
from api.edge import announce, forget_told, tell_job, told, visible_tenant
from api.headers import GRACE, read_grace
from api.kinds import CHAT, COMPLETION
from api.limits import Admission, Limits
from api.relay.builder import Event
from api.relay.cursor import BEGIN, Cursor
from api.relay.exchange import LONGEST_WAIT, STATUS_WAIT, Exchange
from api.relay.hub import ClientGone
from api.relay.sse import for_client
from api.routes.jobs import attached, cancelled
from api.services import Services, services
from api.strict_json import parse
from api.submission import Prepared, prepare
from api.wire import STEP, Wire
from shared.errors import InternalError, InvalidJson, InvalidRequest, SluiceError, Unauthorized, WorkerShutdown
from shared.jobs import Job
from shared.settings import Settings

log = structlog.get_logger(__name__)

blueprint = Blueprint("sockets", __name__)

#: How long a client that showed no key has for its first message, s.
AUTH_WAIT = 5.0
#: How long a client has for its part of the closing handshake, s.
CLOSE_WAIT = 2.0
#: RFC 6455 section 7.4.1.
GOING_AWAY, POLICY_VIOLATION = 1001, 1008
#: Most bytes of a close frame's reason.
REASON = 120
#: What a handshake's headers say of all requests of the connection.
_LASTING = (GRACE, DEADLINE)


def options(settings: Settings) -> dict[str, Any]:
    """flask-sock's, for the app's configuration."""
    return {
        "ping_interval": settings.websocket_ping_s,
        "max_message_size": settings.max_body_bytes,
        "receive_bytes": STEP,
    }


@blueprint.before_request
def prepare_socket() -> None:
    """Refuses what the WebSocket library would fail on, then hands it the socket in its own way."""
    parts = services()
    if parts.lifecycle.draining:
        raise WorkerShutdown("This server is stopping. The request can be repeated.")
    connection = request.environ.get("gunicorn.socket")
    if connection is None or not _is_handshake(request.headers):
        raise InvalidRequest("This is no WebSocket handshake of version 13.", code="bad_request")
    # no compression: it joins all messages into one stream, whose order two threads could spoil, and unpacks without a limit
    request.environ.pop("HTTP_SEC_WEBSOCKET_EXTENSIONS", None)
    request.environ["gunicorn.socket"] = Wire(connection, parts.settings.websocket_ping_s)


def _is_handshake(headers: Headers) -> bool:
    try:
        nonce = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except (binascii.Error, ValueError):
        return False
    return len(nonce) == 16 and headers.get("Sec-WebSocket-Version") == "13"


def converse(ws: Any) -> None:
    """One connection, until it is closed. Never raises: an error page would go into the open WebSocket."""
    wire: Wire = request.environ["gunicorn.socket"]
    wire.kept = ws.input_buffer
    conversation = Conversation(services(), ws, wire)
    try:
        conversation.hold()
    except ClientGone:
        pass
    except Exception:
        log.exception("websocket_failed")
        conversation.close(1011, "Internal error.")
    finally:
        conversation.end()


class Conversation:
    """The greenlet of the connection runs the requests, one after the other; another one listens."""

    def __init__(self, parts: Services, ws: Any, wire: Wire) -> None:
        self._parts = parts
        self._ws = ws
        self._wire = wire
        self._headers = Headers([(name, request.headers[name]) for name in _LASTING if name in request.headers])
        #: The next request, if one was sent; None: no more.
        self._work: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._busy = False
        self._gone = False
        self._exchange: Exchange | None = None
        self._listener: threading.Thread | None = None

    def hold(self) -> None:
        if not self._known():
            return
        lifecycle = self._parts.lifecycle
        lifecycle.at_drain(self._no_more)
        try:
            if lifecycle.draining:
                self._no_more()
            listen = copy_current_request_context(self._listen)
            self._listener = threading.Thread(target=listen, name="websocket", daemon=True)
            self._listener.start()
            while (asked := self._work.get()) is not None:
                self._answer(asked)
            if not self._gone:
                self.close(GOING_AWAY, "This server is stopping.")
        finally:
            lifecycle.not_at_drain(self._no_more)

    def close(self, code: int, reason: str) -> None:
        """Says goodbye, if there is anybody."""
        try:
            self._ws.close(code, reason.encode()[:REASON].decode(errors="ignore"))
        except (ConnectionClosed, LocalProtocolError, OSError):
            pass

    def end(self) -> None:
        """Waits for the other threads: the socket must not be closed, and its number given to another, under them."""
        self._gone = True
        self._ws.thread.join(CLOSE_WAIT)
        if self._ws.thread.is_alive():
            self._wire.cut()
            self._ws.thread.join()
        self._ws.connected = False
        self._ws.event.set()
        if self._listener is not None:
            self._listener.join()

    def _no_more(self) -> None:
        """After what is asked already."""
        self._work.put(None)

    # -- who asks

    def _known(self) -> bool:
        """Whether the client has a right to be here; one that has not was told, and the connection closed."""
        gate = self._parts.gate
        try:
            try:
                gate.enter(late=True)
            except Unauthorized:
                if gate.shown():
                    raise
                request.environ["HTTP_X_API_KEY"] = self._first_key()
                gate.enter(late=True)
                self._say({"auth": "ok"})
        except SluiceError as error:
            self._say(_error(error))
            self.close(POLICY_VIOLATION, error.message)
            return False
        return True

    def _first_key(self) -> str:
        try:
            message = self._ws.receive(timeout=AUTH_WAIT)
        except ConnectionClosed:
            raise ClientGone from None
        self._wire.taken()
        if message is None:
            raise Unauthorized(f"No API key came within {AUTH_WAIT:g} seconds.")
        key = _read(message).get("auth")
        if not isinstance(key, str) or not key:
            raise Unauthorized('The first message must be {"auth": KEY}, where the handshake has no key.')
        return key

    # -- in

    def _listen(self) -> None:
        """Takes what the client sends; when it is gone, its request is let go of at once."""
        try:
            while True:
                message = self._ws.receive(timeout=self._parts.settings.websocket_ping_s)
                self._wire.taken()
                if message is not None:
                    self._take(message)
                elif not self._ws.thread.is_alive():  # it ended without a word
                    break
        except (ConnectionClosed, ClientGone):
            pass
        except Exception:
            log.exception("websocket_listener_failed")
        finally:
            self._gone = True
            if self._exchange is not None:
                self._exchange.hang_up()
            self._work.put(None)

    def _take(self, message: str | bytes) -> None:
        try:
            asked = _read(message)
            if "cancel" in asked:
                self._parts.gate.enter(late=True)
                known = cancelled(self._parts, _id(asked, "cancel"), visible_tenant(), caller().kinds)
                self._say({"cancel": known.job.id, "status": known.status})
            elif "auth" in asked:
                self._say({"auth": "ok"})
            elif self._busy:
                raise InvalidRequest("One request at a time: wait for done, or cancel it.", code="busy")
            else:
                self._busy = True
                self._work.put(asked)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            self._say(_error(_as_ours(error)))

    # -- out

    def _answer(self, asked: dict[str, Any]) -> None:
        """One request, from its message to `done`."""
        admission: Admission | None = None
        exchange: Exchange | None = None
        failed: SluiceError | None = None

        def let_in(limits: Limits, job: Job) -> Admission:
            nonlocal admission
            admission = limits.admit(caller().key, job, announce)
            return admission

        try:
            forget_told()
            self._parts.gate.enter(late=True)  # the key may have been revoked meanwhile
            if "attach" in asked:
                exchange, wait = attached(
                    self._parts,
                    _id(asked, "attach"),
                    visible_tenant(),
                    caller().kinds,
                    _cursor(asked),
                    read_grace(self._headers.get(GRACE)),
                )
                self._follow(exchange)
            else:
                prepared = self._prepared(asked, let_in)
                exchange, wait = prepared.exchange(self._parts), STATUS_WAIT
                self._follow(exchange)
                tell_job(exchange.submit())
            headers = told()
            self._say({"accepted": exchange.job.id, "headers": headers})
            self._send(exchange.first_events(wait))
            while not exchange.builder.ended:
                self._send(exchange.next_events(LONGEST_WAIT) or [])
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets its end
            failed = _as_ours(error) if exchange is None else for_client(exchange, error)
        finally:
            self._exchange = None
            if exchange is not None:
                exchange.close()
            if admission is not None:
                admission.settle()
        if failed is not None:
            self._say(_error(failed))
        self._busy = False
        self._say({"done": True})

    def _prepared(self, asked: dict[str, Any], let_in: Callable[[Limits, Job], Admission]) -> Prepared:
        """A request with messages is a chat."""
        is_chat = asked.get("messages") is not None
        if is_chat and asked.get("prompt") is not None:
            raise InvalidRequest("Give either prompt or messages.", param="messages")
        caller().require(SCOPE_OF_KIND["chat" if is_chat else "completion"])
        body = {**asked, "stream": True}
        if is_chat:
            return prepare(self._parts, CHAT, body, self._headers, let_in=let_in)
        return prepare(self._parts, COMPLETION, body, self._headers, let_in=let_in)

    def _follow(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.builder.only_streams()
        if self._gone:
            exchange.hang_up()

    def _send(self, events: list[Event]) -> None:
        for event in events:
            is_error = event.data.startswith(b'{"error":')  # no chunk begins so
            data = event.data[1:] if is_error else b'"data":%b}' % event.data
            self._say_text((b'{"id":"%b",%b' % (event.id.encode(), data)).decode())

    def _say(self, message: dict[str, Any]) -> None:
        self._say_text(msgspec.json.encode(message).decode())

    def _say_text(self, text: str) -> None:
        """Raises ClientGone, also for a client that does not read."""
        try:
            self._ws.send(text)
        except (ConnectionClosed, LocalProtocolError, OSError):
            self._wire.cut()
            raise ClientGone from None


def _read(message: str | bytes) -> dict[str, Any]:
    if not isinstance(message, str):
        raise InvalidJson("A message must be text, not binary.")
    return parse(message.encode())


def _id(asked: dict[str, Any], field: str) -> str:
    job_id = asked[field]
    if not isinstance(job_id, str):
        raise InvalidRequest(f"{field} must be the id of a request.", param=field)
    others = asked.keys() - ({field, "starting_after"} if field == "attach" else {field})
    if others:
        raise InvalidRequest(f"A message with {field} has no other fields.", param=min(others)[:64])
    return job_id


def _cursor(asked: dict[str, Any]) -> Cursor:
    after = asked.get("starting_after")
    if after is None:
        return BEGIN
    if isinstance(after, bool) or not isinstance(after, int | str):
        raise InvalidRequest("starting_after must be the id of an event, or its number.", param="starting_after")
    return Cursor.parse(str(after), "starting_after", bare=True)


def _as_ours(error: Exception) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    log.error("websocket_request_failed", exc_info=error)
    return InternalError()


def _error(error: SluiceError) -> dict[str, Any]:
    message: dict[str, Any] = {"error": error.to_object(), "status": error.status}
    if error.retry_after_s is not None:
        message["retry_after_s"] = error.retry_after_s
    return message


Sock().route("/v1/stream", bp=blueprint)(converse)
