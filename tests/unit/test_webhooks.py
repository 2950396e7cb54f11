"""Where webhooks may go, what they are signed with, and how one is sent."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from api.webhooks import sending, targets
from api.webhooks.courier import Event
from api.webhooks.sending import NotDelivered, send
from api.webhooks.targets import NotAllowed, Target, address, allowed, check, is_public, parse
from shared.errors import InvalidRequest
from shared.settings import WrongSettings, given

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()
ORIGINS = ["https://hooks.example", "https://*.wild.example:8443", "http://127.0.0.1:9000", "http://[::1]:9000"]


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example",
        "https://HOOKS.example:443/a/b?c=d",
        "https://a.wild.example:8443/",
        "https://a.b.wild.example:8443/x",
        "http://127.0.0.1:9000/in",
        "http://[::1]:9000/in",
    ],
)
def test_places_that_are_allowed(url: str) -> None:
    check(url, ORIGINS)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/",
        "https://hooks.example:8443/",
        "https://hooks.example.evil.example/",
        "https://evil.example/#https://hooks.example",
        "https://hooks.example@evil.example/",
        "https://evil.example\\@hooks.example/",
        "https://hooks.example/a b",
        "https://hooks.example/\r\nX: y",
        "https://user:pw@hooks.example/",
        "https://wild.example:8443/",
        "https://evilwild.example:8443/",
        "https://.wild.example:8443/",
        "http://127.0.0.1:9000.evil.example/",
        "http://127.1:9000/",
        "ftp://hooks.example/",
        "file:///etc/passwd",
        "hooks.example",
        "https://hooks.example:99999/",
        "https://hooks.example/" + "x" * 3000,
        "https://hööks.example/",
        "",
    ],
)
def test_places_that_are_not(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(url, ORIGINS)
    assert caught.value.param == "webhook_url"
    with pytest.raises(InvalidRequest):
        check("https://hooks.example", [])


@pytest.mark.parametrize(
    ("ip", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        *((ip, False) for ip in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0")),
        *((ip, False) for ip in ("100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.0.1")),
        *(
            (ip, False)
            for ip in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1")
        ),
        *((ip, False) for ip in ("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "not an address")),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
    ],
)
def test_addresses_of_the_public_internet(ip: str, public: bool) -> None:
    assert is_public(ip) is public


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was checked is the one that is connected to, whatever the name stands for a moment later."""
    found = {"mixed.example": ["10.0.0.1", "93.184.216.34"], "inside.example": ["192.168.0.7"]}
    asked: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port)) for ip in found[host]]

    monkeypatch.setattr(targets.socket, "getaddrinfo", look_up)
    assert address(Target("https", "mixed.example", 443, "/"), private=False) == "93.184.216.34"
    with pytest.raises(NotAllowed):
        address(Target("https", "inside.example", 443, "/"), private=False)
    assert address(Target("https", "inside.example", 443, "/"), private=True) == "192.168.0.7"
    assert asked == ["mixed.example", "inside.example", "inside.example"]


def test_settings() -> None:
    with pytest.raises(WrongSettings):
        given(webhook_targets=["https://hooks.example"])
    with pytest.raises(WrongSettings):
        given(webhook_secret="whsec_not base64!")
    assert given(webhook_targets=["https://hooks.example"], webhook_secret=SECRET).webhook_private is False


# -- sending


