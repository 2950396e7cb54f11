"""The real server with real sockets over an in-memory store: hang-ups, early refusals, draining."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.exposure import Exposed, check_exposure
from shared.settings import Settings
from tests.contract.schemas import check_error

ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], Any], seconds: float = 5) -> Any:
    """The condition's first true value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


class Api:
    def __init__(self, drain: float = 3) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.served_api", str(self.port), str(drain)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        until(self._healthy, 20)

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self.call("GET", "/health")[0] == 200
        return False

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, json.loads(text or "null")

    def status(self) -> Any:
        return self.call("GET", "/v1/status")[2]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def ask(self, prompt: str, **fields: Any) -> socket.socket:
        """A connection on which a completion was asked for."""
        client = self.connect()
        client.sendall(request(json.dumps({"prompt": prompt, **fields}).encode()))
        return client

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(15)
        if self.process.stderr:
            self.process.stderr.close()


def request(body: bytes, *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode() + body


def everything(client: socket.socket) -> bytes:
    pieces = []
    while piece := client.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def read_until(client: socket.socket, text: bytes) -> bytes:
    read = b""
    while text not in read:
        piece = client.recv(65536)
        assert piece, read
        read += piece
    return read


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.close()


def close(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def pipelined_then_close(client: socket.socket) -> None:
    client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.close()


@pytest.mark.parametrize("leave", [close, half_close, reset, pipelined_then_close])
@pytest.mark.parametrize(("prompt", "stream"), [("tick", True), ("tick", False), ("wait", True), ("wait", False)])
def test_who_hangs_up_is_let_go_at_once(
    api: Api, leave: Callable[[socket.socket], None], prompt: str, stream: bool
) -> None:
    """FB-005, FB-007: streamed, plain, and still waiting in the queue."""
    before = api.status()
    client = api.ask(prompt, stream=stream)
    until(lambda: api.status()["watched"] == before["watched"] + 1)
    if stream:
        read_until(client, b"tick" if prompt == "tick" else b"200 OK")
    left = time.monotonic()
    leave(client)
    after = until(lambda: (s := api.status())["detached"] == before["detached"] + 1 and s)
    assert after["last_detach"] - left < 0.5
    until(lambda: (s := api.status())["watched"] == before["watched"] and s["following"] == before["following"])
    client.close()


def test_a_client_that_does_not_read_is_let_go_when_it_half_closes(api: Api) -> None:
    before = api.status()
    client = api.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(request(b'{"prompt":"tick","stream":true}'))
    until(lambda: api.status()["watched"] == before["watched"] + 1)
    half_close(client)
    until(lambda: api.status()["detached"] == before["detached"] + 1, 1)
    client.close()


def test_a_finished_request_is_not_cancelled(api: Api) -> None:
    before = api.status()
    for stream in (True, False):
        client = api.ask("hello", stream=stream)
        read_until(client, b"[DONE]" if stream else b'"usage"')
        client.close()
    after = api.status()
    assert after["jobs"] == before["jobs"] + 2 and after["detached"] == before["detached"]


def test_one_connection_many_requests(api: Api) -> None:
    """Streams end cleanly: the same connection goes on."""
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
    for body in ({"prompt": "a", "stream": True}, {"prompt": "b"}, {"n": 0}, {"prompt": "c", "stream": True}) * 3:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status == (400 if "n" in body else 200) and text.count(b"HTTP/1") == 0
        if body.get("stream"):
            assert text.endswith(b"data: [DONE]\n\n")
    connection.request("POST", "/v1/nope", b"x" * 1000, {"Content-Type": "text/plain"})
    response = connection.getresponse()
    response.read()
    connection.request("GET", "/health")
    assert (response.status, connection.getresponse().status) == (404, 200)


def test_headers_of_a_silent_stream_come_at_once(api: Api) -> None:
    client = api.ask("wait", stream=True)
    started = time.monotonic()
    read_until(client, b"\r\n\r\n")
    assert time.monotonic() - started < 1
    assert b": keep-alive\n" in read_until(client, b"\n\r\n")
    client.close()


def test_a_body_over_the_limit(api: Api) -> None:
    """The client writes all of it before it reads, and still reads the answer."""
    status, headers, body = api.call("POST", "/v1/completions", b'{"prompt":"' + b"x" * 11_000_000 + b'"}')
    check_error(body)
    assert (status, body["error"]["code"], headers["connection"]) == (413, "body_too_large", "close")


def test_a_refusal_does_not_wait_for_the_body(api: Api) -> None:
    client = api.connect()
    client.sendall(request(b"x", length=50_000_000))
    assert b"413" in read_until(client, b"body_too_large")
    assert everything(client) == b""
    client.close()


def test_chunked_bodies(api: Api) -> None:
    def chunked(*pieces: bytes) -> bytes:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)

    client = api.connect()
    client.sendall(chunked(b'{"prom', b'pt":"hi"}') + b"0\r\n\r\n")
    assert b'"text":"hi"' in read_until(client, b'"usage"')
    client.close()
    client = api.connect()
    with contextlib.suppress(ConnectionError):
        client.sendall(chunked(*[b"x" * 1_000_000] * 11))
    assert b"413" in read_until(client, b"body_too_large")
    client.close()
    client = api.connect()
    client.sendall(chunked(b"{") + b"zz\r\n")
    assert b"400 BAD REQUEST" in read_until(client, b"invalid_json")
    client.close()


def test_chunks_of_one_byte_hold_up_nobody(api: Api) -> None:
    """A body in 300,000 chunks takes the server seconds; the others are served meanwhile."""
    client = api.connect()
    client.settimeout(60)
    body = b'{"prompt":"' + b"x" * 300_000 + b'","stop":7}'
    raw = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sender = threading.Thread(
        target=client.sendall,
        args=(request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + raw,),
    )
    began, waits = time.monotonic(), []
    sender.start()
    while not select.select([client], [], [], 0)[0]:
        asked = time.monotonic()
        assert api.call("GET", "/health")[0] == 200
        waits.append(time.monotonic() - asked)
    assert b'"param":"stop"' in read_until(client, b'"}}')
    took = time.monotonic() - began
    sender.join()
    client.close()
    assert max(waits) < took / 4, (len(waits), max(waits), took)


def test_a_body_that_ends_early(api: Api) -> None:
    client = api.connect()
    client.sendall(request(b'{"prompt":', length=100))
    half_close(client)
    assert b"invalid_json" in everything(client)
    client.close()


@pytest.mark.parametrize(
    "raw",
    [b"BAD\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
     b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"\x16\x03\x01\x02\x00"],
)  # fmt: skip
def test_what_is_no_http_is_answered_in_json(api: Api, raw: bytes) -> None:
    client = api.connect()
    client.sendall(raw)
    half_close(client)
    head, _, body = everything(client).partition(b"\r\n\r\n")
    if head:
        assert head.startswith(b"HTTP/1.1 400") and b"html" not in head
        check_error(json.loads(body))
    client.close()
    assert api.call("GET", "/health")[0] == 200


def test_many_at_once(api: Api) -> None:
    """A hundred clients leave together; the others are not disturbed."""
    before = api.status()
    slow = [api.ask("slow", stream=True) for _ in range(20)]
    ticking = [api.ask("tick", stream=True) for _ in range(100)]
    for client in ticking:
        read_until(client, b"tick")
    for client in ticking:
        client.close()
    until(lambda: api.status()["detached"] == before["detached"] + 100)
    for client in slow:
        assert read_until(client, b"[DONE]").count(b'"text":"x"') == 5
        client.close()
    assert api.status()["detached"] == before["detached"] + 100


def test_draining() -> None:
    """Told to stop, it finishes what it has, takes nothing new, says so, and ends without waiting for idle clients."""
    api = Api(drain=10)
    idle = api.connect()
    running, started = api.ask("slow", stream=True), time.monotonic()
    read_until(running, b'"text":"x"')
    os.kill(api.process.pid, signal.SIGTERM)
    until(lambda: api.call("GET", "/ready")[0] == 503)
    status, headers, body = api.call("POST", "/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (503, "worker_shutdown", "true")
    assert b"[DONE]" in read_until(running, b"[DONE]")
    assert api.process.wait(5) == 0 and time.monotonic() - started < 5
    idle.close()
    api.close()


def test_the_end_of_a_drain() -> None:
    """Promise 2: who still waits gets one error, not a cut."""
    api = Api(drain=0.5)
    streamed, plain = api.ask("tick", stream=True), api.ask("wait")
    read_until(streamed, b"tick")
    os.kill(api.process.pid, signal.SIGTERM)
    text = read_until(streamed, b"[DONE]")
    assert text.count(b'"error"') == 1 and b"worker_shutdown" in text and b'"finish_reason":"stop"' not in text
    assert b"503 SERVICE UNAVAILABLE" in read_until(plain, b"worker_shutdown")
    assert api.process.wait(6) == 0
    api.close()


def test_without_a_store_it_says_so() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "SLUICE_REDIS_URL")}
    done = subprocess.run(
        [sys.executable, "-m", "api"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and "REDIS_URL" in done.stderr and "Traceback" not in done.stderr


def test_not_open_to_everyone_by_accident() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_exposure(Settings(host=host), keys=False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(Exposed, match=r"insecure|INSECURE"):
            check_exposure(Settings(host=host), keys=False)
        check_exposure(Settings(host=host, insecure=True), keys=False)
        check_exposure(Settings(host=host), keys=True)
