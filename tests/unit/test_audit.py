"""What becomes of pip-audit's report: what is found fails, what could not be asked is never called clean."""

from __future__ import annotations

from scripts.audit import judged

CLEAN = {"name": "flask", "version": "3.1.3", "vulns": []}
UNKNOWN = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (2.4.6)"}
FLAWED = {"name": "jinja2", "version": "3.1.0", "vulns": [{"id": "CVE-2024-22195", "fix_versions": ["3.1.3"]}]}


def test_what_is_found_fails() -> None:
    assert judged({"dependencies": [CLEAN, FLAWED]}) == (["pip-audit: jinja2 3.1.0: CVE-2024-22195, fixed in 3.1.3"], 1)


def test_a_service_out_of_reach_is_said() -> None:
    [line], status = judged({"dependencies": [UNKNOWN, UNKNOWN]})
    assert line.startswith("pip-audit: not run: no network") and status == 0


def test_packages_that_could_not_be_checked_are_named() -> None:
    lines, status = judged({"dependencies": [CLEAN, UNKNOWN]})
    assert lines == [
        "pip-audit: not checked, unknown to the service: numpy",
        "pip-audit: nothing known against 1 packages",
    ]
    assert status == 0
