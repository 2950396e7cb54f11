"""Real servers for the tests: a store of their own, workers as processes, and an API side in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from api.gateway import Gateway
from api.relay.hub import Hub
from scripts.store import DataFolder, server_binary, server_command, wait_until_answering
from shared import connection, keys
from shared.frames import Delta, End, Error, Finish, Frame, Name, Start, Take
from shared.jobs import Job, Placement, new_id
from shared.settings import Settings
from tests.stack import REAL, SCRIPTED, Stack

#: No clock in property tests: the machine may be busy with anything else.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

ROOT = Path(__file__).resolve().parent.parent
#: For tests that compare with the package, or with what the server finds by it. The server, and so the suite, runs without.
needs_jsonschema = pytest.mark.jsonschema
#: How many tests that are in all, so that a run without it has as many skips and no more.
NEED_JSONSCHEMA = 300
try:
    import jsonschema
except ImportError:
    jsonschema = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="Write the transcripts of tests/contract/golden anew."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    need = [item for item in items if item.get_closest_marker("jsonschema")]
    if jsonschema is None:
        for item in need:
            item.add_marker(pytest.mark.skip(reason="jsonschema is not installed"))
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if whole and len(need) != NEED_JSONSCHEMA:
            raise pytest.UsageError(f"{len(need)} tests need jsonschema, not {NEED_JSONSCHEMA}: tests/conftest.py.")


def wait_for(what: Callable[[], Any], timeout: float = 30.0, every: float = 0.02) -> Any:
    """Polls until `what()` is true and returns it. Fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := what()):
        if time.monotonic() > end:
            pytest.fail(f"still not so after {timeout} s: {getattr(what, '__name__', what)}")
        time.sleep(every)
    return value


def script(*pieces: str, **more: Any) -> str:
    """A prompt for the scripted engine."""
    return json.dumps({"pieces": list(pieces), **more})


class Store:
    """A real server on a unix socket, with the settings of the product's own."""

    def __init__(self, folder: Path) -> None:
        self._data = DataFolder(folder / "data")
        self._data.__enter__()
        self.url = self._data.url
        self.start()
        self.client: Any = connection.connect(self.url)

    def start(self) -> None:
        command = server_command(server_binary(lambda line: None), self._data.socket)
        self.process = subprocess.Popen(command, cwd=self._data.path, stdout=subprocess.DEVNULL)
        assert wait_until_answering(self.url, lambda: self.process.poll() is None)

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(10)
        self._data.__exit__(None, None, None)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    store.close()


class Worker:
    """`python -m workers`, or another `module` that takes its options, as a child of the test. `seen_by`: the URL by which
    the test finds it there, if not `url`."""

    def __init__(
        self,
        url: str,
        name: str,
        *options: str,
        module: str = "workers",
        seen_by: str | None = None,
        **settings: object,
    ) -> None:
        self.name = name
        env = {
            **os.environ,
            "REDIS_URL": url,
            **{f"SLUICE_{key.upper()}": str(value) for key, value in settings.items()},
        }
        command = [sys.executable, "-m", module, "--engine", "scripted", "--name", name, *options]
        self.process = subprocess.Popen(command, env=env, cwd=ROOT)
        client: Any = connection.connect(seen_by or url)
        wait_for(lambda: self.process.poll() is not None or client.exists(keys.stat(name)), 60)
        client.close()
        assert self.process.poll() is None, "the worker did not start"

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start_worker(store: Store) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*options: str, **settings: object) -> Worker:
        workers.append(Worker(store.url, f"w{time.monotonic_ns()}", *options, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        # names of dead workers do not disturb the next test
        store.client.srem(keys.WORKERS, worker.name)
        store.client.delete(keys.lease(worker.name), keys.lanes(worker.name), keys.stat(worker.name))


class Stream:
    """What came of one request: its frames so far."""

    def __init__(self, node: Node, job: Job) -> None:
        self.job = job
        self.node = node
        self.frames: list[Frame] = []
        self.names: list[Name] = []
        self.subscription = node.hub.open(job.id)

    def read(self, until: Callable[[Stream], Any] = lambda stream: stream.ended, timeout: float = 30.0) -> Stream:
        """Reads on until the condition holds (default: the end)."""
        end = time.monotonic() + timeout
        while not until(self):
            got = self.subscription.get(max(0.0, end - time.monotonic()))
            assert got is not None, f"silence after {len(self.frames)} frames: {self.frames[-3:]}"
            self.names.append(got[0])
            self.frames += got[1]
        return self

    @property
    def ended(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1], End | Error)

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.frames if isinstance(frame, Delta))

    @property
    def tokens(self) -> list[int]:
        return [token for frame in self.frames if isinstance(frame, Delta) for token in frame.t]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((frame.error for frame in self.frames if isinstance(frame, Error)), None)

    @property
    def finish(self) -> str | None:
        return next((frame.reason for frame in self.frames if isinstance(frame, Finish)), None)

    @property
    def end(self) -> End:
        return next(frame for frame in self.frames if isinstance(frame, End))

    def started(self) -> bool:
        return any(isinstance(frame, Start) for frame in self.frames)

    def taken(self) -> bool:
        return any(isinstance(frame, Take) for frame in self.frames)

    def hang_up(self) -> None:
        self.subscription.close()
        self.node.gateway.detach(self.job.id)


