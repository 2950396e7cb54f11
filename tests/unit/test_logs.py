"""Logs are one JSON object a line, and never hold what a client sent."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT

PROGRAM = """
import logging, structlog
from shared import logs
logs.configure("INFO", process="test")

def fails(prompt):
    raise ValueError("no")

for log in (structlog.get_logger("a"), logging.getLogger("b")):
    try:
        fails("the-canary-in-a-prompt")
    except ValueError:
        log.exception("it_failed")
logging.getLogger("c").info("plain %s", "words")
"""


def test_tracebacks_show_no_local_variables() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["it_failed", "it_failed", "plain words"]
    assert {line["level"] for line in lines[:2]} == {"error"}
    assert "fails" in done.stderr and "canary" not in done.stderr
