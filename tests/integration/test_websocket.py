"""`/v1/stream` on the whole product, with a WebSocket client of its own kind, and with sockets that misbehave."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import simple_websocket

from api.wire import UNSENT
from shared import keys
from shared.settings import Settings
from tests.conftest import script, wait_for
from tests.contract.schemas import check_chunk, check_error
from tests.stack import ANSWER_S, SCRIPTED, Chat, Stack, body, endless, reasoning_of, run_keys, said, strict_json
from tests.stack import text_of as stack_text

#: The pings of the stack here, s.
PING_S = 1.0


class Socket:
    """A client that answers pings by itself. `messages`: all that came."""

    def __init__(self, port: int, headers: dict[str, str] | None = None) -> None:
        self._ws = simple_websocket.Client(f"ws://127.0.0.1:{port}/v1/stream", headers=headers, receive_bytes=65536)
        self.messages: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(simple_websocket.ConnectionClosed, OSError):
            self._ws.close()

    def send(self, message: Any) -> None:
        self.send_raw(json.dumps(message))

    def send_raw(self, message: str | bytes) -> None:
        self._ws.send(message)

    def receive(self, timeout: float = ANSWER_S) -> dict[str, Any]:
        message = self._ws.receive(timeout)
        if message is None:
            pytest.fail(f"silent for {timeout} s after {self.messages[-3:]}")
        found: dict[str, Any] = strict_json(message)
        self.messages.append(found)
        return found

    def until_done(self) -> list[dict[str, Any]]:
        """The messages of one request, `done` not among them."""
        began = len(self.messages)
        while self.receive() != {"done": True}:
            pass
        return self.messages[began:-1]

    def chunks(self, count: int) -> list[dict[str, Any]]:
        """Reads until so many more events came: they."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            message = self.receive()
            found += [message] if "data" in message else []
        return found

    def ask(self, prompt: Any, **fields: Any) -> str:
        """Sends a request; its id."""
        self.send(body(prompt, SCRIPTED, fields))
        message = self.receive()
        assert "accepted" in message, message
        return str(message["accepted"])

    def refused(self, code: str | None, status: int) -> dict[str, Any]:
        message = self.receive()
        check_error({"error": message["error"]})
        assert (message["error"]["code"], message["status"]) == (code, status), message
        return message

    def closed(self, timeout: float = 10) -> int:
        """The code that the server closes with, after what it still sends."""
        give_up = time.monotonic() + timeout
        while time.monotonic() < give_up:
            try:
                self._ws.receive(0.1)
            except simple_websocket.ConnectionClosed as end:
                return int(end.reason)
        pytest.fail("still open")

    def leave(self, reset: bool = False) -> float:
        """Goes without a word."""
        if reset:
            self._ws.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._ws.sock.shutdown(socket.SHUT_RDWR)
        return time.monotonic()


