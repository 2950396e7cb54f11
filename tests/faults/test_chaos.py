"""The benchmark `chaos`, short: it says itself whether the promises hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_half_a_minute_of_chaos(tmp_path: Path) -> None:
    figures = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "scripts.cli", "bench", "chaos", "--minutes", "0.5", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
    report = json.loads(figures.read_text())
    assert done.returncode == 0 and report["holds"], (report, done.stderr[-2000:])
    assert sum(report["blows"].values()) > 3
    for kind in report["kinds"].values():
        assert kind["accepted"] == kind["whole"] + kind["wrong"] + sum(kind["errors"].values()) > 20
