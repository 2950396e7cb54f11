"""`sluice up`: store, API and workers on this machine. Turns options into programs for the supervisor.

The one place that knows all the command lines. What it finds wrong before anything runs, it says with the way out
(`CannotStart`). How many workers run is `scripts/scaler.py`'s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from scripts import carried_model, ports
from scripts.child import Program
from scripts.client import Client, ServerError, ServerUnreachable
from scripts.scaler import ScaledPool, Scaler, source_of
from scripts.scaling import Range
from scripts.store import (
    DataFolder,
    FolderInUse,
    StoreRefused,
    check_store,
    server_binary,
    server_command,
    wait_until_answering,
)
from scripts.supervisor import Supervisor
from scripts.undertaker import Undertaker
from shared.api_keys import keys_configured
from shared.exposure import Exposed, check_exposure
from shared.settings import Settings
from shared.store_rules import without_password
from workers.engines import model_name, split_model
from workers.engines.exllamav2.directory import ModelDirectory
from workers.engines.exllamav2.errors import LoadError
from workers.engines.exllamav2.options import ExLlamaV2Options, check_loras
from workers.engines.llamacpp.carried import CARRIED_MODEL_ID

ENGINES = ("llamacpp", "exllamav2", "scripted")

#: Package an engine needs, and how to get it. What exllamav2 needs is more, and its own check says it.
_NEEDS = {"llamacpp": ("xllamacpp", "pip install -r requirements.txt")}
#: Longest wait for the answer whether this machine can run the GPU engine, s; torch takes some to import.
_GPU_CHECK_S = 180.0
#: Settings that change what a model's card says, besides those of exllamav2.
_SHAPING = {"lanes", "context_cells", "context_length", "libllama"}
_ROOT = Path(__file__).parents[1]


class CannotStart(Exception):
    """`up` gives up before it is ready; the message says what to do."""


@dataclass
class Options:
    """What `sluice up` was asked for. `models` go to the engines that take one, in order; `workers` to all engines, or one to
    each."""

    engines: Sequence[str] = ("llamacpp",)
    models: Sequence[str] = ()
    aliases: Sequence[str] = ()
    workers: Sequence[Range] = (Range(1, 1),)


@dataclass
class Pool:
    """The workers of one engine and model. `model` is the file or folder, None for an engine's own."""

    engine: str
    model: Path | None
    model_id: str
    aliases: list[str] = field(default_factory=list)
    workers: Range = field(default_factory=lambda: Range(1, 1))


def _pool(engine: str, model: str | None) -> Pool:
    """`model` is `DIR` or `DIR=ID`, read as the worker reads it."""
    if engine == "scripted":
        return Pool(engine, None, "scripted")
    if model is None:
        if engine != "llamacpp":
            raise CannotStart(f"--engine {engine} needs --model DIR, a folder with a model.")
        return Pool(engine, None, CARRIED_MODEL_ID)
    path, model_id = split_model(model)
    if not Path(path).exists():
        raise CannotStart(f"--model {model}: there is no {Path(path).absolute()}.")
    return Pool(engine, Path(path), model_id or model_name(Path(path)))


def parse_workers(text: str) -> Range:
    """`MIN:MAX` or `N`. Raises CannotStart."""
    low, colon, high = text.partition(":")
    try:
        found = Range(int(low), int(high if colon else low))
    except ValueError:
        found = Range(-1, -1)
    if not 0 <= found.low <= found.high <= 1024:
        raise CannotStart(f"--workers {text}: give MIN:MAX, two numbers from 0 to 1024 such as 1:1, or one number.")
    return found


