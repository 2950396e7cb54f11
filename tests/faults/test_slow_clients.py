"""Clients that read nothing while a flood of text comes for them: what the API holds for each is bounded in bytes, and all
of it is there when they read at last."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import script, wait_for
from tests.faults.test_thousand_streams import rss_mb
from tests.stack import SCRIPTED, Stack, body

CLIENTS, PIECES = 100, 600
PIECE = "x" * 4000
#: Growth of the API process, MB. (It was 252 while only entries were counted.)
GROWTH_MB = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, (SCRIPTED,), lanes=CLIENTS) as stack:
        yield stack


def ask(port: int) -> socket.socket:
    sent = json.dumps(body(script(PIECE, repeat=PIECES, delay_ms=10), SCRIPTED, {"stream": True})).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
    return client


def test_a_hundred_clients_that_do_not_read(wide: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert wide.complete(script("a")).text == "a"  # its tokenizer is loaded
    before = rss_mb(wide.api_processes())
    clients = [ask(wide.port) for _ in range(CLIENTS)]
    figures = [before]

    def written() -> bool:
        figures.append(rss_mb(wide.api_processes()))
        return wide.busy() == 0

    wait_for(lambda: wide.busy() == CLIENTS, 60)
    wait_for(written, 200, every=0.5)
    for client in clients:
        raw = bytearray()
        while piece := client.recv(1 << 20):
            raw += piece
        client.close()
        lines = [line for line in raw.split(b"\n") if line.startswith(b"data: {")]
        assert sum(line.count(b"x" * len(PIECE)) for line in lines) == PIECES
        assert b'"finish_reason":"stop"' in lines[-1] and raw.count(b"data: [DONE]") == 1
        figures.append(rss_mb(wide.api_processes()))
    with capsys.disabled():
        print(
            f"\n{CLIENTS} clients that do not read, {PIECES} pieces of {len(PIECE)} characters each: "
            f"API {before:.0f} MB before, {max(figures):.0f} MB at most"
        )
    assert max(figures) - before < GROWTH_MB
    wait_for(wide.idle, 30)
