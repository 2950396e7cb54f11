#!/usr/bin/env python3
"""Proof that `requirements.txt` alone makes a working server: a fresh environment, the stack, the scripted engine.

Standard library only; runs with any supported Python. Writes a JSON report with top-level `passed`, also when it fails.
The exit status is 0 only if it is true.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started by its path: the packages of the checkout, not the folder of this file.
    sys.path[0] = str(ROOT)

from scripts import bootstrap, ports  # noqa: E402
from scripts.client import Client, ServerError, ServerUnreachable  # noqa: E402

T = TypeVar("T")

#: Longest time from start to ready, s; the scripted engine loads nothing.
START_S = 90.0
SCRIPT = json.dumps({"pieces": ["one ", "two ", "three"]})
TEXT = "one two three"


class CheckFailed(Exception):
    """What a check saw instead of what it wanted."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Smoke test of a minimal server.")
    parser.add_argument("--report", type=Path, help="where the JSON report goes; default: standard output")
    options = parser.parse_args(list(arguments))
    report: dict[str, Any] = {
        "passed": False,
        "reason": None,
        "python": platform.python_version(),
        "seconds": {},
        "checks": {},
    }
    signal.signal(signal.SIGTERM, _stopped)
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-smoke-") as folder:
            _run(Path(folder), report)
        report["passed"] = True
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the report is the point of this script
        report["reason"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    text = json.dumps(report, indent=2) + "\n"
    if options.report is None:
        print(text, end="")
    else:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text, encoding="utf-8")
        print(f"smoke: {'passed' if report['passed'] else 'FAILED: ' + report['reason']} ({options.report})")
    return 0 if report["passed"] else 1


def _stopped(number: int, frame: object) -> None:
    raise CheckFailed(f"stopped by signal {number}")


def _run(folder: Path, report: dict[str, Any]) -> None:
    bootstrap.check_machine()
    python = _timed(report, "install", lambda: bootstrap.prepare(folder / "venv", bootstrap.RUN))
    port = ports.any_free()
    log_path = folder / "up.log"
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith("SLUICE_") and k not in ("REDIS_URL", "PYTHONHOME")
    }
    env = {**inherited, "SLUICE_DATA_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [str(python), "-m", "scripts.cli", "up", "--engine", "scripted", "--port", str(port)]
    with log_path.open("wb") as log:
        up = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder
        )
    try:
        client = Client(f"http://127.0.0.1:{port}", timeout_s=30)
        _timed(report, "start", lambda: _wait_until_ready(client, up))
        for name, check in CHECKS.items():
            report["checks"][name] = "failed"
            check(client)
            report["checks"][name] = "passed"
        up.terminate()
        report["checks"]["stop"] = "failed"
        if up.wait(60) != 0:
            raise CheckFailed(f"SIGTERM: up ended with exit status {up.returncode}")
        report["checks"]["stop"] = "passed"
    except Exception:
        report["log"] = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        raise
    finally:
        if up.poll() is None:
            up.kill()  # its children die with it
            up.wait()


def _timed(report: dict[str, Any], name: str, work: Callable[[], T]) -> T:
    began = time.monotonic()
    try:
        return work()
    finally:
        report["seconds"][name] = round(time.monotonic() - began, 1)


def _wait_until_ready(client: Client, up: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while True:
        try:
            client.get("/ready")
            if "scripted" in client.models():
                return
            missing = "model scripted is not listed"
        except (ServerUnreachable, ServerError) as error:
            missing = str(error)
        if up.poll() is not None:
            raise CheckFailed(f"up ended with exit status {up.returncode}")
        if time.monotonic() > give_up:
            raise CheckFailed(f"not ready after {START_S:.0f} s: {missing}")
        time.sleep(0.2)


def _health(client: Client) -> None:
    client.get("/health")


def _models(client: Client) -> None:
    _same(client.models(), ["scripted"], "the models listed")


def _completion(client: Client) -> None:
    answer = client.post("/v1/completions", {"model": "scripted", "prompt": SCRIPT})
    _same(answer["choices"][0]["text"], TEXT, "the text")
    _same(answer["choices"][0]["finish_reason"], "stop", "the finish reason")
    _same(answer["usage"]["completion_tokens"], 4, "the completion tokens (three pieces and the end token)")


def _stream(client: Client) -> None:
    events = list(client.stream("/v1/completions", {"model": "scripted", "prompt": SCRIPT}))
    choices = [choice for event in events for choice in event["choices"]]
    _same("".join(choice.get("text") or "" for choice in choices), TEXT, "the streamed text")
    _same([c["finish_reason"] for c in choices if c.get("finish_reason")], ["stop"], "the finish reasons")


def _same(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise CheckFailed(f"{what}: {found!r}, not {wanted!r}")


CHECKS: dict[str, Callable[[Client], None]] = {
    "health": _health,
    "models": _models,
    "completion": _completion,
    "stream": _stream,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
