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
    for name in (*bootstrap.TEST, bootstrap.HARNESS):
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


def test_what_the_harness_needs_is_installed_for_tests_alone_and_once(
    checkout: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def comes(python: Path) -> bool:
        tried.append(python)
        return len(tried) > 1  # out of reach the first time

    monkeypatch.setattr(bootstrap, "_install_harness", comes)
    venv = checkout / ".venv"
    bootstrap.prepare(venv, bootstrap.RUN)
    assert not tried
    bootstrap.prepare(venv, bootstrap.TEST, harness=True)  # which failed, but the tests run
    for _ in range(2):
        bootstrap.prepare(venv, bootstrap.TEST, harness=True)
    assert tried == [venv / "bin" / "python"] * 2
    # a change of other pins neither installs it again nor forgets it
    (checkout / "requirements.txt").write_text("flask==3.1.3\n", encoding="utf-8")
    bootstrap.prepare(venv, bootstrap.TEST, harness=True)
    assert len(tried) == 2 and all(bootstrap.HARNESS not in call for call in installs.calls)
    (checkout / bootstrap.HARNESS).write_text("torch==2.14.0+cpu\n", encoding="utf-8")
    bootstrap.prepare(venv, bootstrap.TEST, harness=True)
    assert len(tried) == 3


class Commands:
    """Stands for all programs: notes what is run and answers with an exit status and words.

    `whole` and `torch` install; `pip` and `metadata` look into the environment. A list holds the answers in turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[tuple[int, str]]) -> None:
        self.installing: list[list[str]] = []
        self._answers = answers
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        if "install" in command:
            self.installing.append(command)
            kind = "torch" if "--index-url" in command else "whole"
        else:
            kind = "pip" if "import pip" in command else "metadata"
        answers = self._answers.get(kind, [])
        status, words = answers.pop(0) if answers else (0, "")
        return subprocess.CompletedProcess(command, status, words, words)


PYTHON = Path("/venv/bin/python")


def test_torch_is_looked_for_as_pip_is_configured_then_at_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Commands(monkeypatch, whole=[(1, "no matching distribution")])
    assert bootstrap._install_harness(PYTHON)
    first, torch, last = ran.installing
    assert first == last and first[:4] == [str(PYTHON), "-m", "pip", "install"] and "--no-deps" in first
    assert torch[-4:-1] == ["--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu"]
    assert torch[-1].startswith("torch==") and torch[-1].endswith("+cpu")


def test_where_all_is_at_hand_no_other_index_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Commands(monkeypatch)
    assert bootstrap._install_harness(PYTHON)
    assert len(ran.installing) == 1 and bootstrap.TORCH_INDEX not in ran.installing[0]


def test_an_environment_of_uv_gets_torch_by_the_pip_that_is_there_or_by_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    # the environment's own Python, then the one that runs this, which has it the first time only
    Commands(monkeypatch, pip=[(1, ""), (0, ""), (1, ""), (1, "")])
    monkeypatch.setattr(shutil, "which", tools("uv"))
    by_pip, by_uv = (bootstrap.harness_attempts(PYTHON)[0][0] for _ in "ab")
    assert by_pip[:6] == [sys.executable, "-m", "pip", "--python", str(PYTHON), "install"]
    assert by_uv[:5] == ["/usr/bin/uv", "pip", "install", "--python", str(PYTHON)]


def test_tests_without_torch_are_one_line_of_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Commands(
        monkeypatch, whole=[(1, "no such version")], torch=[(1, "WARNING: retrying\nERROR: no route to the index")]
    )
    assert not bootstrap._install_harness(PYTHON)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and warnings[0].endswith("ERROR: no route to the index")
    assert len(ran.installing) == 2  # the rest is of no use without torch


@pytest.mark.parametrize(("there", "installs"), [("2.14.1+cu130\n", 0), ("2.14.1\n", 0), ("2.12.0+cpu\n", 1), ("", 1)])
def test_a_torch_for_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch, there: str, installs: int) -> None:
    ran = Commands(monkeypatch, metadata=[(0, there)])
    assert bootstrap._install_harness(PYTHON) is bool(installs)
    assert len(ran.installing) == installs


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
