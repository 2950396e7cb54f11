"""Imports torch and exllamav2, which compiles its CUDA extension at the first import, and says what is missing if not.

Nothing else of this package may be imported before, except what knows nothing of torch. It knows no model.

`python -m workers.engines.exllamav2.extension` looks whether this machine could run the engine, and builds nothing.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from workers.engines.base import Progress
from workers.engines.cores import usable_cores
from workers.engines.exllamav2.errors import LoadError

log = logging.getLogger(__name__)

#: The release whose ways this engine knows; upstream is frozen there.
VERSION = "0.3.2"
#: Files that the extension is compiled from; only for the progress.
_SOURCES = 47
#: Seconds between two looks at a build.
_LOOK_S = 0.5
#: Lines of a failed build that are logged.
_LAST_LINES = 30
#: Made by the package's code for torch's builder: the folder and the module.
_NAME = "exllamav2_ext"
#: The process that compiles. It leads a group with the compilers, and ends them with itself as soon as whoever holds the
#: other end of the pipe is gone, however that ended: else they would write into the next start's build.
_BUILDER = """
import os, signal, sys, threading
def end_with_the_worker():
    os.read(int(sys.argv[1]), 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_the_worker, daemon=True).start()
import exllamav2
"""


def load_package(cache_dir: Path, time_limit_s: float, report: Progress) -> None:
    """Imports the package, building its extension in `cache_dir` if it must, for `time_limit_s` at most.

    A module `exllamav2_ext` that is imported already is used as it is, and no GPU is asked for. Raises LoadError."""
    if "exllamav2" in sys.modules:
        return
    check()
    if _extension_is_there():
        _import(report)
        return
    folder = _folder(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + time_limit_s
    # Also around the import: it takes torch's lock file once more, which another worker would take for a stale one.
    with _alone(folder, deadline, time_limit_s, report):
        _build(folder, deadline, time_limit_s, report)
        _import(report)


def _import(report: Progress) -> None:
    report(1.0, "importing exllamav2")
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    try:
        importlib.import_module("exllamav2")
    # A CPU-only torch makes it an OSError, a wrong compiler a RuntimeError, a foreign binary an ImportError.
    except Exception as error:
        log.exception("exllamav2 cannot be imported.")
        raise LoadError(f"exllamav2 cannot be imported: {_sentence(error)}") from None
    # Its import sets one thread for the whole process. Right beside a GPU, where only small tensors stay on the CPU.
    if not torch.cuda.is_available():
        torch.set_num_threads(threads)


def check() -> None:
    """Looks for everything that the package needs on this machine, without importing it. Raises LoadError."""
    for package in ("torch", "exllamav2"):
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise LoadError(f"the package {package} is not installed: {_install_command()}")
    version = _version()
    if version != VERSION:
        log.warning("exllamav2 %s is installed; this engine is made for %s.", version, VERSION)
    torch = _torch()
    if _NAME in sys.modules:
        return
    if not (torch.version.cuda or torch.version.hip):
        raise LoadError(
            f"torch {torch.__version__} is built for CPUs only, exllamav2 needs one with CUDA: {_install_command()}"
        )
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        raise LoadError(
            "torch sees no GPU: exllamav2 needs an NVIDIA GPU with a working driver (`nvidia-smi` must list it); on a "
            "machine without one, use --engine llamacpp."
        )
    if not _extension_is_there():
        _check_compilers(torch)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except Exception as error:
        log.exception("torch cannot be imported.")
        raise LoadError(
            f"torch cannot be imported ({_sentence(error)}). Install it anew: {_install_command()}"
        ) from None


def _extension_is_there() -> bool:
    """The extension is imported already, or installed as a module of its own (a prebuilt wheel)."""
    return _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None


def _check_compilers(torch: Any) -> None:
    if not torch.version.hip:
        home = importlib.import_module("torch.utils.cpp_extension").CUDA_HOME
        if home is None or not (Path(home) / "bin" / "nvcc").is_file():
            raise LoadError(
                f"there is no nvcc to compile exllamav2's extension with: install the CUDA {torch.version.cuda} toolkit, "
                "or set CUDA_HOME to where it is."
            )
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise LoadError(f"there is no C++ compiler {compiler} to compile exllamav2's extension with: install g++.")
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        raise LoadError(
            f"the package ninja, which compiles exllamav2's extension, is not installed: {_install_command()}"
        )


def _folder(cache_dir: Path) -> Path:
    """Where the extension for this torch, CUDA, Python and these GPUs is built and kept."""
    torch = _torch()
    arch = os.environ.get("TORCH_CUDA_ARCH_LIST") or "-".join(
        sorted({"{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())})
    )
    runtime = f"cu{torch.version.cuda}" if torch.version.cuda else f"hip{torch.version.hip}"
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    name = f"exllamav2-{_version()}-torch{torch.__version__}-{runtime}-{python}-sm{arch}"
    return cache_dir / "extensions" / re.sub(r"[^\w.+-]", "_", name)


def _build(folder: Path, deadline: float, time_limit_s: float, report: Progress) -> None:
    """Compiles in a process of its own, which can be ended; importing it here afterwards finds everything made.

    Torch's builder has no time limit, and waits forever for a lock file that an ended build has left behind
    (https://github.com/pytorch/pytorch/issues/189245, https://github.com/turboderp-org/exllamav2/issues/495)."""
    build = folder / _NAME
    build.mkdir(exist_ok=True)
    environment = _build_environment(folder)
    os.environ.update(environment)
    stamp = _stamp()
    done = folder / "built"
    (build / "lock").unlink(missing_ok=True)
    if done.is_file() and done.read_text(encoding="utf-8") == stamp and any(build.glob(f"{_NAME}*.so")):
        return
    output = folder / "build.log"
    log.info("Compiling exllamav2's CUDA extension in %s; this takes minutes, once.", folder)
    with output.open("wb") as file:
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _BUILDER, str(reading)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=(reading,),
            process_group=0,
        )
        os.close(reading)
        try:
            status = _wait(process, deadline, build, report)
        finally:
            _end(process)
            os.close(writing)
            (build / "lock").unlink(missing_ok=True)
    if status is None:
        raise LoadError(
            f"compiling exllamav2's extension took longer than {time_limit_s:g} s and was ended; {output} says how far "
            "it came. Allow more with SLUICE_EXL2_BUILD_LIMIT_S."
        )
    if status != 0:
        lines = deque(output.read_text(encoding="utf-8", errors="replace").splitlines(), _LAST_LINES)
        for line in lines:
            log.error("%s", line)
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise LoadError(f"exllamav2's extension does not compile ({last}); the whole output is in {output}.")
    done.write_text(stamp, encoding="utf-8")