def deaf(port: int, *messages: Any) -> socket.socket:
    """A connection whose other end never reads again, answers no ping and does not close: as good as cut off."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
    key = base64.b64encode(os.urandom(16)).decode()
    connection.sendall(
        f"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(1)
    assert head.startswith(b"HTTP/1.1 101 "), head
    for message in messages:
        connection.sendall(text_frame(json.dumps(message).encode()))
    return connection


def text_frame(raw: bytes, first: int = 0x81) -> bytes:
    """A masked frame of up to 65,535 bytes (RFC 6455 section 5.2), under a mask of zeros."""
    length = struct.pack(">B", 0x80 | len(raw)) if len(raw) < 126 else struct.pack(">BH", 0x80 | 126, len(raw))
    return bytes([first]) + length + bytes(4) + raw


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(
        stack_text(choice) for message in messages if "data" in message for choice in message["data"]["choices"]
    )


def handshake_status(port: int, **headers: str) -> int:
    """What the server answers to a handshake with these headers instead of, or besides, the usual ones."""
    usual = {
        "Host": "localhost",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Version": "13",
    }
    sent = {**usual, **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value)
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        connection.sendall(f"GET /v1/stream HTTP/1.1\r\n{lines}\r\n".encode())
        return int(connection.recv(4096).split()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("sockets"), (SCRIPTED,), lanes=8, websocket_ping_s=PING_S) as served:
        yield served


# -- the same as over HTTP


PIECES = script("a", " déjà ", "🙂", "c", "\u2028d", delay_ms=10)
THOUGHT = script("<thi", "nk>a", " déjà ", "</think>", "🙂", "c", "\u2028d", delay_ms=10)


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (PIECES, {}),
        (PIECES, {"echo": True, "logprobs": 1, "n": 2}),
        (PIECES, {"stream_options": {"include_usage": True}, "stop": "c"}),
        (said(THOUGHT), {"logprobs": True, "n": 2}),
        (said(THOUGHT), {"stream_options": {"include_usage": True}, "stop": "c"}),
    ],
    ids=["plain", "echo", "stop", "chat", "chat, stop"],
)
def test_it_says_what_the_other_ways_say(served: Stack, prompt: Any, fields: dict[str, Any]) -> None:
    plain = served.complete(prompt, **{name: value for name, value in fields.items() if name != "stream_options"})
    stream = served.stream(prompt, **fields)
    with Socket(served.port) as ws:
        job_id = ws.ask(prompt, **fields)
        messages = ws.until_done()
        # a replay makes the same events of the same frames, whichever way it comes
        with served.resume(job_id) as replay:
            replay.read()
        ws.send({"attach": job_id})
        assert "accepted" in ws.receive()
        again = ws.until_done()
    assert [(message["id"], message["data"]) for message in again] == list(zip(replay.ids, replay.data, strict=True))
    for message in messages:
        assert set(message) == {"id", "data"} and re.fullmatch(r"\d+-\d+(\.\d+)?", message["id"])
        check_chunk(message["data"])
        assert message["data"]["id"] == job_id
    for index, choice in enumerate(plain.json["choices"]):
        mine = [piece for message in messages for piece in message["data"]["choices"] if piece["index"] == index]
        assert "".join(map(stack_text, mine)) == stack_text(choice)
        assert (
            "".join(map(reasoning_of, mine)) == reasoning_of(choice) == ("a déjà" if isinstance(prompt, Chat) else "")
        )
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [choice["finish_reason"]]
        assert stack_text(choice) == "".join(stack_text(piece) for piece in stream.pieces if piece["index"] == index)
    usages = [message["data"]["usage"] for message in messages if message["data"].get("usage")]
    assert usages == [plain.usage] == [stream.usage]


def test_one_request_after_the_other(served: Stack) -> None:
    """Raw prompts and chats in turn."""
    with Socket(served.port) as ws:
        for number in range(30):
            prompt = script("a", str(number))
            ws.ask(said(prompt) if number % 2 else prompt)
            assert text_of(ws.until_done()) == f"a{number}"
        ws.send({"model": SCRIPTED, "prompt": "x", "messages": said("x")})
        assert ws.refused("invalid_value", 400)["error"]["param"] == "messages"
        assert ws.receive() == {"done": True}


def test_fb061_a_switch_in_a_message(served: Stack) -> None:
    """The template has none: it is named, as over HTTP."""
    with Socket(served.port) as ws:
        ws.send({"model": SCRIPTED, "messages": said("x"), "enable_thinking": False})
        assert ws.receive()["headers"]["x-sluice-ignored"] == "enable_thinking"
        ws.until_done()
        ws.send({"model": SCRIPTED, "messages": said("x"), "enable_thinking": "no"})
        assert ws.refused("invalid_value", 400)["error"]["param"] == "enable_thinking"
    wait_for(served.idle)


def test_messages_larger_than_any_buffer_come_whole(served: Stack) -> None:
    """A plain `send` would write a part of them. A replay joins what lies ready."""
    prompt = json.dumps({"pieces": ["x" * 20_000], "repeat": 0})
    with Socket(served.port) as ws:
        job_id = ws.ask(prompt, max_tokens=150)
        assert len(text_of(ws.until_done())) == 3_000_000
        ws.send({"attach": job_id})
        assert "accepted" in ws.receive()
        replay = ws.until_done()
        assert len(text_of(replay)) == 3_000_000
        assert max(len(text_of([message])) for message in replay) > 2 * UNSENT
    wait_for(served.idle)


def test_an_unknown_field_and_stream_false(served: Stack) -> None:
    with Socket(served.port) as ws:
        ws.send({"model": SCRIPTED, "prompt": script("a"), "stream": False, "surprise": 1})
        accepted = ws.receive()
        assert accepted["headers"]["x-sluice-ignored"] == "surprise"
        assert accepted["headers"]["x-sluice-id"] == accepted["accepted"]
        assert text_of(ws.until_done()) == "a"
        ws.ask(script("b"))
        assert "x-sluice-ignored" not in ws.messages[-1]["headers"]


def test_a_request_that_fails_ends_with_its_error(served: Stack) -> None:
    with Socket(served.port) as ws:
        ws.ask(script("a", "b", "c", error_after=2, delay_ms=300))
        *pieces, last = ws.until_done()
        assert text_of(pieces) == "ab" and last["error"]["code"] == "internal_error"
        check_error({"error": last["error"]})
        for wrong, code, status in (
            ({"prompt": 5}, "invalid_value", 400),
            ({"prompt": "x", "model": "none"}, "model_not_found", 404),
            ({"prompt": "x", "best_of": 3}, "invalid_value", 400),
            ({"attach": "cmpl-" + "0" * 32}, "not_found", 404),
            ({"attach": 5}, "invalid_value", 400),
            ({"attach": "x", "starting_after": True}, "invalid_value", 400),
        ):
            ws.send({"model": SCRIPTED, **wrong} if "prompt" in wrong else wrong)
            ws.refused(code, status)
            assert ws.receive() == {"done": True}
        ws.ask(script("still", " here"))
        assert text_of(ws.until_done()) == "still here"


# -- coming back


def test_a_late_client_gets_the_rest(served: Stack) -> None:
    words = [f"w{number} " for number in range(30)]
    prompt = script(*words, delay_ms=40)
    with Socket(served.port, {"X-Resume-Grace": "30"}) as ws:
        job_id = ws.ask(prompt)
        seen = ws.chunks(5)
        ws.leave()
    last = seen[-1]["id"]
    for cursor in (last, int(last.partition("-")[2].partition(".")[0])):
        with Socket(served.port) as ws:
            ws.send({"attach": job_id, "starting_after": cursor})
            assert ws.receive()["accepted"] == job_id
            rest = ws.until_done()
            assert text_of(seen) + text_of(rest) == "".join(words)
            ws.send({"attach": job_id, "starting_after": rest[-1]["id"]})
            assert "accepted" in ws.receive()
            assert ws.until_done() == [], "it has seen all"
    with Socket(served.port) as ws:
        job_id = ws.ask(prompt, background=True)
        ws.leave()
    with served.resume(job_id) as stream:
        assert stream.read().text == "".join(words)
    wait_for(served.idle)


# -- cancel and going away


def test_cancel_while_it_runs_and_another_while_it_runs(served: Stack) -> None:
    with Socket(served.port) as ws:
        job_id = ws.ask(endless(delay_ms=20))
        ws.chunks(2)
        ws.send({"model": SCRIPTED, "prompt": "x"})
        while "error" not in ws.receive():
            pass
        assert ws.messages[-1]["error"]["code"] == "busy"
        ws.chunks(2)
        ws.send({"cancel": job_id})
        messages = ws.until_done()
        ended = [message for message in messages if "error" in message]
        assert [message["error"]["code"] for message in ended] == ["cancelled"]
        answers = [message for message in messages if "cancel" in message] or [ws.receive()]
        assert answers == [{"cancel": job_id, "status": "cancelled"}]
        ws.send({"cancel": "cmpl-" + "0" * 32})
        ws.refused("not_found", 404)
        ws.ask(script("next"))
        assert text_of(ws.until_done()) == "next"
    wait_for(served.idle)


@pytest.mark.parametrize("how", ["close", "vanish", "reset"])
def test_who_leaves_frees_the_lane(served: Stack, how: str) -> None:
    wait_for(served.idle)
    with Socket(served.port) as ws:
        ws.ask(endless(delay_ms=20))
        ws.chunks(2)
        if how != "close":
            left = ws.leave(reset=how == "reset")
    left = time.monotonic()
    wait_for(lambda: served.busy() == 0, 5, every=0.01)
    assert time.monotonic() - left < 1
    wait_for(served.idle)


# -- FB-100


def descriptors(served: Stack) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in served.api_processes())


def test_fb100_dead_peers_are_found_and_leave_nothing_behind(served: Stack) -> None:
    """Twenty that no longer answer, with requests on eight of them, and a new one."""
    wait_for(served.idle)
    with Socket(served.port) as ws:  # what is made once is made
        ws.ask(script("a"))
        ws.until_done()
    before = descriptors(served)
    request = {"model": SCRIPTED, "prompt": endless(delay_ms=50)}
    with contextlib.ExitStack() as peers:
        dead = [peers.enter_context(deaf(served.port, *([request] if number < 8 else []))) for number in range(20)]
        jobs = [accepted(peer) for peer in dead[:8]]
        wait_for(served.idle, 2 * PING_S + 6)
        for job_id in jobs:
            assert served.job(job_id).json["status"] == "cancelled"
        wait_for(lambda: descriptors(served) <= before + 2, 10)
        assert not re.search("websocket_\\w*failed|connection_failed|request_failed", served.log())
        with Socket(served.port) as ws:
            ws.ask(script("new"))
            assert text_of(ws.until_done()) == "new"


def accepted(peer: socket.socket) -> str:
    """Reads as far as the id of the request."""
    read = b""
    while (found := re.search(rb'"accepted":"(cmpl-\w+)"', read)) is None:
        piece = peer.recv(1024)
        assert piece, read
        read += piece
    return found[1].decode()


def test_fb100_an_idle_socket_stays_open(served: Stack) -> None:
    """Ten pings long."""
    with Socket(served.port) as ws:
        with pytest.raises(pytest.fail.Exception, match="silent"):
            ws.receive(timeout=10 * PING_S)
        ws.ask(script("still"))
        assert text_of(ws.until_done()) == "still"


def memory(served: Stack) -> int:
    """Resident memory of the API's processes, bytes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in served.api_processes())
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_fb100_a_client_that_never_reads_holds_nothing(served: Stack) -> None:
    flood = json.dumps({"pieces": ["x" * 4000], "repeat": 0, "delay_ms": 1})
    used = []
    for _ in range(3):
        wait_for(served.idle)
        with deaf(served.port, {"model": SCRIPTED, "prompt": flood}) as peer:
            job_id = accepted(peer)
            wait_for(served.idle, 4 * PING_S + 8)
        assert served.job(job_id).json["status"] == "cancelled"
        used.append(memory(served))
    print("MEM", used)
    assert used[-1] - used[0] < 60_000_000


