"""How long the first request waits when there is no worker, and how fast the worker is gone again.

Run: `scripts/bench coldstart --rounds 5 --json coldstart.json`. One `sluice up --workers 0:1` for each engine, with the
carried model for llamacpp. In each round nobody serves the model: a stream is opened, and the time to its first token and
the comments it got before are noted; then the time until the worker has gone, which is `idle_s` and what a drain takes. The
first start of a model converts its weights once, and is not among the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts import ports
from scripts.up import CannotStart
from workers.engines import served_id

ENGINES = ("scripted", "llamacpp")
#: Longest wait for anything, and how long a worker may have nothing to do, s.
PATIENCE_S, IDLE_S = 300.0, 1.0
_ROOT = Path(__file__).parents[2]


class Server:
    """`sluice up --workers 0:1` with one engine. A context manager: leaving it ends the server."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.model = served_id(engine, None)
        self.port = ports.any_free()
        self._log = folder / f"{engine}.txt"
        kept = {n: v for n, v in os.environ.items() if n == "SLUICE_CACHE_DIR" or not n.startswith("SLUICE_")}
        kept.pop("REDIS_URL", None)
        settings = {"SLUICE_DATA_DIR": str(folder / engine), "SLUICE_IDLE_S": str(IDLE_S), "PYTHONPATH": str(_ROOT)}
        command = [sys.executable, "-m", "scripts.cli", "up", "--engine", engine, "--workers", "0:1"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env={**kept, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        self.wait_until(lambda: "| ready: " in self._log.read_text(errors="replace"))
        self.wait_until(self.at_zero)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait(10)

    def at_zero(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            with contextlib.closing(client):
                client.request("GET", "/v1/status")
                return not json.loads(client.getresponse().read())["workers"]
        return False

    def wait_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            if self._process.poll() is not None or time.monotonic() > until:
                raise CannotStart(
                    f"The server is not as it should be:\n{self._log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.02)

    def first_token(self) -> tuple[float, list[str]]:
        """Seconds to the first event of a stream, and the comments before it. Raises CannotStart if that is no token."""
        body = json.dumps({"model": self.model, "prompt": "The capital of France is", "max_tokens": 4, "stream": True})
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(client):
            began = time.monotonic()
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer, comments, took = client.getresponse(), list[str](), None
            for raw in answer:
                line = raw.decode().strip()
                if line.startswith(":"):
                    comments.append(line)
                elif line.startswith("data:") and took is None:
                    took = time.monotonic() - began
                    if '"choices"' not in line:
                        raise CannotStart(f"The first event is no token: {line}")
        if took is None:
            raise CannotStart(f"The stream had no token: {answer.status}")
        return took, comments


def measure(engine: str, rounds: int, folder: Path) -> dict[str, Any]:
    waits, warm, gone = list[float](), list[float](), list[float]()
    comments: list[str] = []
    with Server(engine, folder) as server:
        for _ in range(rounds):
            took, comments = server.first_token()
            waits.append(took)
            warm.append(server.first_token()[0])
            ended = time.monotonic()
            server.wait_until(server.at_zero)
            gone.append(time.monotonic() - ended)
    return {
        "engine": engine,
        "model": server.model,
        "rounds": rounds,
        "first_token_s": round(statistics.median(waits), 2),
        "slowest_s": round(max(waits), 2),
        "warm_first_token_s": round(statistics.median(warm), 3),
        "idle_s": IDLE_S,
        "gone_after_s": round(statistics.median(gone), 2),
        "comments": comments,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench coldstart", description=__doc__)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated (default: both)")
    parser.add_argument("--rounds", type=int, default=5, help="cold starts of each engine (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sluice-coldstart-") as folder:
        reports = [measure(engine, args.rounds, Path(folder)) for engine in args.engine or ENGINES]
    table = Table("engine", "first token, cold (s)", "slowest (s)", "warm (s)", "gone after (s)")
    for report in reports:
        columns = ("engine", "first_token_s", "slowest_s", "warm_first_token_s", "gone_after_s")
        table.add_row(*(str(report[column]) for column in columns))
    Console().print(table)
    for report in reports:
        Console().print(f"{report['engine']}, told while it waited: {', '.join(report['comments'])}", soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"coldstart": reports}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
