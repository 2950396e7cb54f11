"""Streams and background jobs while processes die, stop and lose their connections: what is left of the promises.

Run: `scripts/bench chaos --minutes 5 --json chaos.json`. Two API nodes and three workers (scripted engine) on a store of
their own, 60 streams and 20 background jobs at a time. Every few seconds a worker is killed (-9) or stopped for a while,
the store is killed, or connections to it are cut; API processes are killed where the server lets clients come back. At
the end: every accepted request ended once, no text is wrong, and nothing is left behind. Exit status 1 if that is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from scripts import ports
from shared import connection, frames, keys

STREAMS, BACKGROUND, WORKERS = 60, 20, 3
#: Between two blows, s; and how long a stopped worker sleeps, s: shorter and longer than its lease.
PAUSE, ASLEEP = (2.0, 6.0), (1.0, 12.0)
#: Longest wait for the stack's start, for an answer, and for everything to come to rest, s.
START_S, ANSWER_S, REST_S = 120.0, 60.0, 150.0
#: Tokens of a request, and between two of them, ms.
TOKENS, DELAYS = (10, 80), (20, 150)
#: What may be there when nothing runs: workers, API processes, models, RQ's books, and what is kept of ended requests.
KEPT = ("rq:job:", "sluice:log:", "rq:results:")
BOOKS = ("rq:finished:", "rq:failed:", "rq:canceled:", "rq:worker", "rq:queues", "rq:intermediate")
STANDING = (
    "workers",
    "procs",
    "alive:",
    "lease:",
    "stat:",
    "card",
    "tokenizer:",
    "bell:",
    "starter:",
    "sweep",
    "alone:",
)
FIGURES = ("served:", "pace:", "full", "yield:", "limit:", "idem:")
_ROOT = Path(__file__).parents[2]


@dataclass
class Request:
    """One request as its client saw it. `accepted`: it has an id. `how`: whole, wrong, error, refused, cut or silent.

    `ends`: how often it was told that it is over. `pause`: longest time between two pieces, s."""

    kind: str
    id: str = ""
    how: str = "silent"
    code: str = ""
    ends: int = 0
    tokens: int = 0
    pause: float = 0.0
    resumed: int = 0

    @property
    def accepted(self) -> bool:
        return bool(self.id)


@dataclass
class Tally:
    """What all clients saw."""

    requests: list[Request] = field(default_factory=list)
    blows: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, request: Request) -> None:
        with self.lock:
            self.requests.append(request)


class Node:
    """`sluice up` in a session of its own: the first has the store and the workers, the second an API alone."""

    def __init__(self, folder: Path, workers: int, url: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._folder = folder
        self.log = folder / "log.txt"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        settings = {"SLUICE_DATA_DIR": str(folder / "data"), "SLUICE_LOG_TTL_S": "3600", "SLUICE_LOG_LEVEL": "WARNING"}
        env = {**kept, **settings, "PYTHONPATH": str(_ROOT)}
        env.pop("REDIS_URL", None)
        if url is not None:
            env["SLUICE_REDIS_URL"] = url
        command = [sys.executable, "-m", "scripts.cli", "up", "--engine", "scripted", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--workers", f"{workers}:{workers}"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Of the store that this node started."""
        owner = json.loads((self._folder / "data" / "lock").read_text())
        return f"unix://{owner['socket_folder']}/store.sock"

    def status(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            with contextlib.closing(client):
                client.request("GET", "/v1/status")
                answer = client.getresponse()
                if answer.status == 200:
                    return dict(json.loads(answer.read()))
        return None

    def api_processes(self) -> list[int]:
        """Those that answer: children of gunicorn's first process, which is a child of `up`."""
        masters = [pid for pid in children(self.process.pid) if b"-m\0api" in command_of(pid)]
        return [pid for master in masters for pid in children(master)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children die with it
            self.process.wait(10)


def free_port() -> int:
    while not ports.is_free("127.0.0.1", port := random.randint(20_000, 60_000)):
        pass
    return port


def children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # proc(5): behind the command's closing parenthesis come state and parent
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(folder.name))
    return sorted(found)


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@dataclass(frozen=True)
class Able:
    """What the server can do: let clients come back (by its OpenAPI document), and run requests in the background."""

    resume: bool
    background: bool

    @classmethod
    def of(cls, node: Node) -> Able:
        with exchange(node, "GET", "/openapi.json", None) as answer:
            paths = json.loads(answer.read())["paths"]
        body = {"model": "scripted", "prompt": "once", "background": True}
        with exchange(node, "POST", "/v1/completions", body) as answer:
            answer.read()
            return cls(any(path.startswith("/v1/completions/{") for path in paths), answer.status == 202)


class Clients:
    """Sends requests until told to stop; each thread one at a time, from one node or the other."""

    def __init__(self, nodes: Sequence[Node], able: Able, tally: Tally, seed: int) -> None:
        self._nodes, self._able, self._tally, self._seed = nodes, able, tally, seed
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, kind), daemon=True, name=f"{kind} {number}")
            for number, kind in enumerate(["stream"] * STREAMS + ["background"] * BACKGROUND)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for those under way."""
        self._stopping.set()
        until = time.monotonic() + REST_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def stuck(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, number: int, kind: str) -> None:
        dice = random.Random(f"{self._seed} {number}")
        count = 0
        while not self._stopping.is_set():
            count += 1
            request = Request(kind)
            words = [f"{number}.{count}.{place} " for place in range(dice.randint(*TOKENS))]
            prompt = json.dumps({"pieces": words, "delay_ms": dice.randint(*DELAYS)})
            ask = self._stream if kind == "stream" else self._job
            try:
                ask(request, {"model": "scripted", "prompt": prompt}, words, dice)
            except (OSError, http.client.HTTPException, ValueError) as error:
                request.how, request.code = ("cut", type(error).__name__) if request.accepted else ("refused", "")
            self._tally.add(request)
            if request.how == "refused":
                self._stopping.wait(dice.uniform(0.2, 1.0))

    def _stream(self, request: Request, body: dict[str, Any], words: list[str], dice: random.Random) -> None:
        node = dice.choice(self._nodes)
        reader = Reader(request)
        try:
            with exchange(node, "POST", "/v1/completions", {**body, "stream": True}) as answer:
                reader.read(answer)
        except (OSError, http.client.HTTPException):
            if not request.accepted or not self._able.resume:
                raise
        while request.accepted and not request.ends and self._able.resume and request.resumed < 30:
            request.resumed += 1
            node = self._nodes[(self._nodes.index(node) + 1) % len(self._nodes)]
            path = f"/v1/completions/{request.id}?stream=true"
            last = {"Last-Event-ID": reader.last} if reader.last else {}
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                exchange(node, "GET", path, None, last) as answer,
            ):
                reader.read(answer)
            if not request.ends:
                time.sleep(0.5)  # also when it is told to stop: the last blow may have hit both nodes
        if request.accepted and not request.code:
            self._judge(request, reader.text, words, reader.usage)

    def _job(self, request: Request, body: dict[str, Any], words: list[str], dice: random.Random) -> None:
        """In the background where the server has that, else a plain request that its client waits for."""
        node = dice.choice(self._nodes)
        more = {"background": True} if self._able.background else {}
        with exchange(node, "POST", "/v1/completions", {**body, **more}) as answer:
            told = json.loads(answer.read())
            if answer.status not in (200, 202):
                # an accepted one that then failed says so with its id in a header
                request.id = answer.headers.get("x-sluice-id", "")
                request.how = "error" if request.id else "refused"
                request.code, request.ends = told["error"]["code"], int(bool(request.id))
                return
        request.id = told["id"]
        until = time.monotonic() + REST_S
        while told.get("status") in ("queued", "running") and time.monotonic() < until:
            time.sleep(0.3)
            with (
                contextlib.suppress(OSError, http.client.HTTPException, ValueError),
                exchange(dice.choice(self._nodes), "GET", f"/v1/completions/{request.id}", None) as answer,
            ):
                found = json.loads(answer.read())
                told = found if answer.status == 200 else told
        request.ends = int(told.get("status") not in ("queued", "running"))
        if told.get("error"):
            request.how, request.code = "error", told["error"]["code"]
        else:
            self._judge(request, "".join(c["text"] for c in told["choices"]), words, told.get("usage"))

    def _judge(self, request: Request, text: str, words: list[str], usage: dict[str, Any] | None) -> None:
        whole = text == "".join(words) and usage is not None and usage["completion_tokens"] == len(words) + 1
        if request.ends:
            request.how = "whole" if whole else "wrong"
            request.tokens = len(words) + 1
        elif not "".join(words).startswith(text):
            request.how = "wrong"


class Reader:
    """Reads an event stream into a request, over as many responses as it takes."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.text, self.last = "", ""
        self.usage: dict[str, Any] | None = None
        self._heard = 0.0

    def read(self, answer: http.client.HTTPResponse) -> None:
        request = self._request
        if answer.status == 204:  # its last event had come, and the line that says so was cut off
            request.ends += 1
            return
        if answer.status != 200:
            told = json.loads(answer.read())
            if not request.resumed or not request.accepted:
                request.id = answer.headers.get("x-sluice-id", "")
                request.how = "error" if request.id else "refused"
                request.code, request.ends = told["error"]["code"], int(bool(request.id))
            elif answer.status in (404, 410):
                request.how, request.code, request.ends = "error", told["error"]["code"], 1
            return
        request.id = request.id or answer.headers.get("x-sluice-id", "")
        event_id = ""
        for raw in answer:
            if not raw.endswith(b"\n"):  # cut off within a line
                return
            line = raw.decode().rstrip("\r\n")
            if line.startswith("id:"):
                event_id = line[3:].strip()
            elif line == "data: [DONE]":
                request.ends += 1
            elif line.startswith("data:"):
                self._take(json.loads(line[5:]))
                self.last = event_id or self.last

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._request.how, self._request.code = "error", chunk["error"]["code"]
            return
        now = time.monotonic()
        if self._heard:
            self._request.pause = max(self._request.pause, now - self._heard)
        self._heard = now
        self.text += "".join(choice["text"] for choice in chunk["choices"])
        self.usage = chunk.get("usage") or self.usage