def test_fb100_one_that_sends_and_never_reads_is_not_kept(served: Stack) -> None:
    """Answers that nobody reads, to messages without end."""
    wait_for(served.idle)
    before = memory(served)
    sent = 0
    frame = text_frame(b"[" * 60_000)
    with deaf(served.port) as connection, contextlib.suppress(OSError):
        connection.settimeout(10)
        while sent < 2_000_000_000:
            connection.sendall(frame)
            sent += len(frame)
    assert sent < 2_000_000_000, "it is closed at some time"
    assert memory(served) - before < 60_000_000


def test_fb100_a_server_that_stops_says_so(tmp_path: Path) -> None:
    """Idle sockets at once, the others after what they wait for."""
    with Stack(tmp_path, (SCRIPTED,), drain_s=20) as stack, Socket(stack.port) as idle, Socket(stack.port) as busy:
        busy.ask(script(*"abcdef", delay_ms=300))
        busy.chunks(1)
        [api] = stack.api_processes()
        stack.process.terminate()
        assert idle.closed(5) == 1001
        assert text_of([*busy.messages, *busy.until_done()][1:]).endswith("f")
        assert busy.closed(5) == 1001
        stack.process.wait(30)
        assert not Path(f"/proc/{api}").exists()


def test_fb100_a_server_that_waits_no_longer_says_so_too(tmp_path: Path) -> None:
    with Stack(tmp_path, (SCRIPTED,), drain_s=1) as stack, Socket(stack.port) as busy, deaf(stack.port):
        busy.ask(endless(delay_ms=50))
        busy.chunks(1)
        stack.process.terminate()
        assert busy.until_done()[-1]["error"]["code"] == "worker_shutdown"
        assert busy.closed(5) == 1001
        stack.process.wait(30)