def pools(options: Options) -> list[Pool]:
    """Which pool gets which model and alias. Raises CannotStart."""
    for engine in options.engines:
        if engine not in ENGINES:
            raise CannotStart(f"--engine {engine}: there is no such engine. There are: {', '.join(ENGINES)}.")
    models = list(options.models)
    made = [_pool(e, models.pop(0) if models and e != "scripted" else None) for e in options.engines]
    if models:
        raise CannotStart(
            f"--model {models[0]}: more models than engines that take one. Give --engine once for each model."
        )
    ranges = list(options.workers) * len(made) if len(options.workers) == 1 else list(options.workers)
    if len(ranges) != len(made):
        raise CannotStart(
            f"--workers: {len(ranges)} for {len(made)} engines. Give one for all, or one for each in the order of --engine."
        )
    for pool, workers in zip(made, ranges, strict=True):
        pool.workers = workers
    for alias in options.aliases:
        name, equals, target = alias.partition("=")
        if not (name and equals and target):
            raise CannotStart(f"--alias {alias}: give NAME=MODEL, the model's id last.")
        takers = [pool for pool in made if pool.model_id == target]
        if not takers:
            served = ", ".join(pool.model_id for pool in made)
            raise CannotStart(f"--alias {alias}: this run serves no model {target}; it serves {served}.")
        for pool in takers:
            pool.aliases.append(alias)
    return made


def up(options: Options, settings: Settings, report: Callable[[str], None] | None = None) -> int:
    """Runs the stack until a signal ends it; returns the exit status. From the main thread. Raises CannotStart."""
    log = Log(as_json=settings.log_format == "json")
    made = pools(options)
    if settings.redis_url is None and not settings.data_dir.exists():  # a store that is yet to be made has no keys
        _check_exposure(settings, keys=False)
    _check_port(settings)
    served = [pool for pool in made if pool.workers.high]
    _check_engines(served, settings)
    if any(pool.engine == "llamacpp" and pool.model is None for pool in served):
        carried_model.ensure(settings.cache_dir)
    try:
        with ExitStack() as stack:
            url, store = _store(settings, log, stack)
            workers = _workers(served, settings, url)
            programs = [*store, _api(settings, url), _batch_runner(settings, url)]
            programs += [program for pool in workers for program in pool]
            supervisor = stack.enter_context(
                Supervisor(
                    programs, say=log.say, hear=log.hear, drain_s=settings.drain_s, on_worker_exit=Undertaker(url)
                )
            )
            if store and not _start_store(supervisor, url):
                return 0
            _check_exposure(settings, keys=keys_configured(url))
            ReadyWatch(settings, served, log.say, report or log.say).start()
            scaled = [
                ScaledPool(
                    pool.model_id,
                    pool.workers,
                    [child for child in supervisor.children if child.program in programs],
                    _source(pool, settings),
                )
                for pool, programs in zip(served, workers, strict=True)
            ]
            Scaler(url, scaled, supervisor, idle_s=settings.idle_s, say=log.say).start()
            supervisor.run()
            return 0
    except (FolderInUse, StoreRefused) as error:
        raise CannotStart(str(error)) from None


def _check_exposure(settings: Settings, *, keys: bool) -> None:
    try:
        check_exposure(settings, keys=keys)
    except Exposed as error:
        raise CannotStart(str(error)) from None


