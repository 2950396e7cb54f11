"""`python -m tests.exllamav2.cli` is the command `sluice` with workers that run exllamav2 on the CPU."""

from __future__ import annotations

from scripts import cli, up

_module = up._module


def _with_harness(name: str, *arguments: str) -> list[str]:
    return _module("tests.exllamav2.worker" if name == "workers" else name, *arguments)


if __name__ == "__main__":
    up._module = _with_harness
    up._check_gpu_engine = lambda model, settings: None  # it would find no GPU
    cli.main()
