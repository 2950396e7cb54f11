"""`./scripts/quickstart [--once]`: the stack, one completion streamed to the terminal, then the address to go on with.

Starts `up` as a child and is its first client. Other arguments go to `up` (`--engine scripted`, `--model DIR`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from scripts import carried_model, ports
from scripts.client import Client, ServerError, ServerUnreachable
from scripts.up import base_url
from shared.parent import set_death_signal
from shared.settings import Settings, WrongSettings, given

PROMPT = "The capital of France is"
MAX_TOKENS = 64
#: Longest time from the start of `up` to a ready model, s.
START_S = 300.0

HELP = """Usage: ./scripts/quickstart [--once] [arguments of ./scripts/up]

Starts the store, the API and a CPU worker with a small model, streams one completion, and stays up until Ctrl-C.
--once: ends after the completion; the exit status is 0 only if there was one."""


class Failed(Exception):
    """No completion; the message says why."""


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    once = "--once" in arguments
    rest = [argument for argument in arguments if argument != "--once"]
    console = Console(highlight=False)
    # Ends us through `finally`, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        settings = _settings(rest)
        if "--engine" not in " ".join(rest) and "--model" not in " ".join(rest):
            carried_model.ensure(settings.cache_dir)
        with Up([*rest, "--port", str(settings.port)]) as up:
            _show(console, up, Client(base_url(settings), os.environ.get("SLUICE_API_KEY")))
            if once:
                return 0
            console.print("\nIt stays up until Ctrl-C. What it logs from here on:\n")
            up.echo()
            return up.wait()
    except (Failed, WrongSettings, ServerError, ServerUnreachable, carried_model.ModelUnavailable) as error:
        console.print(f"[bold red]No completion:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130


class Up:
    """`sluice up` as a child. A context manager: leaving it stops the stack and waits for its end."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "scripts.cli", "up", *arguments]
        self._lines: deque[str] = deque(maxlen=15)
        self._echo = threading.Event()
        self.ready = threading.Event()

    def __enter__(self) -> Up:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=set_death_signal,
            process_group=0,
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True, name="hear up").start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        self._process.wait()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_line(self) -> str:
        return self._lines[-1] if self._lines else ""

    @property
    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def echo(self) -> None:
        """From here on its log goes to the terminal."""
        self._echo.set()

    def wait(self) -> int:
        return self._process.wait()

    def _listen(self, output: IO[bytes]) -> None:
        for raw in output:
            line = raw.decode("utf-8", errors="replace").rstrip()
            self._lines.append(line)
            if "| ready: " in line:
                self.ready.set()
            if self._echo.is_set():
                print(line, flush=True)


def _settings(arguments: Sequence[str]) -> Settings:
    """The settings `up` will find, with a free port: the asked one, else the usual one unless it is taken."""
    settings = given()
    for option, value in pairwise(arguments):
        if option == "--port":
            return settings.model_copy(update={"port": int(value)})
    if ports.is_free(settings.host, settings.port):
        return settings
    port = ports.any_free(settings.host)
    print(f"Port {settings.port} is in use; taking {port}.", flush=True)
    return settings.model_copy(update={"port": port})


def _show(console: Console, up: Up, client: Client) -> None:
    """Waits for the stack, streams one completion, prints how to ask for more. Raises Failed, ServerError, ServerUnreachable."""
    began = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        _wait_until_ready(up, bar, began)
    models = client.models()
    if not models:
        raise Failed("the server lists no model")
    console.print(f"[green]Ready[/] after {time.monotonic() - began:.0f} s: {client.url} serves {', '.join(models)}")
    body = {"model": models[0], "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    console.print(f"\n[bold]{PROMPT}[/]", end="")
    started, first, text = time.monotonic(), None, ""
    for event in client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}):
        piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
        first = first or (time.monotonic() - started if piece else None)
        text += piece
        console.print(piece, end="", markup=False, soft_wrap=True)
        usage = event.get("usage") or {}
        tokens = usage.get("completion_tokens", 0)
    if not text:
        raise Failed("the completion is empty")
    seconds = time.monotonic() - started
    console.print(f"\n\n[dim]{tokens} tokens in {seconds:.1f} s, the first after {(first or 0) * 1000:.0f} ms[/]")
    _print_curl(console, client.url, body)


def _wait_until_ready(up: Up, bar: Progress, began: float) -> None:
    task = bar.add_task("Starting the store, the API and a worker", total=None)
    while not up.ready.wait(0.2):
        if up.ended:
            raise Failed(f"the server ended before it was ready. Its last words:\n{up.last_lines}")
        waited = time.monotonic() - began
        if waited > START_S:
            raise Failed(f"not ready after {waited:.0f} s. The log's last lines:\n{up.last_lines}")
        loading = _loading(up.last_line)
        if loading is not None:
            bar.update(task, description=f"The model: {loading[0]}", total=100, completed=loading[1])


def _loading(line: str) -> tuple[str, float] | None:
    """What a worker's log says about its model, and per cent done; None for any other line."""
    try:
        said = json.loads(line.partition("| ")[2])
        return (said["what"], float(said["percent"])) if said["event"] == "loading" else None
    except (ValueError, KeyError, TypeError):
        return None


def _print_curl(console: Console, url: str, body: dict[str, object]) -> None:
    data = json.dumps({**body, "stream": True})
    console.print("\nTry it yourself:\n")
    console.print(
        f"curl -N {url}/v1/completions -H 'Content-Type: application/json' -d '{data}'", markup=False, soft_wrap=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