class Log:
    """Lines of several processes on one standard output, each with the name of whose it is. `as_json`: one object each;
    those that are objects already stay as they are."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._lock = threading.Lock()
        self._as_json = as_json

    def say(self, line: str) -> None:
        self.hear("up", line)

    def hear(self, name: str, line: str) -> None:
        with self._lock:
            try:
                print(_as_object(name, line) if self._as_json else f"{name:<11} | {line}", flush=True)
            except (OSError, ValueError):
                # Nobody reads any more (a closed pipe or terminal): the children must not notice.
                return


def _as_object(name: str, line: str) -> str:
    try:
        if isinstance(json.loads(line), dict):
            return line
    except ValueError:
        pass
    now = datetime.now(UTC).isoformat()
    return json.dumps({"event": line, "level": "info", "timestamp": now, "process": name}, ensure_ascii=False)


class ReadyWatch(threading.Thread):
    """Asks the API until it is ready and a worker has loaded each model of this run, or the model is known if none need run;
    then says so once."""

    def __init__(
        self,
        settings: Settings,
        served: Sequence[Pool],
        say: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True, name="ready")
        self._client = Client(base_url(settings), os.environ.get("SLUICE_API_KEY"), timeout_s=5)
        self._served = {pool.model_id for pool in served}
        self._standing = {pool.model_id for pool in served if pool.workers.low}
        self._say = say
        self._report = report
        self._pause = threading.Event()

    def run(self) -> None:
        asked = 0
        while (missing := self._missing()) is not None:
            asked += 1
            if asked % 150 == 0:
                self._say(f"still waiting: {missing}")
            self._pause.wait(0.2)

    def _missing(self) -> str | None:
        """What is not there yet; None once the ready line is out."""
        try:
            self._client.get("/ready")
        except (ServerUnreachable, ServerError) as error:
            return f"the API is not ready ({error})"
        try:
            status = self._client.get("/v1/status")
        except ServerError as error:
            if error.status not in (401, 403):
                return f"the workers cannot be listed ({error})"
            # Keys are configured and we have none: the API is up, which is what can be seen.
            self._report(f"ready: {self._client.url} (asks for an API key)")
            return None
        except ServerUnreachable as error:
            return str(error)
        live = {worker["model"] for worker in status["workers"]}
        known = {model["id"] for model in status["models"]}
        if missing := (self._standing - live) | (self._served - known):
            return "no worker has loaded " + ", ".join(sorted(missing))
        names = [model if model in live else f"{model} (when asked)" for model in sorted(self._served)]
        self._report(f"ready: {self._client.url} serves {', '.join(names) or 'no model yet'}")
        return None


def base_url(settings: Settings) -> str:
    """Where a client on this machine reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _store(settings: Settings, log: Log, stack: ExitStack) -> tuple[str, list[Program]]:
    """The store's URL, and its program if it is ours."""
    if settings.redis_url is not None:
        for warning in check_store(settings.redis_url):
            log.say(f"warning: {warning}")
        log.say(f"store: {without_password(settings.redis_url)}")
        return settings.redis_url, []
    folder = stack.enter_context(DataFolder(settings.data_dir))
    command = server_command(server_binary(log.say), folder.socket, settings.store_max_mb)
    log.say(f"store: {Path(command[0]).name}, data in {folder.path}")
    return folder.url, [
        Program("store", "store", lambda run: command, folder=folder.path, keep_fds=(folder.lock_fd,)),
    ]


def _start_store(supervisor: Supervisor, url: str) -> bool:
    """Starts the first child and waits for it; False if a signal came first. Raises CannotStart."""
    child = supervisor.children[0]
    if supervisor.start(child) and wait_until_answering(url, lambda: supervisor.still_running(child)):
        return True
    if supervisor.stopping:
        return False
    ended = child.ended()
    words = "; ".join(child.last_lines[-3:]) or "it said nothing"
    raise CannotStart(f"The store does not start ({ended or 'no answer'}). Its last words: {words}")


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _environment(settings: Settings, url: str) -> dict[str, str]:
    """For children: the settings this process resolved, and our own packages first, whatever folder it was started in."""
    inherited = os.environ.get("PYTHONPATH")
    return {
        "REDIS_URL": url,
        "SLUICE_REDIS_URL": url,
        "SLUICE_DATA_DIR": str(settings.data_dir.absolute()),
        "SLUICE_CACHE_DIR": str(settings.cache_dir.absolute()),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), inherited] if inherited else [str(_ROOT)]),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _api(settings: Settings, url: str) -> Program:
    env = {
        **_environment(settings, url),
        "SLUICE_HOST": settings.host,
        "SLUICE_PORT": str(settings.port),
        "SLUICE_API_WORKERS": str(settings.api_workers),
    }
    return Program("api", "api", lambda run: _module("api"), env=env)