class Node:
    """The API's side of the store, without HTTP."""

    def __init__(self, url: str, *, settings: dict[str, Any] | None = None, **hub: Any) -> None:
        self.settings = Settings(redis_url=url, **(settings or {}))
        self.store: Any = connection.connect(url)
        self.gateway = Gateway(self.store, self.settings)
        self.hub = Hub(url, self.gateway.proc, store_wait=30.0, lost=self.gateway.end_if_abandoned, **hub)
        self.hub.start()
        self.gateway.start(self.hub.following)
        wait_for(lambda: self.store.sismember(keys.PROCS, self.gateway.proc))

    def submit(
        self, prompt: str, *, tenant: str = "default", placement: dict[str, Any] | None = None, **fields: Any
    ) -> Stream:
        wait_for(self.gateway.cards)
        fields = {"model": "scripted", **fields}
        job = Job(id=new_id(), prompts=[prompt], seed=1, created=int(time.time()), **fields)
        stream = Stream(self, job)
        self.gateway.submit(job, Placement(tenant=tenant, **(placement or {})))
        stream.subscription.submitted = True
        return stream

    def busy(self) -> int:
        return sum(worker["busy"] for worker in self.gateway.status()["workers"])


@pytest.fixture
def open_node(store: Store) -> Iterator[Callable[..., Node]]:
    """Opens API sides with settings of their own. (One that stays open would sweep for the others, by its settings.)"""
    nodes: list[Node] = []

    def open_one(*, subscribe_delay: float = 0.0, **settings: Any) -> Node:
        nodes.append(Node(store.url, settings=settings, subscribe_delay=subscribe_delay))
        return nodes[-1]

    yield open_one
    for node in nodes:
        node.hub.stop()
        node.gateway.leave()


@pytest.fixture
def node(open_node: Callable[..., Node]) -> Node:
    return open_node()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The whole product with both engines and its default settings. Shared: leave nothing running."""
    with Stack(tmp_path_factory.mktemp("stack"), (SCRIPTED, "llamacpp")) as stack:
        yield stack


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Another one with one lane an engine, a short context of the real model, comments each second, an alias, and an
    origin whose pages may use it."""
    with Stack(
        tmp_path_factory.mktemp("narrow"),
        (SCRIPTED, "llamacpp"),
        options=("--alias", f"small={REAL}"),
        lanes=1,
        context_length=512,
        sse_heartbeat_s=1,
        cors_origins='["https://app.example"]',
    ) as stack:
        yield stack


@pytest.fixture(params=[SCRIPTED, REAL])
def model(request: pytest.FixtureRequest) -> str:
    """Each engine in turn, by the id it serves."""
    return request.param
