"""A checkout, a home and a temporary folder with a space, an umlaut and 120 characters, and the commands in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import bootstrap, ports
from scripts.client import Client
from tests.conftest import ROOT, wait_for
from tests.faults.processes import end, in_session

ODD = "Größe und Länge " + "z" * 120


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the commands need, under an odd path."""
    root = tmp_path / ODD / "sluice"
    root.mkdir(parents=True)
    for name in ("api", "workers", "shared", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*bootstrap.TEST, "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The caller's, with an odd home and temporary folder and nothing that leads back here."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLUICE_", "PYTHON", "XDG_")) and k != "REDIS_URL"}
    places = {name: tmp_path / f"{name} {ODD}" for name in ("HOME", "TMPDIR")}
    for place in places.values():
        place.mkdir()
    return {**kept, **{name: str(place) for name, place in places.items()}, "SLUICE_PYTHON": sys.executable}


def borrow_environment(venv: Path) -> None:
    """An environment with the packages of the one the tests run in: what an install would have made, without the minutes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    packages = venv / "lib" / f"python{version}" / "site-packages"
    borrowed = {*site.getsitepackages(), sysconfig.get_path("purelib")}
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(borrowed)), encoding="utf-8")
    installed = {name: bootstrap._digest(ROOT / name) for name in bootstrap.RUN}
    bootstrap.Stamp(str(venv), version, installed).write(venv)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        end(process.pid)
        process.wait(10)


@pytest.fixture
def up(
    checkout: Path, environment: dict[str, str], started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> Callable[[], tuple[subprocess.Popen[bytes], Path]]:
    """Starts `./scripts/up` and waits until it says it is ready."""
    borrow_environment(checkout / ".venv")

    def start() -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"{len(started)}.log"
        command = ["./scripts/up", "--engine", "scripted", "--port", str(ports.any_free())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=checkout, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        started.append(process)
        wait_for(lambda: process.poll() is not None or b"| ready: " in log.read_bytes(), 60)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return process, log

    return start


def test_up_runs_there_and_is_the_process_that_was_started(
    checkout: Path, up: Callable[[], tuple[subprocess.Popen[bytes], Path]]
) -> None:
    process, log = up()
    [url] = re.findall(r"ready: (\S+)", log.read_text(encoding="utf-8"))
    answer = Client(url).post("/v1/completions", {"model": "scripted", "prompt": "grüße aus der Ferne"})
    assert answer["choices"][0]["text"] == "grüße aus der Ferne"
    commands = in_session(process.pid)
    for part in ("-m api", "-m workers --engine scripted", "-server"):
        assert [command for command in commands.values() if part in command], (part, commands)
    assert "scripts.cli up" in commands[process.pid]
    assert json.loads((checkout / ".sluice" / "lock").read_text(encoding="utf-8"))["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, log.read_text(encoding="utf-8")
    assert in_session(process.pid) == {}


def test_a_second_up_in_the_same_checkout_is_refused(
    checkout: Path, environment: dict[str, str], up: Callable[[], tuple[subprocess.Popen[bytes], Path]]
) -> None:
    first, _ = up()
    command = ["./scripts/up", "--engine", "scripted", "--port", str(ports.any_free())]
    second = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"pid {first.pid}" in second.stderr
    assert "Traceback" not in second.stderr


def test_after_kill_9_the_next_up_starts_at_once(up: Callable[[], tuple[subprocess.Popen[bytes], Path]]) -> None:
    first, _ = up()
    first.kill()
    wait_for(lambda: not in_session(first.pid), 5)
    second, _ = up()
    assert in_session(second.pid)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_is_installed_there(checkout: Path, environment: dict[str, str]) -> None:
    """The real thing: an environment and every pinned package, from the index."""
    for attempt in range(2):
        ended = subprocess.run(
            ["./scripts/up", "--help"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=800
        )
        assert ended.returncode == 0, ended.stderr
        assert "--engine" in ended.stdout
        assert ("Installing requirements.txt" in ended.stdout) is (attempt == 0)