def _batch_runner(settings: Settings, url: str) -> Program:
    return Program("batches", "runner", lambda run: _module("scripts.batch_runner"), env=_environment(settings, url))


def _workers(made: Sequence[Pool], settings: Settings, url: str) -> list[list[Program]]:
    """For each pool as many as it may have, of which its fewest run from the start; named `engine-N`."""
    count: Counter[str] = Counter()
    found = []
    for pool in made:
        first = count[pool.engine] + 1
        count[pool.engine] += pool.workers.high
        names = [f"{pool.engine}-{first + index}" for index in range(pool.workers.high)]
        found.append([_worker(pool, n, settings, url, index < pool.workers.low) for index, n in enumerate(names)])
    return found


def _source(pool: Pool, settings: Settings) -> str:
    """What the pool's model card follows from: when it changes, a worker has to write another."""
    files = [] if pool.model is None else sorted(pool.model.rglob("*")) if pool.model.is_dir() else [pool.model]
    identity = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path in files if (stat := path.stat())]
    shaping = {name for name in Settings.model_fields if name.startswith("exl2_")} | _SHAPING
    return source_of(
        pool.engine, pool.model_id, *pool.aliases, settings.model_dump_json(include=shaping), *sorted(identity)
    )


def _worker(pool: Pool, name: str, settings: Settings, url: str, wanted: bool) -> Program:
    arguments = ["--engine", pool.engine]
    if pool.model is not None:
        arguments += ["--model", f"{pool.model}={pool.model_id}"]
    for alias in pool.aliases:
        arguments += ["--alias", alias]
    return Program(
        name,
        "worker",
        lambda run: _module("workers", *arguments, "--name", run),
        env=_environment(settings, url),
        wanted=wanted,
    )


def _check_port(settings: Settings) -> None:
    try:
        if ports.is_free(settings.host, settings.port):
            return
    except OSError as error:
        raise CannotStart(
            f"Cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}."
        ) from None
    who = ports.owner(settings.port)
    raise CannotStart(
        f"Port {settings.port} is in use{f' by {who}' if who else ''}. Choose another one: --port {ports.any_free()}"
    )


def _check_engines(made: Sequence[Pool], settings: Settings) -> None:
    for pool in made:
        package, command = _NEEDS.get(pool.engine, (None, ""))
        if package is not None and importlib.util.find_spec(package) is None:
            raise CannotStart(f"--engine {pool.engine} needs the package {package}: {sys.executable} -m {command}")
        if pool.engine == "exllamav2" and pool.model is not None:
            _check_gpu_engine(pool.model, settings)
        if pool.engine == "llamacpp" and pool.model is not None:
            from workers.engines.llamacpp.model import find_gguf  # numpy, which a machine with only the API lacks

            try:
                find_gguf(pool.model)
            except OSError as error:
                raise CannotStart(f"--engine llamacpp: {error}") from None


def _check_gpu_engine(model: Path, settings: Settings) -> None:
    """What a worker would find missing each time it is started. In a process of its own: torch takes hold of the GPUs."""
    try:
        ModelDirectory(model)
        wanted = ExLlamaV2Options.from_settings(settings, model, "")
        if wanted.draft_model is not None:
            ModelDirectory(wanted.draft_model)
        check_loras(wanted.loras)
    except LoadError as error:
        raise CannotStart(f"--engine exllamav2: {error}") from None
    command = _module("workers.engines.exllamav2.extension")
    environment = {**os.environ, **_environment(settings, "")}
    try:
        checked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_GPU_CHECK_S)
    except subprocess.TimeoutExpired:
        raise CannotStart(
            f"--engine exllamav2: torch did not say within {_GPU_CHECK_S:g} s whether there is a GPU. Does `nvidia-smi` "
            "answer?"
        ) from None
    if checked.returncode != 0:
        words = checked.stderr.strip().splitlines() or [f"the check ended with status {checked.returncode}"]
        raise CannotStart(f"--engine exllamav2: {words[-1]}")
