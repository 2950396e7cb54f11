"""`./scripts/test`: lint, types, import rules, then the tests, whose closing line is the last one printed.

With arguments of pytest, only pytest runs, and one test at a time. `--without-jsonschema`: as if that package were not
installed. Everything runs even if something before it failed; what failed is named
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
#: A folder with a module that says it is not there.
WITHOUT_JSONSCHEMA = ROOT / "tests" / "without_jsonschema"

#: name -> arguments of Python. Run as modules: console scripts do not survive a path with spaces.
CHECKS = {
    "ruff check": ("-m", "ruff", "check", "."),
    "ruff format": ("-m", "ruff", "format", "--check", "--quiet", "."),
    "mypy": ("-m", "mypy"),
    "import rules": ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"),
    "known vulnerabilities": ("-m", "scripts.audit"),
}

#: Tests mostly wait for processes that start, stop and sleep. Those of a file share what they have started.
AT_A_TIME = ("-n", "2", "--dist", "loadfile")


def main(arguments: Sequence[str]) -> int:
    os.chdir(ROOT)
    slow = "--slow" in arguments
    if "--without-jsonschema" in arguments:
        hide_jsonschema()
    rest = [argument for argument in arguments if argument not in ("--slow", "--without-jsonschema")]
    failed = [] if rest else run_checks()
    try:
        carried_model.ensure(Settings().cache_dir)
    except carried_model.ModelUnavailable as unavailable:
        # The tests that need it say so themselves.
        print(f"warning: {unavailable}", flush=True)
    # Compiles for a minute or two the first time; a test alone has less time. Says itself why it cannot.
    subprocess.run([sys.executable, "-m", "tests.exllamav2.harness"])
    marks = ["-m", "not gpu"] if slow else []
    status = int(pytest.main([*marks, *(rest or AT_A_TIME)], plugins=[FailedBefore(failed)]))
    return status or bool(failed)


def hide_jsonschema() -> None:
    """From this process and from all that it starts."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(WITHOUT_JSONSCHEMA), *([path] if path else [])])
    sys.path.insert(0, str(WITHOUT_JSONSCHEMA))


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