# -- what is no protocol


def test_messages_that_are_none(served: Stack) -> None:
    with Socket(served.port) as ws:
        for garbage in ("", "{", "[]", "5", '{"a":1,"a":2}', '{"a":NaN}', "[" * 1000, b"{}", b"\xff\x00", '"\\ud800"'):
            ws.send_raw(garbage)
            ws.refused("invalid_json", 400)
        ws.ask(script("fine"))
        assert text_of(ws.until_done()) == "fine"
    most = Settings().max_body_bytes
    with deaf(served.port) as connection:  # sends a byte too many of what it announced, and listens
        connection.sendall(b"\x81" + struct.pack(">BQ", 0x80 | 127, 2 * most) + bytes(4) + b"x" * (most + 1))
        assert connection.recv(4)[2:] == struct.pack(">H", 1009)
    wait_for(served.idle)


def test_a_message_in_pieces_and_one_spoilt_on_the_way(served: Stack) -> None:
    raw = json.dumps({"model": SCRIPTED, "prompt": script("é", "🙂")}, ensure_ascii=False).encode()
    with deaf(served.port) as connection:
        for place in range(len(raw)):  # a byte each, so that characters are cut
            opcode = 0x00 if place else 0x01
            final = 0x80 if place == len(raw) - 1 else 0x00
            connection.sendall(text_frame(raw[place : place + 1], final | opcode))
        accepted(connection)
    with deaf(served.port) as connection:
        connection.sendall(text_frame(b"\xff\xfe"))
        assert connection.recv(4)[2:] == struct.pack(">H", 1007)
    with deaf(served.port) as connection:
        connection.sendall(text_frame(b"x", 0x80))  # goes on with what did not begin
        assert connection.recv(4)[2:] == struct.pack(">H", 1002)
    wait_for(served.idle)


