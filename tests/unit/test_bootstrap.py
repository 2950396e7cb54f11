"""From a bare checkout to an environment: what is checked before anything is installed, and when it is made anew."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts import bootstrap
from scripts.bootstrap import Missing
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("command", "arguments", "needed"),
    [
        ("up", [], True),
        ("up", ["--port", "9000"], True),
        ("up", ["--engine", "scripted"], False),
        ("up", ["--engine=scripted", "--engine=llamacpp"], True),
        ("up", ["--engine", "scripted", "--engine", "llamacpp"], True),
        ("up", ["--engine", "exllamav2", "--model", "llamacpp"], False),
        ("quickstart", ["--once"], True),
        ("bench", ["serve"], False),
        ("test", [], True),
    ],
)
def test_the_cpu_engine_is_only_asked_for_where_it_runs(command: str, arguments: list[str], needed: bool) -> None:
    assert bootstrap.needs_llamacpp(command, arguments) is needed


def test_this_machine_will_do() -> None:
    bootstrap.check_machine()


@pytest.mark.parametrize(
    ("system", "machine", "libc", "word"),
    [
        ("darwin", "arm64", ("", ""), "container"),
        ("linux", "aarch64", ("glibc", "2.36"), "container"),
        ("linux", "x86_64", ("glibc", "2.28"), "2.31"),
        ("linux", "x86_64", ("", ""), "musl"),
    ],
)
def test_another_system_is_told_so(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, libc: tuple[str, str], word: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(Missing, match=word):
        bootstrap.check_machine()


def tools(*names: str) -> Callable[..., str | None]:
    return lambda name, **more: f"/usr/bin/{name}" if name in names else None


@pytest.mark.parametrize(
    ("tool", "command"),
    [("apt-get", "apt-get install libgomp1"), ("pacman", "pacman -S gcc-libs"), ("none", "package manager")],
)
def test_a_missing_libgomp_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tool: str, command: str
) -> None:
    def not_found(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", not_found)
    monkeypatch.setattr(shutil, "which", tools(tool))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Missing, match=command) as caught:
        bootstrap.check_llamacpp()
    assert "--engine scripted" in str(caught.value)
    assert ("sudo" in str(caught.value)) is (tool != "none")


def test_a_processor_without_avx2_is_told_of_the_engine_that_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_cpu_flags", lambda: {"sse4_2", "avx"})
    with pytest.raises(Missing, match=r"AVX2.*\n.*--engine scripted"):
        bootstrap.check_llamacpp()


class Installs:
    """Stands for the package index: notes what would be installed."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, python: Path, files: Sequence[str]) -> None:
        assert subprocess.run([python, "-c", "import sys; assert sys.prefix != sys.base_prefix"]).returncode == 0
        self.calls.append(list(files))


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    made = Installs()
    monkeypatch.setattr(bootstrap, "_install", made)
    return made


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the requirement files, where no `uv` is found."""
    root = tmp_path / ("Auscheckung mit Ä " + "y" * 120)
    root.mkdir()
    for name in bootstrap.TEST:
        shutil.copy(ROOT / name, root)
    monkeypatch.setattr(bootstrap, "ROOT", root)
    monkeypatch.setattr(shutil, "which", tools())
    monkeypatch.setattr(bootstrap, "MAKE", ("-m", "venv", "--without-pip"))  # which takes most of the time
    return root


def test_an_environment_is_installed_once_and_again_when_the_pins_change(checkout: Path, installs: Installs) -> None:
    venv = checkout / ".venv"
    python = bootstrap.prepare(venv, bootstrap.RUN)
    assert python == venv / "bin" / "python"
    bootstrap.prepare(venv, bootstrap.RUN)
    assert installs.calls == [["requirements.txt"]]
    bootstrap.prepare(venv, bootstrap.TEST)
    bootstrap.prepare(venv, bootstrap.RUN)
    assert installs.calls[1:] == [["requirements.txt", "requirements-dev.txt"]]
    (checkout / "requirements.txt").write_text("flask==3.1.3\n", encoding="utf-8")
    bootstrap.prepare(venv, bootstrap.RUN)
    # the tools stay in step with what they stand on
    assert installs.calls[2:] == [["requirements.txt", "requirements-dev.txt"]]


def test_an_environment_that_was_moved_or_lost_its_python_is_made_anew(checkout: Path, installs: Installs) -> None:
    first, second = checkout / ".venv", checkout / "moved" / ".venv"
    bootstrap.prepare(first, bootstrap.RUN)
    second.parent.mkdir()
    first.rename(second)
    bootstrap.prepare(second, bootstrap.RUN)
    assert json.loads((second / "sluice.json").read_text(encoding="utf-8"))["path"] == str(second)
    for python in (second / "bin").glob("python*"):
        python.unlink()
    bootstrap.prepare(second, bootstrap.RUN)
    assert len(installs.calls) == 3
    assert (second / "bin" / "python").exists()


def test_a_failed_install_is_tried_again(checkout: Path, monkeypatch: pytest.MonkeyPatch, installs: Installs) -> None:
    def fails(python: Path, files: Sequence[str]) -> None:
        raise Missing("no index")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "_install", fails)
        with pytest.raises(Missing, match="no index"):
            bootstrap.prepare(checkout / ".venv", bootstrap.RUN)
    bootstrap.prepare(checkout / ".venv", bootstrap.RUN)
    assert installs.calls == [["requirements.txt"]]


def test_what_is_no_environment_is_not_removed(checkout: Path, installs: Installs) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(Missing, match="in the way"):
        bootstrap.prepare(checkout / ".venv", bootstrap.RUN)
    assert (checkout / ".venv" / "thesis.txt").exists()


def test_a_python_without_ensurepip_is_told_which_package_to_get(
    checkout: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", tools("apt-get"))
    with pytest.raises(Missing, match=rf"apt-get install python3\.{sys.version_info[1]}-venv"):
        bootstrap.prepare(checkout / ".venv", bootstrap.RUN)
    assert installs.calls == []


@pytest.fixture
def few_programs(tmp_path: Path) -> Path:
    """A PATH with what the shell script needs, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "readlink", "id"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def run_script(path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [path / "bash", ROOT / "scripts" / "bootstrap.sh", *arguments],
        env={"PATH": str(path), **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def test_no_python_is_said_with_the_way_to_one(few_programs: Path) -> None:
    program(few_programs / "apt-get", "exit 0")
    program(few_programs / "python3", "exit 1")
    ended = run_script(few_programs, "up")
    assert ended.returncode == 1
    assert "Python 3.11 to 3.14" in ended.stderr
    assert "apt-get install python3 python3-venv" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_python_that_does_not_run_is_passed_over(few_programs: Path) -> None:
    """As the shims of version managers, which are there for versions that are not."""
    program(few_programs / "python3.14", "echo no such version >&2; exit 127")
    (few_programs / "python3").symlink_to(sys.executable)
    ended = run_script(few_programs, "no-such-command")
    assert ended.returncode == 2
    assert "no such command" in ended.stderr


def test_a_python_that_was_named_is_taken_or_nothing(few_programs: Path) -> None:
    (few_programs / "python3").symlink_to(sys.executable)
    ended = run_script(few_programs, "no-such-command", SLUICE_PYTHON="/no/such/python")
    assert ended.returncode == 1
    assert "SLUICE_PYTHON=/no/such/python" in ended.stderr


@pytest.mark.parametrize("name", ["up", "quickstart", "test", "bench", "smoke"])
def test_the_commands_are_executable_and_tiny(name: str) -> None:
    path = ROOT / "scripts" / name
    assert os.access(path, os.X_OK)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 4
