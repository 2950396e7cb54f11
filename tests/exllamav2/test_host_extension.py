"""Building the host functions: once for processes at the same time, whole or not at all, and with its reasons."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType

import pytest

from shared.settings import Settings
from tests.exllamav2 import host_extension

torch = pytest.importorskip("torch", reason="torch is not installed (requirements-harness.txt)")


@pytest.fixture
def built(exllamav2: ModuleType) -> str:
    """A whole library, as this machine's compiler made it."""
    return str(host_extension.load(Settings().cache_dir).__file__)


def compiler(path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Puts a script in the compiler's place; `$out` in it is the file to make."""
    path.write_text("\n".join(["#!/bin/sh", "for out; do :; done", *lines]), encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_two_at_once_build_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: str) -> None:
    # a build that takes a while, so that the second comes during the first
    compiler(tmp_path / "cxx", monkeypatch, f"echo run >> '{tmp_path}/log'", "sleep 0.3", f"cp '{built}' \"$out\"")
    loaded: list[str] = []
    threads = [
        threading.Thread(target=lambda: loaded.append(str(host_extension.load(tmp_path / "a b").__file__)))
        for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(loaded) == 2 and len(set(loaded)) == 1
    assert (tmp_path / "log").read_text(encoding="utf-8") == "run\n"
    assert sorted(path.name for path in Path(loaded[0]).parent.iterdir()) == ["building", Path(loaded[0]).name]


def test_what_a_killed_build_left_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: str
) -> None:
    """The builder of torch waits forever for such a lock (pytorch/pytorch#189245)."""
    compiler(tmp_path / "cxx", monkeypatch, 'echo half > "$out"; exit 1')
    with pytest.raises(host_extension.BuildFailed):
        host_extension.load(tmp_path / "cache")
    compiler(tmp_path / "cxx", monkeypatch, f"cp '{built}' \"$out\"")
    folder = next((tmp_path / "cache" / "exllamav2-host").iterdir())
    (folder / "lock").touch()
    (folder / "build-left").mkdir()
    assert host_extension.load(tmp_path / "cache").sample_basic


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exllamav2: ModuleType) -> None:
    compiler(tmp_path / "cxx", monkeypatch, "echo 'fatal error: no such header' >&2; exit 1")
    with pytest.raises(host_extension.BuildFailed, match="no such header"):
        host_extension.load(tmp_path / "cache")


def test_a_machine_without_a_compiler_is_told_what_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "install g++" in str(host_extension.missing())