def test_handshakes_that_are_none(served: Stack) -> None:
    assert served.call("GET", "/v1/stream").status == 400
    assert handshake_status(served.port) == 101
    assert handshake_status(served.port, Sec_WebSocket_Key="") == 400
    assert handshake_status(served.port, Sec_WebSocket_Key="x") == 400
    assert handshake_status(served.port, Sec_WebSocket_Version="8") == 400


# -- who may


def test_foreign_pages_and_hosts_are_refused_as_over_http(served: Stack) -> None:
    assert handshake_status(served.port, Origin="http://evil.example") == 403
    assert handshake_status(served.port, Host="evil.example") == 403
    assert handshake_status(served.port, Origin=f"http://localhost:{served.port}") == 101


def test_keys(tmp_path: Path) -> None:
    with Stack(tmp_path, (SCRIPTED,)) as stack:
        root = run_keys(stack.env, "add", "--scope", "admin")
        made = run_keys(stack.env, "add", "--concurrent", "1")
        other = run_keys(stack.env, "add", "--tenant", "other")
        poor = run_keys(stack.env, "add", "--scope", "tokenize")
        talker = run_keys(stack.env, "add", "--scope", "chat")
        stack.key = root["key"]
        wait_for(lambda: stack.call("GET", "/v1/models").status == 200)
        assert handshake_status(stack.port, Authorization="Bearer sk-wrong") == 401
        assert handshake_status(stack.port, X_Api_Key=poor["key"]) == 403
        for headers in ({"Authorization": f"Bearer {made['key']}"}, {"x-api-key": made["key"]}, {}):
            with Socket(stack.port, headers) as ws:
                if not headers:
                    ws.send({"auth": made["key"]})
                    assert ws.receive() == {"auth": "ok"}
                for _ in range(3):  # one at a time: each is over before the next
                    ws.ask(script("a"))
                    assert text_of(ws.until_done()) == "a"
        for first, status in (
            ({"auth": "sk-wrong"}, 401),
            ({"auth": 5}, 401),
            ({"auth": poor["key"]}, 403),
            ({"model": SCRIPTED, "prompt": "x"}, 401),
            ([], 400),
            (None, 401),
        ):
            with Socket(stack.port) as ws:
                if first is not None:
                    ws.send(first)
                assert ws.receive(8)["status"] == status
                assert ws.closed() == 1008
        with (
            Socket(stack.port, {"x-api-key": made["key"]}) as ws,
            Socket(stack.port, {"x-api-key": other["key"]}) as far,
        ):
            job_id = ws.ask(endless(delay_ms=20))
            ws.chunks(1)
            with stack.store() as store:
                assert store.hget(keys.job(job_id), "tenant") == made["tenant"].encode()
            with Socket(stack.port, {"x-api-key": talker["key"]}) as chats:
                chats.ask(said(script("a")))
                assert text_of(chats.until_done()) == "a"
                chats.send({"model": SCRIPTED, "prompt": "x"})
                chats.refused(None, 403)
                assert chats.receive() == {"done": True}
                chats.send({"attach": job_id})  # of the same tenant, and a raw completion
                chats.refused("not_found", 404)
                assert chats.receive() == {"done": True}
                chats.send({"cancel": job_id})
                chats.refused("not_found", 404)
            far.send({"cancel": job_id})
            far.refused("not_found", 404)
            far.send({"attach": job_id})
            far.refused("not_found", 404)
            with Socket(stack.port, {"x-api-key": made["key"]}) as second:
                second.send({"model": SCRIPTED, "prompt": "x"})
                assert second.refused("rate_limit_exceeded", 429)["retry_after_s"] > 0
                assert second.receive() == {"done": True}
            ws.send({"cancel": job_id})
            ws.until_done()
            run_keys(stack.env, "revoke", made["id"])
            wait_for(lambda: handshake_status(stack.port, X_Api_Key=made["key"]) == 401, 5)
            ws.send({"model": SCRIPTED, "prompt": "x"})
            while ws.receive().get("status") != 401:
                pass
