"""The run of deploy/gpu_check.sh, with steps that need no GPU: limits, failures, what is written and returned."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check
from scripts.gpu_check import Check
from tests.conftest import wait_for
from tests.faults.processes import alive


@pytest.fixture
def check(tmp_path: Path) -> Check:
    (tmp_path / "work").mkdir()
    return Check(argparse.Namespace(work=tmp_path / "work", json=tmp_path / "out.json", limit=30.0, cpu_harness=False))


def written(check: Check) -> list[dict[str, Any]]:
    report = json.loads(check._args.json.read_text(encoding="utf-8"))
    steps: list[dict[str, Any]] = report["steps"]
    assert report["passed"] == all(step["result"] == "passed" for step in steps)
    return steps


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_step_that_passes_brings_what_it_found(check: Check) -> None:
    code = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{\"speed\": 5}')"
    assert check._command("one", 20, python(code), json_option="--json")
    (step,) = written(check)
    assert (step["result"], step["found"]) == ("passed", {"speed": 5})


def test_a_step_that_fails_leaves_its_last_lines(check: Check) -> None:
    assert not check._command("one", 20, python("for n in range(99): print('line', n)\nraise SystemExit(3)"))
    (step,) = written(check)
    assert step["result"] == "failed"
    assert step["why"] == "line 98"
    assert step["last_lines"] == [f"line {n}" for n in range(99 - gpu_check.LAST_LINES, 99)]


def test_a_step_over_its_limit_ends_with_all_it_started(check: Check, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    assert not check._command("slow", 2, python(code))
    (step,) = written(check)
    assert step["result"] == "failed"
    assert "longer than 2 s" in step["why"]
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))  # the kernel takes a moment


def test_the_whole_run_has_a_limit_too(check: Check) -> None:
    check._args.limit = 1.0
    assert not check._command("slow", 300, python("import time; time.sleep(60)"))
    assert written(check)[0]["seconds"] < 10


def test_what_builds_on_a_failed_step_is_skipped(check: Check) -> None:
    assert not check._may("tests", False, False)
    assert written(check)[0]["result"] == "skipped"


def test_without_a_gpu_it_comes_to_its_end(tmp_path: Path) -> None:
    """With a Python that has no torch: every step is reported, none hangs."""
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('no torch in this test')")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.gpu_check",
            "--json",
            str(tmp_path / "out.json"),
            "--work",
            str(tmp_path / "w"),
        ],
        cwd=gpu_check.ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(gpu_check.ROOT)])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 1, ended.stderr
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    results = {step["name"]: step["result"] for step in report["steps"]}
    assert results["build"] == "failed"
    assert results["tests"] == "skipped"
    assert results["attention"] == "skipped", "a CPU would measure for more than a minute, and nothing of use"
    assert "failed (" in ended.stdout
