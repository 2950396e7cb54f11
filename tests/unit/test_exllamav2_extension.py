"""What the loader of exllamav2 says where something is missing, and that a build cannot hang a worker."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scripts import ports
from tests.conftest import ROOT
from tests.faults.processes import alive
from tests.unit.gpu_packages import Packages, write_packages
from tests.unit.test_exllamav2_directory import write_directory
from workers.engines.exllamav2 import extension
from workers.engines.exllamav2.errors import LoadError

TRY = "try: load({limit})\nexcept extension.LoadError as error: print('ERROR', error)\n"


def said(packages: Packages, limit: float = 60.0) -> str:
    """The error that loading ends with."""
    ended = packages.run(TRY.format(limit=limit))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines and lines[-1].startswith("ERROR "), ended.stdout
    return lines[-1].removeprefix("ERROR ")


@pytest.mark.parametrize("package", ["torch", "exllamav2"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    for name in ("torch", "exllamav2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(LoadError, match=f"{package} is not installed.*pip install -r requirements-gpu.txt"):
        extension.check()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"version": "2.14.1+cpu", "cuda": None}, "built for CPUs only.*requirements-gpu.txt"),
        ({"gpus": 0}, "torch sees no GPU.*nvidia-smi.*--engine llamacpp"),
        ({"nvcc": False}, "no nvcc.*CUDA 13.0 toolkit.*CUDA_HOME"),
    ],
)
def test_what_the_machine_lacks_is_one_sentence(made: dict[str, Any], says: str, tmp_path: Path) -> None:
    packages = write_packages(tmp_path, **made)
    assert re.search(says, said(packages))


def test_a_missing_compiler(tmp_path: Path) -> None:
    packages = write_packages(tmp_path)
    packages.environment["CXX"] = "no-such-compiler"
    assert "no C++ compiler no-such-compiler" in said(packages)


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    packages = write_packages(tmp_path)
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: no such file')")
    assert "torch cannot be imported (libcudart.so.13: no such file)" in said(packages)


def test_an_import_that_ends_in_an_oserror(tmp_path: Path) -> None:
    # As the real one does without a CUDA toolkit, although it is an import.
    packages = write_packages(tmp_path)
    (tmp_path / "exllamav2_ext.py").write_text("")  # a prebuilt extension: nothing is compiled
    (tmp_path / "exllamav2" / "__init__.py").write_text("raise OSError('CUDA_HOME is not set')")
    assert said(packages) == "exllamav2 cannot be imported: CUDA_HOME is not set"


def test_the_extension_is_built_once_in_a_folder_of_its_own(tmp_path: Path) -> None:
    packages = write_packages(tmp_path, build="open(folder / 'builds', 'a').write('x')")
    for _ in range(2):
        ended = packages.run("load(); import exllamav2; print(exllamav2.folder)")
        assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.splitlines()[-1])
    assert tmp_path / "cache" in folder.parents
    for part in ("exllamav2-0.3.2", "torch2.14.1+cu130", "cu13.0", "sm9.0"):
        assert part in folder.parent.name
    assert (folder / "builds").read_text() == "x"


def test_a_new_package_is_built_anew(tmp_path: Path) -> None:
    packages = write_packages(tmp_path)
    assert packages.run("load()").returncode == 0
    source = tmp_path / "exllamav2" / "__init__.py"
    source.write_text("import sys; sys.exit('rebuilt')")
    os.utime(source, ns=(1, 1))
    assert "does not compile (rebuilt)" in said(packages)


def test_a_lock_that_an_ended_build_left_is_removed(tmp_path: Path) -> None:
    # Torch's builder waits for it, for ever (pytorch issue 189245).
    wait = "import threading\n    while (folder / 'lock').exists(): threading.Event().wait(0.05)"
    packages = write_packages(tmp_path, build=wait)
    first = packages.run("load(); print(extension._folder(cache))")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.splitlines()[-1])
    (folder / "exllamav2_ext" / "exllamav2_ext.so").unlink()
    (folder / "exllamav2_ext" / "lock").touch()
    ended = packages.run("load(20)")
    assert ended.returncode == 0, ended.stderr
    assert not (folder / "exllamav2_ext" / "lock").exists()


#: A build that never ends: it starts a compiler, writes both process ids into the folder of the packages, and waits.
HANG = (
    "import subprocess, threading; c = subprocess.Popen([sys.executable, '-c', 'import threading; "
    "threading.Event().wait()']); p = folder.parents[3] / 'pids'; (p.parent / 'part').write_text(f'{os.getpid()} {c.pid}');"
    " (p.parent / 'part').rename(p); threading.Event().wait()"
)


def test_a_build_that_hangs_is_ended_with_its_compilers(tmp_path: Path) -> None:
    message = said(write_packages(tmp_path, build=HANG), limit=3)
    assert "took longer than 3 s" in message
    assert "SLUICE_EXL2_BUILD_LIMIT_S" in message
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_build_ends_with_its_worker_even_if_that_is_killed(tmp_path: Path) -> None:
    packages = write_packages(tmp_path, build=HANG)
    code = f"import pathlib; from workers.engines.exllamav2 import extension as e; e.load_package(pathlib.Path({str(tmp_path / 'cache')!r}), 60, print)"
    worker = subprocess.Popen(
        [sys.executable, "-c", code], env=packages.environment, cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: (tmp_path / "pids").exists())
    finally:
        worker.kill()
        worker.wait()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(alive(pid) for pid in pids))


def until(true: Callable[[], bool]) -> None:
    """Waits for it, for 30 s at most."""
    pause, deadline = threading.Event(), time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        pause.wait(0.05)


def test_a_build_that_fails_shows_what_the_compiler_said(tmp_path: Path) -> None:
    packages = write_packages(
        tmp_path, build="print('q_gemm.cu(12): error: nonsense', flush=True); sys.exit('ninja failed')"
    )
    ended = packages.run(TRY.format(limit=60))
    assert "does not compile (ninja failed)" in ended.stdout
    assert "q_gemm.cu(12): error: nonsense" in ended.stderr
    log = Path(ended.stdout.rsplit("is in ", 1)[1].strip().rstrip("."))
    assert "q_gemm.cu" in log.read_text()


def test_a_second_worker_waits_for_the_first_ones_build(tmp_path: Path) -> None:
    packages = write_packages(tmp_path)
    assert packages.run("load()").returncode == 0
    [folder] = (tmp_path / "cache" / "extensions").iterdir()
    with (folder / "building").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another worker has been compiling" in said(packages, limit=1)
    assert packages.run("load()").returncode == 0


def test_workers_that_start_together_leave_each_others_lock_alone(tmp_path: Path) -> None:
    # Torch's loader takes its lock file also where there is nothing to build, and breaks if somebody removes it.
    source = (
        "import os, pathlib, threading, torch\n"
        "folder = pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR']) / 'exllamav2_ext'\n"
        "(folder / 'exllamav2_ext.so').touch()\n"
        "(folder / 'lock').open('x').close()\n"
        "threading.Event().wait(1.5)\n"
        "(folder / 'lock').unlink()\n"
    )
    packages = write_packages(tmp_path, source=source)
    with ThreadPoolExecutor(3) as pool:
        for ended in pool.map(packages.run, ["load()"] * 3):
            assert ended.returncode == 0, ended.stderr


def test_the_builder_gets_headers_and_as_many_jobs_as_cores(tmp_path: Path) -> None:
    packages = write_packages(
        tmp_path, build="print(os.environ['CPATH'], os.environ['MAX_JOBS'], flush=True); sys.exit('x')"
    )
    ended = packages.run(TRY.format(limit=60))
    log = Path(ended.stdout.rsplit("is in ", 1)[1].strip().rstrip("."))
    path, jobs = log.read_text().splitlines()[0].split()
    assert path.split(os.pathsep)[-1] == str(tmp_path / "nvidia" / "cu13" / "include")
    assert 1 <= int(jobs) <= (os.cpu_count() or 1)


def test_other_versions_are_warned_of(tmp_path: Path) -> None:
    ended = write_packages(tmp_path, exllamav2="0.4.0").run("load()")
    assert ended.returncode == 0, ended.stderr
    assert "exllamav2 0.4.0 is installed; this engine is made for 0.3.2" in ended.stderr


def test_a_package_that_is_only_on_the_path(tmp_path: Path) -> None:
    packages = write_packages(tmp_path, exllamav2="0.4.0")
    code = "extension.metadata.version = lambda name: (_ for _ in ()).throw(extension.metadata.PackageNotFoundError)\n"
    ended = packages.run(code + "load()")
    assert ended.returncode == 0, ended.stderr
    assert "exllamav2 of unknown version" in ended.stderr


@pytest.mark.parametrize(("gpus", "threads"), [(1, "1"), (0, "5")])
def test_threads_of_torch_beside_a_gpu_and_without_one(gpus: int, threads: str, tmp_path: Path) -> None:
    # The package's import sets one, for the whole process. An extension that is there already needs no GPU.
    packages = write_packages(tmp_path, gpus=gpus, source="import torch; torch.set_num_threads(1)")
    code = "import types; sys.modules['exllamav2_ext'] = types.ModuleType('exllamav2_ext')\n"
    ended = packages.run(code + "load(); import torch; print(torch.get_num_threads())")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == threads
    assert not (tmp_path / "cache").exists()


def test_up_ends_with_the_sentence_where_there_is_no_gpu(tmp_path: Path) -> None:
    packages = write_packages(tmp_path / "packages", gpus=0)
    model = write_directory(tmp_path / "model")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.cli",
            "up",
            "--engine",
            "exllamav2",
            "--model",
            str(model),
            "--port",
            str(ports.any_free()),
        ],
        env=packages.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("sluice: --engine exllamav2: torch sees no GPU")
    assert len(ended.stderr.splitlines()) == 1


def test_a_look_at_the_machine_leaves_setuptools_importable() -> None:
    """exllamav2 imports it. setuptools 84 fails at its own import where somebody has looked for the module pip (3.11)."""
    code = "from workers.engines.exllamav2 import extension; extension._install_command(); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
