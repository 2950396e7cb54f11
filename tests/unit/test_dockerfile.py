"""The Dockerfiles, as far as they can be checked without Docker: what they name is there, and they keep the rules."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile*"))


@dataclass(frozen=True)
class Instruction:
    name: str
    rest: str


def instructions(file: Path) -> list[Instruction]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def last_stage(file: Path) -> list[Instruction]:
    found = instructions(file)
    return found[max(i for i, one in enumerate(found) if one.name == "FROM") :]


def ignored(path: str) -> bool:
    """By .dockerignore: the last pattern that fits decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip().removeprefix("!")
        parents = [path, *map(str, Path(path).parents)]
        if pattern and not line.startswith("#") and any(fnmatch.fnmatch(one, pattern) for one in parents):
            result = not line.startswith("!")
    return result


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    file: Path = request.param
    return file


def test_what_is_copied_is_there_and_not_ignored(dockerfile: Path) -> None:
    copies = [one.rest.split() for one in instructions(dockerfile) if one.name in ("COPY", "ADD")]
    sources = [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), f"{source} is in .dockerignore"
    assert ignored(".git")
    assert ignored("deploy/wheels/x.whl")


def test_bases_are_pinned(dockerfile: Path) -> None:
    arguments = dict(
        one.rest.split("=", 1) for one in instructions(dockerfile) if one.name == "ARG" and "=" in one.rest
    )
    for one in instructions(dockerfile):
        if one.name == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda name: arguments[name[1]], one.rest.split()[0])
            assert re.fullmatch(r"[\w./-]+:\d[\w.-]*\d[\w.-]*", image), image


def test_it_does_not_run_as_root(dockerfile: Path) -> None:
    users = [one.rest for one in last_stage(dockerfile) if one.name == "USER"]
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]), "a number: Kubernetes cannot check a name"


def test_it_says_whether_it_is_healthy(dockerfile: Path) -> None:
    checks = [one.rest for one in last_stage(dockerfile) if one.name == "HEALTHCHECK"]
    assert len(checks) == 1
    assert "CMD" in checks[0]


def test_the_gpu_image_starts_the_worker(tmp_path: Path) -> None:
    """Its entrypoint is one that `python -m workers` takes: what stops it is the missing store."""
    stage = last_stage(ROOT / "deploy" / "docker" / "Dockerfile.gpu")
    words = [word for one in stage if one.name in ("ENTRYPOINT", "CMD") for word in json.loads(one.rest)]
    ended = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env={"PATH": "/usr/bin"}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "REDIS_URL is not set" in ended.stderr


def test_the_gpu_image_has_the_cuda_of_its_torch() -> None:
    """torch 2.14 from PyPI is built with CUDA 13.0; another toolkit's extension may not load."""
    text = (ROOT / "deploy" / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")
    assert re.search(r"^torch==2\.14\.", (ROOT / "requirements-gpu.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.search(r"^ARG CUDA=13\.0\.", text, re.MULTILINE)
