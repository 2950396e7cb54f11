"""API and workers of two versions side by side, under load: every request gets its whole text, once.

With the newest release, where there is a tag of one; and with processes of this version that know as much as job version 1.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT, Store, script, wait_for
from tests.stack import SCRIPTED, Client, free_port, strict_json

#: Requests of a load, and how many of them at a time.
REQUESTS, AT_A_TIME = 60, 12
PIECES = ("one ", "two ", "three ", "four ")
NUMBER = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}


class Version(NamedTuple):
    """Where its code is, and what runs as its API and its workers."""

    folder: Path
    api: str = "api"
    worker: str = "workers"


THIS = Version(ROOT)
SIMULATED = Version(ROOT, "tests.older_api", "tests.older_worker")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The newest tag of a release, unpacked. It runs in the environment of this version."""
    asked = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("there is no tag v* of an earlier release")
    folder = tmp_path_factory.mktemp("released")
    packed = subprocess.run(["git", "archive", found.stdout.strip()], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return Version(folder)


@contextmanager
def process(version: Version, module: str, url: str, *options: str) -> Iterator[None]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    env |= {"REDIS_URL": url, "PYTHONPATH": str(version.folder), "SLUICE_LOG_LEVEL": "WARNING"}
    command = [sys.executable, "-m", module, *options]
    running = subprocess.Popen(command, cwd=version.folder, env=env)
    try:
        yield
    finally:
        running.terminate()
        running.wait(60)


@contextmanager
def served(store: Store, api: Version, *workers: Version) -> Iterator[Client]:
    client = Client(free_port())

    def ready() -> bool:
        try:
            found = client.status()["workers"]
        except (OSError, http.client.HTTPException, AssertionError):
            return False
        return len(found) == len(workers)

    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(process(worker, worker.worker, store.url, "--engine", SCRIPTED))
        stack.enter_context(process(api, api.api, store.url, "--port", str(client.port)))
        wait_for(ready, 90)
        yield client


def one(client: Client, number: int) -> str:
    """A request's text: streamed or not, of either kind of answer."""
    if number % 3 == 0:
        return client.complete(script(*PIECES, str(number))).text
    stream = client.stream(script(*PIECES, str(number), delay_ms=10), timeout=90)
    assert stream.done == 1 and stream.error is None, stream
    return stream.text


def under_load(client: Client) -> list[str]:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda number: one(client, number), range(REQUESTS)))


WHOLE = ["".join(PIECES) + str(number) for number in range(REQUESTS)]


def test_an_older_api_with_new_workers(store: Store) -> None:
    with served(store, SIMULATED, THIS) as client:
        assert under_load(client) == WHOLE


def test_a_new_api_with_older_workers_and_a_new_one(store: Store) -> None:
    """What only the new one understands goes to it, while others go to both."""
    with served(store, THIS, SIMULATED) as client:
        assert under_load(client) == WHOLE
        with ThreadPoolExecutor(1) as pool:
            newer = pool.submit(client.complete, script("7"), **NUMBER)
            wait_for(lambda: client.queue()[0] == 1)
            assert client.complete(script("a")).text == "a"  # it holds up nobody
            assert not newer.done()
            with process(THIS, "workers", store.url, "--engine", SCRIPTED):
                answer: Any = newer.result(90)
        assert strict_json(answer.text) == 7


@pytest.mark.parametrize("older", ["api", "workers"])
def test_the_previous_release(store: Store, released: Version, older: str) -> None:
    pair = (released, THIS) if older == "api" else (THIS, released)
    with served(store, *pair) as client:
        assert under_load(client) == WHOLE
