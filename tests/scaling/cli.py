"""`python -m tests.scaling.cli` is the command `sluice` with scripted workers that load slowly, or fail to."""

from __future__ import annotations

from scripts import cli, up

_module = up._module


def _with_slow_start(name: str, *arguments: str) -> list[str]:
    return _module("tests.scaling.worker" if name == "workers" else name, *arguments)


if __name__ == "__main__":
    up._module = _with_slow_start
    cli.main()