@contextlib.contextmanager
def exchange(
    node: Node, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    client = http.client.HTTPConnection("127.0.0.1", node.port, timeout=ANSWER_S)
    with contextlib.closing(client):
        content = None if body is None else json.dumps(body)
        client.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
        with client.getresponse() as answer:
            yield answer


class Adversary(threading.Thread):
    """One blow after the other, until told to stop; then everything that sleeps is woken."""

    def __init__(self, nodes: Sequence[Node], able: Able, tally: Tally, seed: int) -> None:
        super().__init__(name="adversary", daemon=True)
        self._nodes, self._tally = nodes, tally
        self._dice = random.Random(seed)
        self._store: Any = connection.connect(nodes[0].url)
        self._stopping = threading.Event()
        self._asleep: dict[int, float] = {}
        self._blows: list[tuple[Callable[[], bool], int]] = [
            (self.kill_worker, 4),
            (self.stop_worker, 3),
            (self.kill_store, 1),
            (self.cut_connections, 2),
        ]
        if able.resume:
            self._blows.append((self.kill_api, 2))

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)
        self._wake(math.inf)

    def run(self) -> None:
        blows, weights = zip(*self._blows, strict=True)
        while not self._stopping.wait(self._dice.uniform(*PAUSE)):
            self._wake(time.monotonic())
            [blow] = self._dice.choices(blows, weights)
            with contextlib.suppress(redis.RedisError, OSError):
                if blow():
                    self._tally.blows[blow.__name__] += 1

    def _wake(self, now: float) -> None:
        for pid in [pid for pid, until in self._asleep.items() if until <= now]:
            del self._asleep[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _workers(self) -> list[int]:
        names = [name.decode() for name in self._store.smembers(keys.WORKERS)]
        pids = [self._store.hget(keys.stat(name), "pid") for name in names]
        return sorted({int(pid) for pid in pids if pid} - self._asleep.keys())

    def kill_worker(self) -> bool:
        pids = self._workers()
        if pids:
            os.kill(self._dice.choice(pids), signal.SIGKILL)
        return bool(pids)

    def stop_worker(self) -> bool:
        pids = self._workers()
        if len(pids) < 2 or self._asleep:
            return False
        os.kill(pid := self._dice.choice(pids), signal.SIGSTOP)
        self._asleep[pid] = time.monotonic() + self._dice.uniform(*ASLEEP)
        return True

    def kill_store(self) -> bool:
        os.kill(int(self._store.info("server")["process_id"]), signal.SIGKILL)
        return True

    def cut_connections(self) -> bool:
        for kind in self._dice.choice([("pubsub",), ("normal",), ("pubsub", "normal")]):
            self._store.client_kill_filter(_type=kind, skipme=True)
        return True

    def kill_api(self) -> bool:
        pids = self._dice.choice(self._nodes).api_processes()
        if pids:
            os.kill(self._dice.choice(pids), signal.SIGKILL)
        return bool(pids)


def left_behind(store: Any) -> list[str]:
    """Lanes, lists, rings, executions and keys without a TTL that nothing needs any more."""
    standing = tuple(keys.PREFIX + name for name in STANDING + FIGURES)
    found = []
    for raw in store.scan_iter(count=1000):
        key = raw.decode(errors="replace")
        if key.startswith(KEPT):
            if store.ttl(raw) < 0:
                found.append(f"{key} without a TTL")
        elif not key.startswith(BOOKS + standing):
            found.append(key)
    return sorted(found)


def ended_otherwise(store: Any, requests: Sequence[Request]) -> list[str]:
    """Accepted requests whose log has not one end."""
    found = []
    for request in requests:
        entries = store.xrange(keys.log(request.id))
        told = [frame for _, fields in entries for frame in frames.decode_entry(fields[b"f"])]
        ends = sum(isinstance(frame, frames.TERMINAL) for frame in told)
        if ends != 1 or not isinstance(told[-1], frames.TERMINAL):
            found.append(request.id)
    return found


def summary(tally: Tally, stuck: int, doubtful: list[str], left: list[str]) -> dict[str, Any]:
    accepted = [request for request in tally.requests if request.accepted]
    kinds = {}
    for kind in ("stream", "background"):
        mine = [request for request in accepted if request.kind == kind]
        pauses = sorted(request.pause for request in mine if request.pause) or [0.0]
        kinds[kind] = {
            "accepted": len(mine),
            "whole": sum(request.how == "whole" for request in mine),
            "wrong": sum(request.how == "wrong" for request in mine),
            "errors": dict(Counter(request.code for request in mine if request.how == "error")),
            "not_ended_once": sum(request.ends != 1 for request in mine),
            "resumed": sum(request.resumed > 0 for request in mine),
            "tokens": sum(request.tokens for request in mine),
            "pause_p50_s": round(statistics.median(pauses), 2),
            "pause_p99_s": round(pauses[int(len(pauses) * 0.99) - 1], 2),
            "pause_max_s": round(pauses[-1], 2),
        }
    holds = not (stuck or doubtful or left or any(kind["wrong"] or kind["not_ended_once"] for kind in kinds.values()))
    return {
        "holds": bool(holds and accepted),
        "kinds": kinds,
        "refused": dict(Counter(request.code or "unreachable" for request in tally.requests if not request.accepted)),
        "blows": dict(tally.blows),
        "not_ended_once": [vars(request) for request in accepted if request.ends != 1],
        "clients_still_waiting": stuck,
        "logs_without_one_end": doubtful,
        "left_behind": left,
    }


def run(folder: Path, seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole of it; the report."""
    tally = Tally()
    with contextlib.ExitStack() as ending:
        first = Node(folder / "first", WORKERS)
        ending.callback(first.close)
        wait_until(lambda: len((first.status() or {"workers": ()})["workers"]) == WORKERS, START_S, first)
        second = Node(folder / "second", 0, first.url)
        ending.callback(second.close)
        wait_until(lambda: second.status() is not None, START_S, second)
        nodes, able = (first, second), Able.of(first)
        say(f"resume: {able.resume}, background: {able.background}; {seconds:g} s of chaos")
        clients, adversary = Clients(nodes, able, tally, seed), Adversary(nodes, able, tally, seed)
        clients.start()
        adversary.start()
        time.sleep(seconds)
        adversary.stop()
        say("waiting for what is under way")
        clients.stop()
        store: Any = connection.connect(first.url)
        ending.callback(store.close)
        until = time.monotonic() + REST_S / 3
        while (left := left_behind(store)) and time.monotonic() < until:
            time.sleep(0.5)
        accepted = [request for request in tally.requests if request.accepted]
        return summary(tally, clients.stuck(), ended_otherwise(store, accepted), left)


def wait_until(done: Callable[[], bool], seconds: float, node: Node) -> None:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until or node.process.poll() is not None:
            raise SystemExit(f"The stack does not start:\n{node.log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="of chaos (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the blows and the requests (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
        report = run(Path(folder), args.minutes * 60, args.seed, console.print)
    report |= {"minutes": args.minutes, "seed": args.seed}
    table = Table("", *report["kinds"])
    for name in next(iter(report["kinds"].values())):
        table.add_row(name, *(str(kind[name]) for kind in report["kinds"].values()))
    console.print(table)
    for name in ("blows", "refused", "not_ended_once", "clients_still_waiting", "logs_without_one_end", "left_behind"):
        console.print(f"{name}: {report[name]}")
    console.print("all promises hold" if report["holds"] else "[bold]a promise is broken[/bold]")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
