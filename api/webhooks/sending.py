"""One webhook, signed (Standard Webhooks, as the official SDK's `webhooks.unwrap` verifies it) and sent once.

Knows HTTP and the secret; nothing of the store and of repeating.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import socket
import ssl
import threading
import time

from api.webhooks.targets import NotAllowed, Target, address

#: Longest silence, and longest time for the whole of it, s.
SILENCE, WHOLE = 10.0, 20.0


class NotDelivered(Exception):
    """It did not arrive, or was not taken; the message says why. `gone`: the receiver wants no more of it."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


def signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    """`v1,<base64>` over `id.timestamp.body`; a secret that begins with `whsec_` is base64 behind it."""
    key = base64.b64decode(secret[6:]) if secret.startswith("whsec_") else secret.encode()
    signed = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def send(target: Target, event_id: str, body: bytes, secret: str, *, private: bool) -> None:
    """Posts the body. Redirects are not followed. Raises NotDelivered for any answer but a 2xx."""
    timestamp = int(time.time())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "sluice",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, event_id, timestamp, body),
    }
    try:
        connection = _connection(target, address(target, private=private))
    except (NotAllowed, OSError) as error:
        raise NotDelivered(str(error)) from None
    # whoever answers a byte at a time would never be silent for long
    cut = threading.Timer(WHOLE, _cut, (connection,))
    cut.daemon = True
    cut.start()
    try:
        if isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
        connection.request("POST", target.path, body, headers)
        status = connection.getresponse().status
    except (
        OSError,
        http.client.HTTPException,
        AttributeError,
    ) as error:  # AttributeError: cut off in the middle of a read
        raise NotDelivered(f"{type(error).__name__}: {error}") from None
    finally:
        cut.cancel()
        connection.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"status {status}", gone=status == 410)


def _connection(target: Target, ip: str) -> http.client.HTTPConnection:
    """Connected to that address, and talking to the host by its name. The handshake of TLS is still to come."""
    raw = socket.create_connection((ip, target.port), timeout=SILENCE)
    try:
        if target.scheme == "https":
            tls = ssl.create_default_context()
            raw = tls.wrap_socket(raw, server_hostname=target.host, do_handshake_on_connect=False)
    except BaseException:
        raw.close()
        raise
    default = target.port == (443 if target.scheme == "https" else 80)
    host = f"[{target.host}]" if ":" in target.host else target.host
    connection = http.client.HTTPConnection(host if default else f"{host}:{target.port}")
    connection.sock = raw
    return connection


def _cut(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)
