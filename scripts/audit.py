"""`python -m scripts.audit`: asks pip-audit about known vulnerabilities of what requirements.txt pins.

A service that cannot be reached is no clean bill: it is said that nothing was checked. The exit status is 1 only for what
was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
#: Longest wait for the service, s.
LIMIT = 120


def judged(report: dict[str, Any]) -> tuple[list[str], int]:
    """Lines to print about pip-audit's JSON report, and the exit status."""
    packages = report["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        return [f"pip-audit: not run: no network to the vulnerability service ({packages[0]['skip_reason']})"], 0
    lines = [f"pip-audit: not checked, unknown to the service: {', '.join(skipped)}"] if skipped else []
    found = [
        f"pip-audit: {package['name']} {package['version']}: {flaw['id']}, "
        f"fixed in {', '.join(flaw['fix_versions']) or 'no release yet'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    checked = len(packages) - len(skipped)
    return [*lines, *(found or [f"pip-audit: nothing known against {checked} packages"])], int(bool(found))


def main() -> int:
    """Prints what was found, or why nothing could be; the exit status."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(REQUIREMENTS), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        lines, status = judged(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        lines, status = [f"pip-audit: not run: no network to the vulnerability service (no answer in {LIMIT} s)"], 0
    except (ValueError, KeyError, IndexError):
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        lines, status = [f"pip-audit: not run: {words[-1]}"], 0
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
