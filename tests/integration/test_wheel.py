"""The wheel: what lies beside the code is in it, and alone, in an environment of its own, it serves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import carried_model
from shared.settings import Settings
from tests.conftest import script, wait_for
from tests.faults import processes
from tests.stack import REAL, SCRIPTED, Client, free_port

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "workers", "shared", "scripts")
#: The way from a bare checkout to the commands; where there is a wheel, there is `sluice`.
OF_THE_CHECKOUT = {"bench", "quickstart", "sluice", "smoke", "test", "up"}
#: What the wheel is made from besides the packages.
PROJECT = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "requirements.txt", "requirements-dev.txt")


def is_made(file: Path) -> bool:
    """By Python, not by a person."""
    return "__pycache__" in file.parts or not file.is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no earlier build is mixed in."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PROJECT:
        shutil.copy(ROOT / name, source)
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(source)]
    ended = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    [found] = built.glob("*.whl")
    return found


def test_all_that_lies_beside_the_code_is_in_it(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*") if not is_made(file)]
    wanted = {str(file.relative_to(ROOT)) for file in files if file.name not in OF_THE_CHECKOUT}
    assert {"shared/lua/take.lua", "api/web/docs.html", "scripts/cli.py"} <= wanted
    assert wanted - inside == set()
    of_ours = {name for name in inside if not name.startswith("sluice_server-")}
    assert of_ours - wanted == set(), "nothing else is in it"


def test_it_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata).decode()
    assert "\nName: sluice-server\n" in text and "\nRequires-Python: <3.15,>=3.11\n" in text
    assert 'Requires-Dist: exllamav2==0.3.2; extra == "gpu"' in text
    assert archive.read(metadata.replace("METADATA", "entry_points.txt")).decode().split() == [
        "[console_scripts]",
        "sluice",
        "=",
        "scripts.cli:main",
    ]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment that has the wheel, and by it what it needs."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ended = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def elsewhere(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Client, Path, dict[str, str]]]:
    """`sluice up` of the wheel, with the scripted engine and the carried model, in a folder that has nothing of ours."""
    carried_model.ensure(Settings().cache_dir)
    folder = tmp_path_factory.mktemp("elsewhere")
    hidden = ("PYTHON", "SLUICE_", "REDIS_URL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment["SLUICE_CACHE_DIR"] = str(Settings().cache_dir)
    sluice, port, log = installed / "bin" / "sluice", free_port(), folder / "log.txt"
    command = [str(sluice), "up", "--port", str(port), "--engine", "scripted", "--engine", "llamacpp"]
    with log.open("wb") as output:
        up = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    client = Client(port)
    try:
        wait_for(lambda: client.serves(SCRIPTED, REAL) or up.poll() is not None, timeout=240)
        assert up.poll() is None, log.read_text(encoding="utf-8")[-3000:]
        yield client, sluice, environment
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0, log.read_text(encoding="utf-8")[-3000:]
    finally:
        processes.end(up.pid)
        up.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_alone_it_streams_completions(elsewhere: tuple[Client, Path, dict[str, str]]) -> None:
    client, _, _ = elsewhere
    stream = client.stream(script("one ", "two"))
    assert (stream.text, stream.finish, stream.done) == ("one two", "stop", 1)
    real = client.stream("The capital of France is", model=REAL, max_tokens=4, temperature=0)
    assert real.text.startswith(" Paris") and len(real.data) >= 4
    assert real.usage is not None and real.usage["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_its_pages_and_templates_are_there(elsewhere: tuple[Client, Path, dict[str, str]]) -> None:
    client, _, _ = elsewhere
    assert client.call("GET", "/docs").status == client.call("GET", "/openapi.json").status == 200
    asked = {"messages": [{"role": "user", "content": "Say hello."}], "model": REAL, "max_tokens": 8, "temperature": 0}
    assert client.call("POST", "/v1/chat/completions", asked).status == 200


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_its_command_streams_too(elsewhere: tuple[Client, Path, dict[str, str]], tmp_path: Path) -> None:
    client, sluice, environment = elsewhere
    url = ("--url", f"http://127.0.0.1:{client.port}")
    asked = [str(sluice), "complete", "The capital of France is", "--model", REAL, "--max-tokens", "4", *url]
    ended = subprocess.run(
        [*asked, "--temperature", "0"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(" Paris")