class Receiver(BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, str], bytes]] = []  # noqa: RUF012 - shared by all requests, emptied for each test

    def log_message(self, *arguments: Any) -> None:
        """Silent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, dict(self.headers), body))
        if self.path == "/drip":
            with contextlib.suppress(OSError):
                for _ in range(600):
                    self.wfile.write(b"H")
                    self.wfile.flush()
                    time.sleep(0.05)
            return
        self.send_response(int(self.path[1:4]))
        self.send_header("Location", "/200")
        self.end_headers()


@pytest.fixture
def receiver() -> Iterator[ThreadingHTTPServer]:
    Receiver.got.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def at(receiver: ThreadingHTTPServer, path: str) -> Target:
    target = parse(f"http://127.0.0.1:{receiver.server_address[1]}{path}")
    assert target is not None and allowed(target, [f"http://127.0.0.1:{receiver.server_address[1]}"])
    return target


@pytest.mark.parametrize("secret", [SECRET, "a plain secret"])
def test_the_official_client_verifies_it(receiver: ThreadingHTTPServer, secret: str) -> None:
    event = Event("evt_1", "", "response.completed", "cmpl-1", 1796043685, 1)
    send(at(receiver, "/200?a=b"), event.id, event.body(), secret, private=True)
    [(path, headers, body)] = Receiver.got
    assert path == "/200?a=b" and headers["Host"] == f"127.0.0.1:{receiver.server_address[1]}"
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    found = client.webhooks.unwrap(body, headers)
    assert (found.id, found.type, found.created_at) == ("evt_1", "response.completed", 1796043685)
    assert found.data.id == "cmpl-1"
    for wrong in (body.replace(b"cmpl-1", b"cmpl-2"), body + b" "):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(wrong, headers)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        openai.OpenAI(api_key="none", webhook_secret="another").webhooks.unwrap(body, headers)


@pytest.mark.parametrize("status", [302, 307, 400, 404, 410, 500])
def test_what_is_no_success(receiver: ThreadingHTTPServer, status: int) -> None:
    with pytest.raises(NotDelivered) as caught:
        send(at(receiver, f"/{status}"), "evt_1", b"{}", SECRET, private=True)
    assert str(status) in str(caught.value) and caught.value.gone is (status == 410)
    assert len(Receiver.got) == 1, "redirects are not followed"


def test_who_may_not_be_reached_is_not(receiver: ThreadingHTTPServer) -> None:
    with pytest.raises(NotDelivered):
        send(at(receiver, "/200"), "evt_1", b"{}", SECRET, private=False)
    assert not Receiver.got
    receiver.shutdown()
    receiver.server_close()
    with pytest.raises(NotDelivered):
        send(at(receiver, "/200"), "evt_1", b"{}", SECRET, private=True)


def test_an_answer_that_drips_is_cut_off(receiver: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "WHOLE", 0.5)
    began = time.monotonic()
    with pytest.raises(NotDelivered):
        send(at(receiver, "/drip"), "evt_1", b"{}", SECRET, private=True)
    assert time.monotonic() - began < 15, "it would go on for 30 s"


def test_over_tls(receiver: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To who shows a certificate for the name that was asked for, and to nobody else."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH to make a certificate with")
    words = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=here -addext"
    command = [openssl, *words.split(), "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    receiver.socket = tls.wrap_socket(receiver.socket, server_side=True)
    target = at(receiver, "/200")._replace(scheme="https")
    with pytest.raises(NotDelivered, match="certificate verify failed"):
        send(target, "evt_1", b"{}", SECRET, private=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with pytest.raises(NotDelivered, match="certificate"):
        send(target._replace(host="localhost"), "evt_1", b"{}", SECRET, private=True)
    assert not Receiver.got
    send(target, "evt_1", b"{}", SECRET, private=True)
    assert len(Receiver.got) == 1


def test_a_handshake_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of TLS: a record whose end never comes."""
    monkeypatch.setattr(sending, "WHOLE", 0.5)

    def drip(server: socket.socket) -> None:
        client, _ = server.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(b"\x16\x03\x03\x40\x00")
            for _ in range(600):
                client.sendall(b"\x00")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        target = parse(f"https://127.0.0.1:{server.getsockname()[1]}/")
        assert target is not None
        began = time.monotonic()
        with pytest.raises(NotDelivered):
            send(target, "evt_1", b"{}", SECRET, private=True)
    assert time.monotonic() - began < 15, "it would go on for 30 s"


def test_the_body() -> None:
    body = json.loads(Event("evt_1", "u", "batch.completed", "batch_1", 5, 1).body())
    assert body == {
        "id": "evt_1",
        "object": "event",
        "type": "batch.completed",
        "created_at": 5,
        "data": {"id": "batch_1"},
    }
