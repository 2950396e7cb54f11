"""Runs the genuine exllamav2 package without a GPU: `install()` before its first import.

The module `exllamav2_ext`, which the package imports first of all, is made here: its host functions compiled from the
package's own C++, its kernels by stand-ins in torch. What neither has raises. There is no attention here: the paged
one is the product's own (`workers/engines/exllamav2/attention.py`), which is what the tests are to run.
docs/exllamav2.md lists what this proves, name by name.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any, NoReturn

import pytest

from shared.settings import Settings
from tests.exllamav2 import host_extension

VERSION = "0.3.2"

#: The mark that the module in sys.modules is ours.
_OURS = "sluice_cpu_harness"


class HarnessUnavailable(Exception):
    """The harness cannot run on this machine; the message says why, in one line."""


def missing() -> str | None:
    """Why the harness cannot be installed here, as a sentence; None if it can. Imports and compiles nothing."""
    for package in ("torch", "exllamav2"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (./scripts/test installs requirements-harness.txt where it can)"
    if (version := metadata.version("exllamav2")) != VERSION:
        return f"the harness stands for exllamav2 {VERSION}, this is {version}"
    return host_extension.missing()


def install() -> ModuleType:
    """Makes `import exllamav2` work without a GPU; returns the module that stands for `exllamav2_ext`.

    The first time on a machine it compiles for a minute or two. Calling it again changes nothing. Raises
    HarnessUnavailable where something is missing, RuntimeError where exllamav2 is imported already.
    """
    present = sys.modules.get("exllamav2_ext")
    if present is not None and hasattr(present, _OURS):
        return present
    if present is not None or "exllamav2" in sys.modules:
        raise RuntimeError("exllamav2 is imported already; the harness must be installed before")
    if (reason := missing()) is not None:
        raise HarnessUnavailable(f"no ExLlamaV2 on CPU: {reason}")
    from tests.exllamav2 import kernels, placement, quantised_cache

    try:
        host = host_extension.load(Settings().cache_dir)
    except host_extension.BuildFailed as failed:
        raise HarnessUnavailable(f"no ExLlamaV2 on CPU: {failed}") from None
    extension = ModuleType("exllamav2_ext", "Stands for the CUDA extension of exllamav2.")
    setattr(extension, _OURS, True)
    for name in host_extension.FUNCTIONS:
        setattr(extension, name, getattr(host, name))
    for function in (*kernels.STAND_INS, *quantised_cache.STAND_INS):
        setattr(extension, function.__name__, function)
    extension.__getattr__ = _needs_cuda  # type: ignore[method-assign]
    sys.modules["exllamav2_ext"] = extension
    placement.place_on_cpu()
    return extension


def install_or_skip() -> ModuleType:
    """`install()` for tests: skips with the reason where the harness cannot run."""
    try:
        return install()
    except HarnessUnavailable as unavailable:
        pytest.skip(str(unavailable))


def _needs_cuda(name: str) -> Callable[..., Any]:
    """A function of the extension that the harness has no stand-in for: it may be looked up, but not called."""
    if re.fullmatch(r"__\w+__|" + _OURS, name):
        raise AttributeError(name)

    def refuse(*arguments: Any) -> NoReturn:
        raise NotImplementedError(f"exllamav2_ext.{name} needs CUDA; the CPU harness has no stand-in for it")

    return refuse


if __name__ == "__main__":  # before the tests, whose time is limited
    try:
        install()
    except HarnessUnavailable as unavailable:
        print(f"warning: {unavailable}", flush=True)
