"""A store that sentinels watch: real servers, three real sentinels, and a primary that dies in the middle of streams."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from scripts.store import server_binary
from shared import connection, keys
from shared.store_rules import check_store
from tests.conftest import Worker, script, wait_for
from tests.integration.test_store_access import Api
from tests.stack import SCRIPTED, free_port

#: After this silence a sentinel takes a server for dead, ms.
DOWN_MS = 1000


class Watched:
    """A primary, a replica and three sentinels on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        first, second = self._server(), self._server()
        self.client(second).replicaof("127.0.0.1", str(first))
        wait_for(lambda: self.client(second).info("replication")["master_link_status"] == "up", 20)
        for port in (first, second):
            self.client(port).config_set("min-replicas-max-lag", 10)
        self.sentinels = [self._sentinel(first) for _ in range(3)]
        for port in self.sentinels:
            wait_for(lambda port=port: self._knows(port), 30)
        addresses = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        self.url = f"redis+sentinel://127.0.0.1:1,{addresses}/main/0"
        self.primary, self.replica = first, second

    def _start(self, port: int, *words: str) -> int:
        command = [str(server_binary(lambda line: None)), *words]
        self.processes[port] = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        wait_for(lambda: _answers(self.client(port)), 20)
        return port

    def _server(self) -> int:
        port = free_port()
        (self.folder / str(port)).mkdir()
        words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder / str(port)), "--save", ""]
        return self._start(port, *words, "--appendonly", "yes", "--repl-diskless-sync-delay", "0")

    def _sentinel(self, primary: int) -> int:
        port = free_port()
        file = self.folder / f"sentinel-{port}.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary} 2\n"
            f"sentinel down-after-milliseconds main {DOWN_MS}\nsentinel failover-timeout main 5000\n"
        )
        return self._start(port, str(file), "--sentinel")

    def _knows(self, port: int) -> bool:
        state = self.client(port).info("sentinel")["master0"]
        return bool(state["slaves"] == 1 and state["sentinels"] == 3)

    def client(self, port: int) -> Any:
        return redis.Redis(host="127.0.0.1", port=port, socket_timeout=5)

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait(10)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    try:
        watched.start()
        yield watched
    finally:
        watched.close()


@contextlib.contextmanager
def serving(url: str) -> Iterator[Api]:
    worker = Worker(url, f"w{time.monotonic_ns()}", lease_s=30)
    api = Api(url)
    try:
        wait_for(lambda: api.serves(SCRIPTED), 30)
        yield api
    finally:
        api.close()
        worker.kill()


def test_streams_go_on_when_the_primary_dies(watched: Watched) -> None:
    """The replica has all that was written when the primary dies, and lanes write on behind it."""
    words = [f"w{number} " for number in range(12)]
    with serving(watched.url) as api, api.open(script(*words, delay_ms=700)) as stream:
        stream.goes_on(3)
        log = keys.log(stream.id)
        wait_for(lambda: watched.client(watched.replica).xlen(log) == watched.client(watched.primary).xlen(log) > 3)
        watched.kill(watched.primary)
        stream.read()
        assert (stream.text, stream.finish, stream.done) == ("".join(words), "stop", 1)
        assert stream.usage is not None and stream.usage["completion_tokens"] == len(words) + 1
        wait_for(lambda: watched.client(watched.replica).role()[0] == b"master", 20)
        # and new ones are taken
        assert api.complete(script("after")).text == "after"


def test_after_a_failover_connections_find_the_new_primary(watched: Watched) -> None:
    client: Any = connection.connect(watched.url)
    assert client.set("a", "1")
    watched.client(watched.sentinels[0]).execute_command("SENTINEL", "FAILOVER", "main")
    wait_for(lambda: watched.client(watched.replica).role()[0] == b"master", 20)
    wait_for(lambda: watched.client(watched.primary).role()[0] == b"slave", 20)
    wait_for(lambda: _sets(client, "2"), 20)
    assert watched.client(watched.replica).get("a") == b"2"


def test_a_connection_that_finds_itself_at_a_replica_ends(watched: Watched) -> None:
    """Also where nobody has cut it, and before the sentinels know better."""
    direct = connection.raw(watched.url)
    direct.connect()
    watched.client(watched.primary).replicaof("127.0.0.1", str(watched.replica))
    direct.send_command("SET", "a", "2")
    with pytest.raises(redis.ConnectionError, match="became a replica"):
        direct.read_response()
    assert not direct.is_connected
    with pytest.raises(redis.ConnectionError, match="not the primary any more"):
        direct.connect()


def _sets(client: Any, value: str) -> bool:
    try:
        return bool(client.set("a", value))
    except redis.RedisError:
        return False


def test_a_primary_that_nobody_copies_is_warned_of(watched: Watched) -> None:
    assert any("min-replicas-to-write" in warning for warning in check_store(watched.url))
    watched.client(watched.primary).config_set("min-replicas-to-write", 1)
    assert not any("min-replicas-to-write" in warning for warning in check_store(watched.url))
