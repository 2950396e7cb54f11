"""Makes a checkout ready to run: checks the machine, makes `.venv`, installs what is pinned, then becomes the command.

Standard library only, since it runs before anything is installed. It never installs system packages; it says which
command does. Console scripts of the environment are never used: their first line cannot hold a path with a space.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"

#: The wheel of llguidance is the one that asks for most: manylinux_2_31.
MIN_GLIBC = (2, 31)
RUN = ("requirements.txt",)
TEST = ("requirements.txt", "requirements-dev.txt")
#: For tests that may be skipped: CPU torch and exllamav2. Its lines name every package, so it needs no resolving.
HARNESS = "requirements-harness.txt"
#: Where the CPU builds of torch are; PyPI's builds are the CUDA ones.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

#: How Python makes an environment, with pip in it.
MAKE = ("-m", "venv")

#: command -> (requirement files, what the environment's Python is told to run)
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "up": (RUN, ("-m", "scripts.cli", "up")),
    "quickstart": (RUN, ("-m", "scripts.quickstart")),
    "bench": (RUN, ("-m", "scripts.cli", "bench")),
    "sluice": (RUN, ("-m", "scripts.cli")),
    "test": (TEST, ("-m", "scripts.run_tests")),
}

#: What is missing -> package by package manager.
_PACKAGES = {
    "libgomp": {"apt-get": "libgomp1", "dnf": "libgomp", "zypper": "libgomp1", "pacman": "gcc-libs"},
    "venv": {"apt-get": "python{version}-venv", "dnf": "python3-pip", "zypper": "python3-pip", "pacman": "python-pip"},
}


class Missing(Exception):
    """The machine lacks something; the message says what, and the command to get it."""


def main(arguments: Sequence[str]) -> int:
    command, rest = (arguments[0] if arguments else ""), list(arguments[1:])
    if command == "smoke":
        _become([sys.executable, str(ROOT / "scripts" / "minimal_server_smoke.py"), *rest])
    if command not in COMMANDS:
        print(f"bootstrap: no such command: {command!r}. There are: {', '.join(COMMANDS)}, smoke.", file=sys.stderr)
        return 2
    files, run = COMMANDS[command]
    try:
        check_machine()
        if needs_llamacpp(command, rest):
            check_llamacpp()
        python = prepare(VENV, files, harness=command == "test")
    except Missing as missing:
        print(f"sluice: {missing}", file=sys.stderr)
        return 1
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)])
    # Not the current folder first: it may hold an `api` or `scripts` of its own.
    os.environ["PYTHONSAFEPATH"] = "1"
    _become([str(python), *run, *rest])


def needs_llamacpp(command: str, arguments: Sequence[str]) -> bool:
    """Whether this run will load the llama.cpp library: the default engine, unless others are named."""
    if command == "test":
        return True
    if command not in ("up", "quickstart"):
        return False
    named = [x.partition("=")[2] for x in arguments if x.startswith("--engine=")]
    named += [after for option, after in itertools.pairwise(arguments) if option == "--engine"]
    return not named or "llamacpp" in named


def check_machine() -> None:
    """Raises Missing on a system that the pinned packages have no wheels for."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Missing(
            f"Sluice runs on Linux x86_64, this is {platform.system()} {platform.machine()}. Run it in a Linux container "
            "or virtual machine of that kind."
        )
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise Missing(f"Sluice needs Python 3.11 to 3.14, this is {platform.python_version()}.")
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) >= MIN_GLIBC:
        return
    raise Missing(
        f"Sluice needs glibc {MIN_GLIBC[0]}.{MIN_GLIBC[1]} or newer (Debian 11, Ubuntu 20.04, RHEL 9), this system has "
        f"{f'{name} {version}' if name else 'another C library (musl?)'}. Run it in a container of such a system."
    )


