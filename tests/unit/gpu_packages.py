"""Packages that stand for torch and exllamav2 in another process: as much of them as the extension's loader looks at."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

TORCH = """
import types, sys
__version__ = {version!r}
version = types.SimpleNamespace(cuda={cuda!r}, hip=None)
cuda = types.SimpleNamespace(
    is_available=lambda: {gpus} > 0, device_count=lambda: {gpus}, get_device_capability=lambda i: (9, 0)
)
threads = 5
def get_num_threads(): return threads
def set_num_threads(n):
    global threads
    threads = n
"""

#: What its import does, as the real one: it compiles into torch's folder unless that is done, then it is there.
EXLLAMAV2 = """
import os, pathlib, sys, torch
folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "exllamav2_ext"
built = folder / "exllamav2_ext.so"
if not built.exists():
    {build}
    built.write_text("")
torch.set_num_threads(1)
"""


@dataclass
class Packages:
    """A folder for PYTHONPATH, and the environment to run Python with."""

    folder: Path
    environment: dict[str, str]

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Runs `code` after `load(limit_s)` was defined, which reports to standard output."""
        prelude = (
            "import sys, pathlib, logging; logging.basicConfig(level='INFO', stream=sys.stderr)\n"
            "from workers.engines.exllamav2 import extension\n"
            f"cache = pathlib.Path({str(self.folder / 'cache')!r})\n"
            "def load(limit_s=60.0): extension.load_package(cache, limit_s, lambda part, word: print(word))\n"
        )
        return subprocess.run(
            [sys.executable, "-c", prelude + code],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )


def write_packages(
    folder: Path,
    *,
    version: str = "2.14.1+cu130",
    cuda: str | None = "13.0",
    gpus: int = 1,
    nvcc: bool = True,
    exllamav2: str = "0.3.2",
    build: str = "pass",
    source: str | None = None,
) -> Packages:
    """`build`: what compiling does, Python code. `source`: all of the package's code instead."""
    _write(folder / "torch" / "__init__.py", TORCH.format(version=version, cuda=cuda, gpus=gpus))
    _write(folder / "torch" / "utils" / "__init__.py", "")
    home = folder / "cuda-home"
    if nvcc:
        _write(home / "bin" / "nvcc", "")
    _write(folder / "torch" / "utils" / "cpp_extension.py", f"CUDA_HOME = {str(home)!r}")
    _write(folder / "exllamav2" / "__init__.py", source or EXLLAMAV2.format(build=build))
    _write(
        folder / f"exllamav2-{exllamav2}.dist-info" / "METADATA",
        f"Metadata-Version: 2.1\nName: exllamav2\nVersion: {exllamav2}\n",
    )
    _write(folder / "ninja.py", "")
    _write(folder / "nvidia" / "cu13" / "include" / "cublas_v2.h", "")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_", "EXLLAMA_"))}
    for name in ("MAX_JOBS", "CPATH", "REDIS_URL", "SLUICE_REDIS_URL"):
        environment.pop(name, None)
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "CXX": "true",
        "SLUICE_CACHE_DIR": str(folder / "cache"),
    }
    return Packages(folder, environment)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
