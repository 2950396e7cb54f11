"""Environments for the clients and tools we are tested with: made once in `.conformance/`, apart from our own.

`python -m tests.conformance.environments` makes them all. Each is named after the hash of its pins, so a changed pin makes a new one. Nothing here knows what runs in them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
#: Ignored by git; may be deleted at any time. SLUICE_CONFORMANCE_DIR names another.
CACHE = Path(os.environ.get("SLUICE_CONFORMANCE_DIR") or HERE.parents[1] / ".conformance")
#: Making one may take this long, s.
INSTALL_S = 1200


def python(name: str) -> Path:
    """The interpreter of an environment with the pins of `requirements-{name}.txt`."""
    pins = HERE / f"requirements-{name}.txt"

    def make(folder: Path) -> None:
        run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "-r", str(pins)])

    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return made(name, pins.read_bytes() + version.encode(), make) / "bin" / "python"


def node(name: str) -> Path:
    """A folder with the packages of `{name}/package.json`, and the scripts beside it."""
    source = HERE / name
    package = source / "package.json"

    def make(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(package, folder)
        run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"],
            cwd=folder,
        )

    folder = made(name, package.read_bytes(), make)
    for script in source.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


def is_made(name: str) -> bool:
    """Whether `python(name)` has nothing to install."""
    pins = HERE / f"requirements-{name}.txt"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (_place(name, pins.read_bytes() + version.encode()) / ".whole").is_file()


def _place(name: str, pins: bytes) -> Path:
    return CACHE / f"{name}-{hashlib.sha256(pins).hexdigest()[:12]}"


def made(name: str, pins: bytes, make: Callable[[Path], None]) -> Path:
    folder = _place(name, pins)
    whole = folder / ".whole"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            whole.touch()
    return folder


def make_all() -> None:
    """Everything that the tests of this folder install."""
    for pins in sorted(HERE.glob("requirements-*.txt")):
        print(python(pins.stem.removeprefix("requirements-")))
    for package in sorted(HERE.glob("*/package.json")):
        print(node(package.parent.name))


def run(command: list[str], cwd: Path | None = None) -> None:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout[-1500:]}\n{ended.stderr[-1500:]}")


if __name__ == "__main__":
    make_all()
