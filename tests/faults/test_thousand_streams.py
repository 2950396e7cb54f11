"""A thousand streams held for a minute on one machine: each token of each comes once and in order, and memory stays put.

One thread reads all sockets: a thread a stream would measure the client.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import script, wait_for
from tests.stack import SCRIPTED, Stack

STREAMS, SECONDS = 1000, 60
#: One word a second.
WORDS = [f"w{number} " for number in range(SECONDS)]
#: Growth of the API process over the minute, once all streams run, MB.
GROWTH_MB = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, (SCRIPTED,), lanes=STREAMS) as stack:
        yield stack


class Held:
    """One stream: its socket, what came of it, and when something last did."""

    def __init__(self, port: int, prompt: str) -> None:
        body = json.dumps({"model": SCRIPTED, "prompt": prompt, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(head.encode() + body)
        self.socket.setblocking(False)
        self.raw = b""
        self.done = False
        self.longest_silence = 0.0
        self._heard: float | None = None

    def read(self, now: float) -> None:
        piece = self.socket.recv(1 << 16)
        self.raw += piece
        if self._heard is not None:
            self.longest_silence = max(self.longest_silence, now - self._heard)
        self._heard = now
        self.done = b"data: [DONE]" in self.raw or not piece

    def chunks(self) -> list[dict[str, object]]:
        lines = [line for line in self.raw.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line[6:]) for line in lines]

    def text(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self.chunks() if chunk["choices"])  # type: ignore[index]


def rss_mb(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * 4096 / 1e6


def test_a_thousand_streams_held_for_a_minute(wide: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    idle = rss_mb(wide.api_processes())
    prompt = script(*WORDS, delay_ms=1000)
    began = time.monotonic()
    selector = selectors.DefaultSelector()
    streams = [Held(wide.port, prompt) for _ in range(STREAMS)]
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    opened = time.monotonic() - began
    running = 0.0
    while not all(stream.done for stream in streams):
        assert time.monotonic() - began < 5 * SECONDS, f"{sum(not stream.done for stream in streams)} still run"
        for key, _ in selector.select(1.0):
            key.data.read(time.monotonic())
            if key.data.done:
                selector.unregister(key.fileobj)
        if not running and time.monotonic() - began > opened + 10:
            running = rss_mb(wide.api_processes())
            assert wide.busy() == STREAMS
    ended = rss_mb(wide.api_processes())
    assert {stream.text() for stream in streams} == {"".join(WORDS)}
    for stream in streams:
        assert stream.raw.count(b"data: [DONE]") == 1 and stream.raw.count(b"HTTP/1.1") == 1
        stream.socket.close()
    wait_for(wide.idle, 20)
    silences = sorted(stream.longest_silence for stream in streams)
    with capsys.disabled():
        print(
            f"\n{STREAMS} streams: opened in {opened:.1f} s, all ended after {time.monotonic() - began:.0f} s; longest silence "
            f"p50 {silences[STREAMS // 2]:.2f} s, worst {silences[-1]:.2f} s; API {idle:.0f} MB idle, {running:.0f} MB after "
            f"10 s, {ended:.0f} MB at the end"
        )
    assert ended - running < GROWTH_MB
    assert silences[-1] < 10, "a client with a time-out would have left"
