"""What the compose file starts, run without containers: the store by its own command, the API with its own settings. Nobody
gets in, or anything up, without password and key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from scripts import ports
from scripts.store import server_binary
from shared import connection
from tests.conftest import wait_for
from tests.deploy import tools
from tests.stack import Client

PASSWORD = "0f1e2d"


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(tools.COMPOSE.read_text(encoding="utf-8"))["services"][name]
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the store that the compose file's own command starts."""
    folder = tmp_path_factory.mktemp("store")
    binary = folder / "valkey-server"
    binary.symlink_to(server_binary(lambda line: None))
    port = ports.any_free()
    text = tools.swap(
        service("store")["command"][0].replace("$$", "$"),
        ("--dir /data", f"--dir '{folder}' --bind 127.0.0.1 --port {port}"),
    )
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "STORE_PASSWORD": PASSWORD, "STORE_MEMORY": "1gb"}
    process = subprocess.Popen([*service("store")["entrypoint"], text], env=environment, stdout=subprocess.DEVNULL)
    client = connection.connect(f"redis://:{PASSWORD}@127.0.0.1:{port}/0")
    try:
        wait_for(lambda: answers(client))
        yield port
    finally:
        process.terminate()
        assert process.wait(30) == 0


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def environment(store: int, **more: object) -> dict[str, str]:
    """That of the API's container, with this machine's addresses."""
    given = service("api")["environment"]
    assert given["REDIS_URL"].endswith("@store:6379/0")
    settings = {
        "REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1:{store}/0",
        "SLUICE_DRAIN_S": given["SLUICE_DRAIN_S"],
        "SLUICE_TRUSTED_PROXIES": given["SLUICE_TRUSTED_PROXIES"].partition(":-")[2].removesuffix("}"),
        "SLUICE_HOST": "0.0.0.0",  # the image's
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_") and k != "REDIS_URL"}
    return {**inherited, **settings, "PYTHONPATH": str(tools.ROOT), **{k: str(v) for k, v in more.items()}}


def test_the_store_keeps_what_it_has_and_asks_for_the_password(store: int) -> None:
    client = redis.Redis(port=store, password=PASSWORD, decode_responses=True)
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert int(client.config_get("maxmemory")["maxmemory"]) == 2**30
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=store).ping()


def test_the_api_starts_with_a_key_only(store: int, tmp_path: Path) -> None:
    port = ports.any_free()
    given = environment(store, SLUICE_PORT=port, SLUICE_FILES_URL=tmp_path / "files")
    sluice = (sys.executable, "-m", "scripts.cli")
    refused = subprocess.run([*sluice, "api"], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "no API key is configured" in refused.stderr and "sluice keys add" in refused.stderr

    made = subprocess.run([*sluice, "keys", "add"], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    health = [sys.executable, str(tools.DEPLOY / "docker" / "api_health.py")]
    api = subprocess.Popen([*sluice, "api"], cwd=tmp_path, env=given)
    try:
        wait_for(lambda: subprocess.run(health, env=given, capture_output=True, timeout=60).returncode == 0, timeout=60)
        assert [Client(port).call("GET", path).status for path in ("/health", "/ready")] == [200, 200]
        assert Client(port).call("GET", "/v1/models").status == 401
        assert Client(port, made.stdout.strip()).call("GET", "/v1/models").status == 200
    finally:
        api.terminate()
        assert api.wait(60) == 0
    assert subprocess.run(health, env=given, capture_output=True, timeout=60).returncode == 1
