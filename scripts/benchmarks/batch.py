"""Batches against bare requests: their rate, the runner's memory, and what interactive clients notice of a full batch.

Run: `scripts/bench batch --lines 3000 --json batch.json`. One `sluice up` with the scripted engine. *Rate*: the same
requests as a batch, and sent straight into the queue by a process that does nothing else with them, in turns.
*Interactive*: time to the first token of streams that come one after the other, with nothing else running and with a
batch on all lanes. *Memory*: the runner's resident memory while it works, sampled.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from api.gateway import Gateway
from scripts.benchmarks.chaos import Node, children, command_of, wait_until
from scripts.client import Client
from shared import connection
from shared.jobs import Job, Placement, new_id
from shared.settings import Settings

#: Tokens of a request, and between two of them, ms: one short enough that queue and runner are what counts, and one of
#: a usual length.
SHAPES = {"short": (4, 0), "usual": (20, 20)}
START_S = 120.0
#: Interactive streams that are timed, and their step, ms.
PROBES, STEP_MS = 40, 20


def prompt(tokens: int, delay_ms: int, number: int = 0) -> str:
    return json.dumps({"pieces": [f"{number} ", *["x "] * (tokens - 1)], "delay_ms": delay_ms})


def line(custom_id: str, prompt: str) -> bytes:
    body = {"model": "scripted", "prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


def start_batch(client: Client, prompts: Sequence[str]) -> str:
    raw = b"\n".join(line(f"line-{number}", prompt) for number, prompt in enumerate(prompts))
    uploaded = client.upload("bench.jsonl", io.BytesIO(raw), len(raw))
    asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = client.post("/v1/batches", asked)["id"]
    return batch_id


def finished(client: Client, batch_id: str) -> dict[str, Any]:
    while (batch := client.get(f"/v1/batches/{batch_id}"))["status"] not in ("completed", "failed", "cancelled"):
        time.sleep(0.1)
    return dict(batch)


def batch_rate(client: Client, prompts: Sequence[str]) -> float:
    """Requests a second, from the moment a runner has checked the file (`in_progress`) to the last result."""
    batch_id = start_batch(client, prompts)
    while client.get(f"/v1/batches/{batch_id}")["status"] == "validating":
        time.sleep(0.02)
    began = time.monotonic()
    batch = finished(client, batch_id)
    seconds = time.monotonic() - began
    assert batch["request_counts"]["completed"] == len(prompts), batch
    return len(prompts) / seconds


def bare_rate(url: str, prompts: Sequence[str]) -> float:
    """The same requests by a process of its own: requests a second, from the first one sent to the last one ended."""
    command = [sys.executable, "-m", "scripts.benchmarks.batch", "--bare", url]
    ran = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=True)
    return len(prompts) / float(ran.stdout)


def send_bare(url: str, prompts: Sequence[str]) -> float:
    """Seconds. Nobody reads what they say."""
    gateway = Gateway(connection.connect(url), Settings(redis_url=url))
    placement = Placement(klass="batch", background=True)
    began = time.monotonic()
    ids = []
    for text in prompts:
        job = Job(id=new_id(), model="scripted", prompts=[text], seed=1, created=int(time.time()))
        ids.append(gateway.submit(job, placement, followed=False))
    while ids:
        over = {ended.job_id for ended in gateway.known.ended(ids[:64], 64)}
        ids = [job_id for job_id in ids if job_id not in over]
        if not over:
            time.sleep(0.02)
    return time.monotonic() - began


def first_token_ms(client: Client) -> float:
    began = time.monotonic()
    stream = client.stream("/v1/completions", {"model": "scripted", "prompt": prompt(5, STEP_MS)})
    next(stream)
    ms = (time.monotonic() - began) * 1000
    for _ in stream:
        pass
    return ms


def interactive(client: Client, lanes: int) -> dict[str, float]:
    """Median times to the first token, ms: of the idle machine, and with a batch that has all lanes and more
    waiting."""
    idle = [first_token_ms(client) for _ in range(PROBES)]
    batch_id = start_batch(client, [prompt(200, STEP_MS, number) for number in range(40 * lanes)])
    until = time.monotonic() + START_S
    while not full(client, lanes):
        if time.monotonic() > until:
            raise SystemExit("The batch does not fill the lanes.")
        time.sleep(0.1)
    busy = [first_token_ms(client) for _ in range(PROBES)]
    still = full(client, lanes)
    client.post(f"/v1/batches/{batch_id}/cancel", {})
    finished(client, batch_id)
    assert still, "the batch ended before the measurement did"
    medians = statistics.median(idle), statistics.median(busy)
    return {
        "idle_ms": round(medians[0], 1),
        "batch_ms": round(medians[1], 1),
        "ratio": round(medians[1] / medians[0], 3),
    }


def full(client: Client, lanes: int) -> bool:
    """Whether batch work has all lanes that it may have, and more of it waits."""
    queues = client.get("/v1/status")["queues"]
    return any(q["class"] == "batch" and q["waiting"] and q["running"] >= lanes * 0.9 for q in queues)


class Memory(threading.Thread):
    """Samples a process's resident memory, MB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.samples: list[float] = []
        self._statm = Path(f"/proc/{pid}/statm")
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            self.samples.append(int(self._statm.read_text().split()[1]) * 4096 / 1e6)

    def stop(self) -> dict[str, float]:
        """The middle of its first and of its last quarter, and the most."""
        self._over.set()
        self.join()
        quarter = max(1, len(self.samples) // 4)
        first, last = self.samples[:quarter], self.samples[-quarter:]
        return {
            "first_mb": round(statistics.median(first), 1),
            "last_mb": round(statistics.median(last), 1),
            "most_mb": round(max(self.samples), 1),
        }


def run(folder: Path, lines: int, rounds: int) -> dict[str, Any]:
    node = Node(folder, 1)
    try:
        wait_until(lambda: bool((node.status() or {"workers": ()})["workers"]), START_S, node)
        client = Client(f"http://127.0.0.1:{node.port}")
        lanes = client.get("/v1/status")["workers"][0]["lanes"]
        finished(client, start_batch(client, [prompt(1, 0)]))  # the runner is there, and knows all it needs
        [runner] = [pid for pid in children(node.process.pid) if b"scripts.batch_runner" in command_of(pid)]
        memory = Memory(runner)
        memory.start()
        report: dict[str, Any] = {"lines": lines, "lanes": lanes, "rates": {}}
        for name, (tokens, delay_ms) in SHAPES.items():
            rates: dict[str, list[float]] = {"bare": [], "batch": []}
            for number in range(rounds):
                prompts = [prompt(tokens, delay_ms, n + number * lines) for n in range(lines)]
                rates["bare"].append(bare_rate(node.url, prompts))
                rates["batch"].append(batch_rate(client, prompts))
            bare, batch = (statistics.median(rates[kind]) for kind in ("bare", "batch"))
            report["rates"][name] = {
                "tokens": tokens,
                "delay_ms": delay_ms,
                "bare_per_s": round(bare, 1),
                "batch_per_s": round(batch, 1),
                "ratio": round(batch / bare, 3),
            }
        report["runner_memory"] = memory.stop()
        report["first_token"] = interactive(client, lanes)
        return report
    finally:
        node.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=3000, help="of a batch (default 3000)")
    parser.add_argument("--rounds", type=int, default=3, help="batches and bare runs of each shape (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--bare", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.bare:
        print(send_bare(args.bare, json.load(sys.stdin)))
        return 0
    console = Console()
    with tempfile.TemporaryDirectory(prefix="sluice-batch-") as folder:
        report = run(Path(folder), args.lines, args.rounds)
    table = Table("requests", "bare/s", "batch/s", "ratio")
    for name, figures in report["rates"].items():
        table.add_row(name, *(str(figures[column]) for column in ("bare_per_s", "batch_per_s", "ratio")))
    console.print(table)
    console.print(f"time to first token: {report['first_token']}")
    console.print(f"runner's memory: {report['runner_memory']}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
