"""The package's own host C++ (sampler, penalties, filters, stop-string matcher), compiled against CPU torch.

The sources are read from where exllamav2 is installed and are not changed. One g++ call with our own lock, instead of
torch's JIT builder: nothing waits forever for a `lock` that a killed build left behind, and ninja is not needed. Knows
nothing of the kernels that only CUDA has.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

#: What is compiled. ext_sampling.cpp is included by the binding, so that torch's headers are parsed only once.
SOURCES = ("cpp/sampling.cpp", "cpp/sampling_avx2.cpp", "cpp/generator.cpp", "cpp/profiling.cpp")

#: Functions of the real extension that run here as they are.
FUNCTIONS = (
    "apply_rep_penalty",
    "sample_basic",
    "logit_filter_exclusive",
    "fast_fill_cpu_ones_bool",
    "fast_fadd_cpu",
    "fast_copy_cpu",
    "partial_strings_match",
)

#: Headers that ext_sampling.cpp includes, as it gets them. Of CUDA it uses nothing. Of torch's C++ API it uses tensors
#: and their Python binding: without the rest the build takes half the time.
HEADERS = {
    "c10/cuda/CUDAGuard.h": "",
    "ATen/cuda/CUDAContext.h": "",
    "cuda_runtime.h": "",
    "cuda_fp16.h": "",
    "torch/extension.h": "#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n",
}

NAME = "sluice_exllamav2_host"
_BUILD_SECONDS = 600


class BuildFailed(Exception):
    """The compiler refused; the message ends with what it said."""


def missing() -> str | None:
    """Why nothing can be compiled here, as a sentence; None if all is there."""
    if _compiler() is None:
        return "there is no C++ compiler (install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"Python's headers are missing (install python{sysconfig.get_python_version()}-dev)"
    return None


def load(cache_dir: Path) -> ModuleType:
    """The compiled functions as a module, built below `cache_dir` if they are not there yet (a minute or two).

    Two processes at once build it once. Raises BuildFailed.
    """
    package = _package()
    binding = _binding()
    folder = cache_dir.expanduser().absolute() / "exllamav2-host" / _digest(package, binding)
    library = folder / f"{NAME}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "building").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when its holder dies
            if not library.is_file():
                _build(package, binding, library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _binding() -> str:
    definitions = "\n".join(f'    m.def("{name}", &{name});' for name in FUNCTIONS)
    return f'#include "ext_sampling.cpp"\n\nPYBIND11_MODULE({NAME}, m)\n{{\n{definitions}\n}}\n'


def _build(package: Path, binding: str, library: Path) -> None:
    """Into a folder beside, then renamed: what is at the final place is whole."""
    import torch

    compiler = _compiler()
    if compiler is None:
        raise BuildFailed("there is no C++ compiler")
    print("Compiling exllamav2's host functions for CPU torch: a minute or two, once", flush=True)
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as name:
        work = Path(name)
        for header, text in HEADERS.items():
            path = work / "headers" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (work / "binding.cpp").write_text(binding, encoding="utf-8")
        includes = [
            work / "headers",
            package,
            torch_folder / "include",
            torch_folder / "include" / "torch" / "csrc" / "api" / "include",
            Path(sysconfig.get_path("include")),
        ]
        command = [
            *(compiler, "-shared", "-fPIC", "-std=c++20", "-O2", "-w"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{folder}" for folder in includes),
            str(work / "binding.cpp"),
            *(str(package / source) for source in SOURCES),
            *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-pthread"),
            *("-o", str(work / library.name)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        if ended.returncode != 0:
            raise BuildFailed(f"exllamav2's host functions do not compile:\n{ended.stderr[-2000:]}")
        (work / library.name).rename(library)


def _package() -> Path:
    """The folder of the extension's sources. Finding it does not import exllamav2."""
    spec = importlib.util.find_spec("exllamav2")
    if spec is None or not spec.submodule_search_locations:
        raise BuildFailed("exllamav2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "exllamav2_ext"


def _digest(package: Path, binding: str) -> str:
    """Of all that the compiled file depends on."""
    import torch

    digest = hashlib.sha256()
    for part in (torch.__version__, sys.version, str(_compiler()), str(torch.__file__), str(HEADERS), binding):
        digest.update(part.encode() + b"\0")
    for path in [package / "ext_sampling.cpp", *sorted(package.glob("*.h")), *sorted(package.glob("cpp/*"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")
