"""The file store, on a folder and on an object store (fsspec's own in memory)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from api.file_store import BLOCK, FileStore
from shared.errors import StoreUnavailable
from shared.settings import Settings
from tests.conftest import ROOT

BIG = os.urandom(1000) * 2500  # more than two blocks


@pytest.fixture(params=["folder", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileStore]:
    if request.param == "folder":
        yield FileStore(str(tmp_path / "with spaces, ä"))
        return
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield FileStore("memory://bucket/prefix")
    memory.store.clear()


def test_what_was_written_is_read(files: FileStore) -> None:
    with files.create("files/a") as new:
        for at in range(0, len(BIG), 300_000):
            new.write(BIG[at : at + 300_000])
        assert new.size == len(BIG)
    assert len(BIG) > 2 * BLOCK
    assert b"".join(files.read("files/a", 0, len(BIG))) == BIG
    assert b"".join(files.read("files/a", 5, 9)) == BIG[5:9]
    assert b"".join(files.read("files/a", len(BIG) - 3, len(BIG) + 50)) == BIG[-3:]
    with files.opened("files/a", len(BIG)) as opened:
        opened.seek(BLOCK)
        assert opened.read(10) == BIG[BLOCK : BLOCK + 10]


class StrictFiles(MemoryFileSystem):
    """As S3: a range that begins behind the end of a file is an error."""

    protocol = ("strict",)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if (start or 0) >= self.size(path):
            raise OSError(22, "Requested Range Not Satisfiable")
        whole: bytes = super().cat_file(path, start=start, end=end, **more)
        return whole


def test_nothing_is_asked_for_behind_the_end() -> None:
    """Who does not know how long a file is gets all of it."""
    fsspec.register_implementation("strict", StrictFiles, clobber=True)
    files = FileStore("strict://bucket")
    for size in (24, BLOCK, BLOCK + 24):
        files.put("batches/b/plan", BIG[:size])
        assert b"".join(files.read("batches/b/plan", 0, 2 * BLOCK if size > BLOCK else BLOCK)) == BIG[:size]
    files.remove(["batches/b/plan"])


def test_an_upload_that_fails_leaves_nothing(files: FileStore) -> None:
    with contextlib.suppress(ValueError), files.create("files/a") as new:
        new.write(BIG)
        raise ValueError
    with pytest.raises(FileNotFoundError):
        list(files.read("files/a", 0, 1))
    files.remove(["files/a"])


def test_removal(files: FileStore) -> None:
    for name in ("batches/b/1", "batches/b/2", "batches/c/1", "files/x"):
        files.put(name, name.encode())
    files.remove(["files/x", "files/not-there"])
    files.remove_folder("batches/b")
    files.remove_folder("batches/not-there")
    left = files.changed("batches")
    assert list(left) == ["batches/c/1"] and abs(left["batches/c/1"] - time.time()) < 60
    assert files.changed("files") == {}


def test_a_store_that_fails_is_not_available(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        FileStore(str(tmp_path / "file")).put("files/a", b"")


def test_the_default_is_a_folder_of_this_machine(tmp_path: Path) -> None:
    FileStore.of(Settings(data_dir=tmp_path)).put("files/a", b"x")
    assert (tmp_path / "files" / "files" / "a").read_bytes() == b"x"
    elsewhere = Settings(data_dir=tmp_path, files_url=f"file://{tmp_path}/other")
    FileStore.of(elsewhere).put("files/a", b"y")
    assert (tmp_path / "other" / "files" / "a").read_bytes() == b"y"


def test_an_asynchronous_file_system_in_a_gevent_process() -> None:
    """As S3 in the API. Everything comes back, and what the file system computes holds up no greenlet."""
    command = [sys.executable, "-m", "tests.unit.asynchronous_files"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.stdout.split() == ["40", "40", "1", "False"], ended.stderr