def check_llamacpp() -> None:
    """Raises Missing where the CPU engine's prebuilt library cannot run."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        raise Missing(
            f"The llamacpp engine needs the library libgomp.so.1. {_how_to_get('libgomp')}\n"
            "Or run without it: --engine scripted"
        ) from None
    flags = _cpu_flags()
    if flags and not {"avx2", "fma"} <= flags:
        raise Missing(
            "The llamacpp engine needs a processor with AVX2 and FMA, which this one is not (or a virtual machine hides "
            "it).\nRun without it: --engine scripted"
        )


def prepare(venv: Path, files: Sequence[str], harness: bool = False) -> Path:
    """An environment in `venv` with `files` installed; returns its Python. Installs only what changed. Raises Missing.

    With `harness` also what the tests of ExLlamaV2 need, if it can be had; else those tests skip.
    """
    if os.pathsep in str(venv):
        raise Missing(
            f"The path {venv} holds a '{os.pathsep}', which no Python environment can have. Move the checkout."
        )
    # Two commands started at once: the second waits. The lock is this file itself, so nothing is left behind.
    with Path(__file__).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another command of this checkout is installing; waiting for it.", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        python = venv / "bin" / "python"
        stamp = _usable(venv)
        if stamp is None:
            _make(venv)
            stamp = Stamp(str(venv), _version_of(python))
            stamp.write(venv)
        wanted = {name: _digest(ROOT / name) for name in files}
        if any(stamp.installed.get(name) != digest for name, digest in wanted.items()):
            again = [name for name in dict.fromkeys([*stamp.installed, *files]) if name != HARNESS]
            _install(python, again)
            stamp.installed |= {name: _digest(ROOT / name) for name in again}
            stamp.write(venv)
        if harness and stamp.installed.get(HARNESS) != (digest := _digest(ROOT / HARNESS)) and _install_harness(python):
            stamp.installed[HARNESS] = digest
            stamp.write(venv)
    return python


@dataclass
class Stamp:
    """What is in an environment, in a file inside it. `path`: where it was made; `python`: `3.12`; `installed`: file -> sha256."""

    path: str
    python: str
    installed: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(venv: Path) -> Stamp | None:
        try:
            return Stamp(**json.loads((venv / "sluice.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, venv: Path) -> None:
        (venv / "sluice.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def _usable(venv: Path) -> Stamp | None:
    """The stamp of an environment that still works where it was made; a new one for an environment a person made."""
    version = _version_of(venv / "bin" / "python")
    stamp = Stamp.read(venv)
    if stamp is not None:
        return stamp if (stamp.path, stamp.python) == (str(venv), version) else None
    minor = int(version.partition(".")[2] or 0)
    return Stamp(str(venv), version) if 11 <= minor <= 14 else None


def install_command(python: Path) -> list[str]:
    """Installs packages for `python`; requirement arguments follow. Nothing is ever compiled."""
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", str(python), "--only-binary", ":all:"]
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--only-binary", ":all:"]


def _make(venv: Path) -> None:
    if venv.is_symlink() or (venv.exists() and any(venv.iterdir())):
        if venv.is_symlink() or not (venv / "pyvenv.cfg").is_file():
            raise Missing(f"{venv} is in the way and is no Python environment of ours. Move it or remove it.")
        print(f"Making {venv} anew (it was moved, or its Python is gone)", flush=True)
        shutil.rmtree(venv)
    else:
        print(f"Making {venv} with Python {platform.python_version()}", flush=True)
    uv = shutil.which("uv")
    if uv is not None:
        made = subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)])
    elif importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise Missing(f"Python's venv module is not whole on this system (no ensurepip). {_how_to_get('venv')}")
    else:
        made = subprocess.run([sys.executable, *MAKE, str(venv)])
    if made.returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        raise Missing(f"No environment could be made in {venv} (see above). {_how_to_get('venv')}")


def _install(python: Path, files: Sequence[str]) -> None:
    print(f"Installing {' and '.join(files)}: a minute or two, once", flush=True)
    if shutil.which("uv") is None and subprocess.run([str(python), "-c", "import pip"], capture_output=True).returncode:
        subprocess.run([str(python), "-m", "ensurepip"])  # made by a uv that is gone
    arguments = [argument for name in files for argument in ("-r", str(ROOT / name))]
    if subprocess.run([*install_command(python), *arguments]).returncode != 0:
        raise Missing(
            "The packages could not be installed (see above). If the package index was out of reach, run this again; "
            "behind a proxy or with an index of your own, set PIP_INDEX_URL (uv: UV_INDEX_URL) first."
        )


def harness_attempts(python: Path) -> list[list[list[str]]]:
    """Ways to install HARNESS for `python`, to be tried in turn, each some commands: as pip is configured (a wheel of
    torch may lie at hand), then torch from its own index and the rest after it.

    By pip where there is one, by uv only without: uv does not read pip's configuration.
    """
    if subprocess.run([str(python), "-c", "import pip"], capture_output=True).returncode == 0:
        install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--only-binary", ":all:"]
    elif subprocess.run([sys.executable, "-c", "import pip"], capture_output=True).returncode == 0:
        install = [sys.executable, "-m", "pip", "--python", str(python)]
        install += ["install", "--disable-pip-version-check", "--only-binary", ":all:"]
    else:
        install = install_command(python)
    file = ROOT / HARNESS
    torch = next(
        line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("torch==")
    )
    whole = [*install, "--no-deps", "-r", str(file)]
    return [[whole], [[*install, "--no-deps", "--index-url", TORCH_INDEX, torch], whole]]


def _install_harness(python: Path) -> bool:
    """Whether the environment now has what HARNESS names. Never raises: one line says what will be skipped."""
    torch = _installed(python, "torch")
    if torch and not torch.endswith("+cpu"):
        print(f"Leaving torch {torch} in the environment, so nothing of {HARNESS} is installed", flush=True)
        return False
    print(f"Installing {HARNESS}: 200 MB, once", flush=True)
    said = ""
    for commands in harness_attempts(python):
        for command in commands:
            ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
            if ended.returncode != 0:
                said = ended.stderr.strip() or said
                break
        else:
            return True
    reason = said.splitlines()[-1] if said else "no reason given"
    print(
        f"warning: the tests of ExLlamaV2 on CPU will be skipped, its packages cannot be installed: {reason}",
        flush=True,
    )
    return False


def _installed(python: Path, package: str) -> str:
    """The version of a package in an environment; empty if it is not there."""
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()


def _how_to_get(what: str) -> str:
    """The command that installs it, on systems we know."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for tool, package in _PACKAGES[what].items():
        if shutil.which(tool) is not None:
            verb = "-S" if tool == "pacman" else "install"
            sudo = "" if os.geteuid() == 0 else "sudo "
            return f"To get it:\n    {sudo}{tool} {verb} {package.format(version=version)}"
    return "Install it with your system's package manager."


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), set())


def _version_of(python: Path) -> str:
    """`3.12` of an environment's Python; empty if it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _become(command: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], list(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
