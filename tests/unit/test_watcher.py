"""The hang-up watcher with real sockets: every way to leave is noticed, nobody else is disturbed."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import gevent
import gevent.event
import pytest

from api.relay.watcher import Watcher


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield listener


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """(client's end, server's end)"""
    client = socket.create_connection(listener.getsockname())
    return client, listener.accept()[0]


class Called:
    """Counts calls and can be waited for."""

    def __init__(self) -> None:
        self.times = 0
        self._event = gevent.event.Event()

    def __call__(self) -> None:
        self.times += 1
        self._event.set()

    def within(self, seconds: float) -> bool:
        return bool(self._event.wait(seconds))


def close(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def pipelined_then_close(client: socket.socket) -> None:
    client.sendall(b"GET /next HTTP/1.1\r\n\r\n" * 1000)
    client.close()


def pipelined_then_half_close(client: socket.socket) -> None:
    client.sendall(b"x" * 10_000)
    client.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [close, half_close, reset, pipelined_then_close, pipelined_then_half_close])
@pytest.mark.parametrize("before", [False, True])
def test_every_way_to_leave(watcher: Watcher, listener: socket.socket, leave: object, before: bool) -> None:
    client, server = connect(listener)
    gone = Called()
    if before:
        leave(client)  # type: ignore[operator]
    watch = watcher.watch(server.fileno(), gone)
    if not before:
        leave(client)  # type: ignore[operator]
    assert gone.within(1) and len(watcher) == 0
    gevent.sleep(0)
    watcher.forget(watch)
    assert gone.times == 1
    server.close()


def test_unread_data_is_no_hang_up(watcher: Watcher, listener: socket.socket) -> None:
    client, server = connect(listener)
    gone = Called()
    watcher.watch(server.fileno(), gone)
    client.sendall(b"pipelined")
    assert not gone.within(0.05)
    assert server.recv(100) == b"pipelined"
    client.close()
    assert gone.within(1)


def test_a_client_that_only_does_not_read_is_there(listener: socket.socket) -> None:
    """However long: the kernel says that all it could take has arrived. (One that vanished: tests/faults/test_network.py.)"""
    watcher = Watcher(unheard=0.1, look=0.02)
    client, server = connect(listener)
    gone = Called()
    watcher.watch(server.fileno(), gone)
    server.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            server.send(b"x" * 65536)
    assert not gone.within(1)
    client.close()
    assert gone.within(1)
    watcher.close()


def test_a_forgotten_client_is_not_reported(watcher: Watcher, listener: socket.socket) -> None:
    client, server = connect(listener)
    gone = Called()
    watch = watcher.watch(server.fileno(), gone)
    watcher.forget(watch)
    watcher.forget(watch)
    client.close()
    assert not gone.within(0.05)


def test_descriptors_are_used_again(watcher: Watcher, listener: socket.socket) -> None:
    """The server's end was closed without a word, and the next connection got its number."""
    first_client, first_server = connect(listener)
    first, second = Called(), Called()
    old = watcher.watch(first_server.fileno(), first)
    number = first_server.fileno()
    second_client = socket.create_connection(listener.getsockname())
    first_server.close()
    second_server = listener.accept()[0]
    assert second_server.fileno() == number
    watcher.watch(number, second)
    watcher.forget(old)
    first_client.close()
    assert len(watcher) == 1 and not first.within(0.02)
    second_client.close()
    assert second.within(1) and first.times == 0


def test_many_connections(watcher: Watcher, listener: socket.socket) -> None:
    pairs = [connect(listener) for _ in range(300)]
    calls = [Called() for _ in pairs]
    for (_, server), call in zip(pairs, calls, strict=True):
        watcher.watch(server.fileno(), call)
    for client, _ in pairs[::2]:
        client.close()
    assert all(call.within(1) for call in calls[::2])
    assert len(watcher) == 150 and not any(call.times for call in calls[1::2])
    for client, _ in pairs[1::2]:
        client.shutdown(socket.SHUT_WR)
    assert all(call.within(1) for call in calls) and len(watcher) == 0
    for client, server in pairs:
        client.close()
        server.close()


def test_a_callback_that_fails_harms_nobody(watcher: Watcher, listener: socket.socket) -> None:
    def fails() -> None:
        raise RuntimeError("callback")

    pairs = [connect(listener) for _ in range(2)]
    fine = Called()
    watcher.watch(pairs[0][1].fileno(), fails)
    watcher.watch(pairs[1][1].fileno(), fine)
    for client, _ in pairs:
        client.close()
    assert fine.within(1)
