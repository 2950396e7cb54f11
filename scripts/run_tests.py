"""`./scripts/test`: lint, types, import rules, then the tests, whose closing line is the last one printed.

With arguments of pytest, only pytest runs. Everything runs even if something before it failed; what failed is named
again above pytest's closing line, and the exit status counts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import carried_model
from shared.settings import Settings

ROOT = Path(__file__).parents[1]

#: name -> arguments of Python. Run as modules: console scripts do not survive a path with spaces.
CHECKS = {
    "ruff check": ("-m", "ruff", "check", "."),
    "ruff format": ("-m", "ruff", "format", "--check", "--quiet", "."),
    "mypy": ("-m", "mypy"),
    "import rules": ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"),
}


def main(arguments: Sequence[str]) -> int:
    os.chdir(ROOT)
    slow = "--slow" in arguments
    rest = [argument for argument in arguments if argument != "--slow"]
    failed = [] if rest else run_checks()
    try:
        carried_model.ensure(Settings().cache_dir)
    except carried_model.ModelUnavailable as unavailable:
        # The tests that need it say so themselves.
        print(f"warning: {unavailable}", flush=True)
    marks = ["-m", "not gpu"] if slow else []
    status = int(pytest.main([*marks, *rest], plugins=[FailedBefore(failed)]))
    return status or bool(failed)


def run_checks() -> list[str]:
    """Runs all checks and returns the names of those that failed."""
    failed = []
    for name, command in CHECKS.items():
        print(f"--- {name}", flush=True)
        if subprocess.run([sys.executable, *command]).returncode != 0:
            failed.append(name)
    return failed


class FailedBefore:
    """A pytest plugin that names, in pytest's own summary, what failed before the tests."""

    def __init__(self, failed: Sequence[str]) -> None:
        self._failed = failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._failed:
            terminalreporter.section("FAILED before the tests", red=True)
            terminalreporter.write_line(", ".join(self._failed) + " (see the top)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
