"""Real proxies in front of a real server, set up by the examples in deploy/: tokens pass one by one, what is idle stays open,
and who hangs up is noticed."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import ssl
import statistics
import subprocess
import time
from collections.abc import Iterator

import pytest
import simple_websocket

from scripts import ports
from tests.conftest import script, wait_for
from tests.deploy import tools
from tests.stack import ANSWER_S, SCRIPTED, Client, Stack, body, endless, strict_json

#: Pause between two tokens of a test's script, ms, and how many there are.
DELAY_MS, COUNT = 100, 20
#: nginx gives up an answer that says nothing for this long, s; the server speaks more often.
READ_TIMEOUT_S, HEARTBEAT_S = 2, 0.5


class Proxied(Client):
    """The server by way of a proxy that speaks TLS."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port)
        self.context = context

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        client = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self.context)
        client.connect()
        return client

    def reachable(self) -> bool:
        try:
            return self.call("GET", "/health", timeout=5).status == 200
        except (OSError, http.client.HTTPException):
            return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("behind"),
        (SCRIPTED,),
        lanes=4,
        sse_heartbeat_s=HEARTBEAT_S,
        websocket_ping_s=1,
        trusted_proxies='["127.0.0.1"]',
    ) as stack:
        yield stack


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxied(
    request: pytest.FixtureRequest, served: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp(request.param)
    port = ports.any_free()
    pair = tools.certificate(folder)
    if request.param == "nginx":
        whole = tools.nginx_conf(folder, pair, port=port, upstream=served.port, read_timeout=f"{READ_TIMEOUT_S}s")
        command = [tools.on_path("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(whole)]
    else:
        whole = tools.caddyfile(folder, pair, port=port, upstream=served.port)
        command = [tools.program("caddy"), "run", "--adapter", "caddyfile", "--config", str(whole)]
    folders = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=folders, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        client = Proxied(port, tools.believing(pair[0]))
        wait_for(lambda: client.reachable() or process.poll() is not None)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        yield client
    finally:
        process.terminate()
        process.wait(30)


def nginx_only(request: pytest.FixtureRequest) -> bool:
    return "nginx" in request.node.callspec.id


def test_tokens_arrive_one_by_one(proxied: Proxied, request: pytest.FixtureRequest) -> None:
    pieces = [f"{number} " for number in range(COUNT)]
    stream = proxied.stream(script(*pieces, delay_ms=DELAY_MS), max_tokens=COUNT)
    assert stream.text == "".join(pieces) and stream.finish == "length"
    gaps = [after - before for before, after in itertools.pairwise(stream.times)]
    print(
        f"{request.node.callspec.id}: {COUNT} tokens made {DELAY_MS} ms apart arrived "
        f"{statistics.median(gaps) * 1000:.0f} ms apart (median; {min(gaps) * 1000:.0f} to {max(gaps) * 1000:.0f}), "
        f"the first {stream.times[0] * 1000:.0f} ms after the request"
    )
    assert statistics.median(gaps) > DELAY_MS / 2000
    assert stream.times[0] < stream.times[-1] / 2, "it came when the others were there"


def test_an_idle_stream_survives_by_keep_alives(proxied: Proxied, request: pytest.FixtureRequest) -> None:
    """It says nothing for longer than nginx waits; an answer that is not streamed has no keep-alives and shows that it does."""
    silent = script("late", start_delay_ms=(READ_TIMEOUT_S + 1) * 1000)
    stream = proxied.stream(silent)
    assert (stream.text, stream.finish) == ("late", "stop")
    assert stream.times[0] > READ_TIMEOUT_S
    assert len(stream.comments) >= 3
    if nginx_only(request):
        assert proxied.complete(silent).status == 504


def test_who_hangs_up_frees_the_lane(proxied: Proxied, served: Stack) -> None:
    wait_for(served.idle, timeout=10)
    with proxied.open(endless(delay_ms=20)) as stream:
        stream.goes_on(3)
        wait_for(lambda: served.busy() == 1)
        left = stream.leave()
    wait_for(served.idle, timeout=10)
    print(f"free {time.monotonic() - left:.1f} s after the client had left")


def test_a_websocket_passes_and_an_idle_one_stays(proxied: Proxied) -> None:
    client = simple_websocket.Client(f"wss://127.0.0.1:{proxied.port}/v1/stream", ssl_context=proxied.context)

    def ask(prompt: str) -> str:
        client.send(json.dumps(body(prompt, SCRIPTED, {})))
        text = ""
        while (message := strict_json(client.receive(ANSWER_S))) != {"done": True}:
            assert "error" not in message, message
            text += "".join(choice["text"] for choice in message.get("data", {}).get("choices", ()))
        return text

    try:
        assert ask(script("one ", "two")) == "one two"
        # pings keep it open for longer than nginx waits
        assert client.receive(READ_TIMEOUT_S + 1) is None
        assert ask(script("three")) == "three"
    finally:
        # its reading thread ends before its descriptor can be another connection's
        client.sock.shutdown(socket.SHUT_RDWR)
        client.thread.join(10)
        client.sock.close()


def test_the_server_knows_that_the_client_spoke_tls(proxied: Proxied) -> None:
    assert f"https://127.0.0.1:{proxied.port}".encode() in proxied.call("GET", "/docs").raw


def test_a_large_body_passes(proxied: Proxied) -> None:
    """Beyond what nginx lets through by default (1 MB): it is the server that says what is wrong with it."""
    answer = proxied.complete("x" * 2_000_000, max_tokens=1)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