def _wait(process: subprocess.Popen[bytes], deadline: float, build: Path, report: Progress) -> int | None:
    """The exit status; None at the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            return process.wait(min(left, _LOOK_S))
        except subprocess.TimeoutExpired:
            part = min(1.0, len(list(build.glob("*.o"))) / _SOURCES)
            report(part, "compiling exllamav2's CUDA extension")
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and what it started. Does nothing if it has been waited for."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _alone(folder: Path, deadline: float, time_limit_s: float, report: Progress) -> Iterator[None]:
    """One build in `folder` at a time: others wait. The kernel takes the lock away from a process that ends."""
    with (folder / "building").open("wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LoadError(
                        f"another worker has been compiling exllamav2's extension in {folder} for {time_limit_s:g} s."
                    ) from None
                report(0.0, "waiting for another worker's build")
                time.sleep(_LOOK_S)
        yield


def _build_environment(folder: Path) -> dict[str, str]:
    """What torch's builder reads, for this process and the one that builds."""
    made = {"TORCH_EXTENSIONS_DIR": str(folder)}
    if "MAX_JOBS" not in os.environ:
        made["MAX_JOBS"] = str(usable_cores())
    # A CUDA toolkit may lack the headers of cuBLAS, cuSPARSE and cuSOLVER, which torch's own headers include; the pip
    # packages that torch brings along have them.
    headers = [str(path) for path in _nvidia_headers()]
    if headers:
        inherited = os.environ.get("CPATH")
        made["CPATH"] = os.pathsep.join([*([inherited] if inherited else []), *headers])
    return made


def _nvidia_headers() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(path for place in places or () for path in Path(place).glob("*/include"))


def _stamp() -> str:
    """Changes when the package is installed anew: then its sources are newer than what was built, too."""
    spec = importlib.util.find_spec("exllamav2")
    assert spec is not None and spec.origin is not None
    return f"{_version()} {Path(spec.origin).stat().st_mtime_ns}"


def _version() -> str:
    """The package's release; "of unknown version" where it was put on the path without being installed."""
    try:
        return metadata.version("exllamav2")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _sentence(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _install_command() -> str:
    """What installs the packages; environments that uv made have no pip.

    Not by looking for the module: setuptools 84 takes any search for `pip` as pip running, leaves distutils alone from
    then on, and fails at its own import (_distutils_hack, Python 3.11), which exllamav2's is."""
    if any(distribution.name == "pip" for distribution in metadata.distributions()):
        return f"{sys.executable} -m pip install -r requirements-gpu.txt"
    return f"uv pip install --python {sys.executable} -r requirements-gpu.txt"


def main() -> int:
    """Exit status 1: the engine cannot run here, and standard error says why."""
    try:
        check()
    except LoadError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
