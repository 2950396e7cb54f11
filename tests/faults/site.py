"""Two API nodes, two workers and a store, each a process on a machine of its own (a network namespace).

Clients reach the API nodes over another network than the one that the store and the workers are on. Knows nothing of what
is tried with them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.store import DataFolder, server_binary, server_command, wait_until_answering
from shared import connection, keys
from tests.conftest import wait_for
from tests.faults import books
from tests.faults.network import HUB, Network, why_not
from tests.stack import ROOT, SCRIPTED, Client

FRONT, BACK = "front", "back"
STORE = "store"
APIS, WORKERS = ("api1", "api2"), ("worker1", "worker2")
PORT = 8000
#: How long a worker that is not heard of lives, and requests of a dead API process run on, s.
LEASE, GRACE = 3.0, 20.0
#: How long a process that is told to stop lets its requests go on, s.
DRAIN = 2.0
#: How long a response of an API node waits for the store, s.
STORE_WAIT = {"api1": 60.0, "api2": 6.0}


class ApiNode(Client):
    """An API node, as seen by clients on its front network."""

    def __init__(self, network: Network, name: str) -> None:
        super().__init__(PORT)
        self._network, self.name = network, name
        self.host = network.address(name, FRONT)

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        client = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with self._network.inside(HUB):
            client.connect()
        return client

    def ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return bool(self.call("GET", "/ready", timeout=2).status == 200)
        return False


class Site:
    """All processes, each in its namespace. `store`: a client of the store that no cut concerns."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.apis = {name: ApiNode(network, name) for name in APIS}

    def start(self, socket: Path) -> None:
        address = self.network.address(STORE, BACK)
        command = server_command(server_binary(lambda line: None), socket)
        command += ["--port", "6379", "--bind", address, "--protected-mode", "no"]
        self._run(STORE, *command)
        self.store: Any = connection.connect(f"unix://{socket}")
        assert wait_until_answering(f"unix://{socket}", lambda: self.processes[STORE].poll() is None)
        url = f"redis://{address}:6379/0"
        for name in WORKERS:
            self._run(name, sys.executable, "-m", "workers", "--engine", SCRIPTED, REDIS_URL=url)
        for name, api in self.apis.items():
            more = {"SLUICE_INSECURE": "1", "SLUICE_ALLOWED_HOSTS": json.dumps([api.host])}
            more["SLUICE_STORE_WAIT_S"] = str(STORE_WAIT[name])
            command = [sys.executable, "-m", "api", "--host", "0.0.0.0", "--port", str(PORT)]
            self._run(name, *command, REDIS_URL=url, **more)
        wait_for(self.whole, 90)

    def _run(self, node: str, *words: str, **env: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        settings = {"LEASE_S": LEASE, "ORPHAN_GRACE_S": GRACE, "DRAIN_S": DRAIN, "LOG_LEVEL": "WARNING"}
        env = {**kept, **{f"SLUICE_{name}": str(value) for name, value in settings.items()}, **env}
        folder = self.folder / node
        folder.mkdir()
        with (folder / "log.txt").open("wb") as log:
            self.processes[node] = subprocess.Popen(
                self.network.command(node, *words),
                cwd=folder if node == STORE else ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, node: str) -> str:
        return (self.folder / node / "log.txt").read_text(errors="replace")

    def pid(self, node: str) -> int:
        return self.processes[node].pid

    def worker(self, node: str) -> str | None:
        """The name by which a worker that serves is known."""
        name = books.worker_of(self.store, self.pid(node))
        return name if name and self.store.exists(keys.lease(name)) else None

    def whole(self) -> bool:
        """Nobody has died by himself, and both workers and API nodes serve."""
        for node, process in self.processes.items():
            assert process.poll() is None, f"{node} ended: {self.log(node)[-2000:]}"
        return all(map(self.worker, WORKERS)) and all(api.ready() for api in self.apis.values())

    def at_rest(self) -> bool:
        return not books.running(self.store) and not books.left_behind(self.store)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def built(folder: Path) -> Iterator[Site]:
    if reason := why_not():
        pytest.skip(reason)
    with (
        Network({FRONT: APIS, BACK: [STORE, *APIS, *WORKERS]}) as network,
        DataFolder(folder / "data") as data,
        contextlib.closing(Site(folder, network)) as site,
    ):
        site.start(data.socket)
        yield site
