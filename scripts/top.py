"""`sluice top`: what the monitor page shows, on the terminal, from the same address of the server.

What came from people or models is printed as text: no markup and no control characters of it reach the terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.client import Client, ServerError, ServerUnreachable

ADDRESS = "/monitor/state"
#: Seconds between two looks.
PAUSE = 1.0
#: Longest wait for an answer, s.
PATIENCE_S = 10
LATENCIES = {
    "first_token": "first token",
    "inter_token": "between tokens",
    "queue": "in the queue",
    "duration": "whole",
}


def top(client: Client, *, once: bool, as_json: bool) -> None:
    """Shows the system until Ctrl-C; with `once` or `as_json`, as it is now. Raises ServerUnreachable and ServerError."""
    state = client.get(ADDRESS)
    if as_json:
        print(json.dumps(state, ensure_ascii=False))
        return
    console = Console()
    if once or not sys.stdout.isatty():
        console.print(screen(state, client.url))
        return
    with Live(screen(state, client.url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(PAUSE)
            try:
                shown = screen(client.get(ADDRESS), client.url)
            except ServerUnreachable as error:  # it may come back
                shown = Panel(_text(error), style="red")
            except ServerError as error:
                if error.status in (401, 403):
                    raise
                shown = Panel(_text(error), style="red")
            live.update(shown, refresh=True)


def screen(state: dict[str, Any], url: str) -> RenderableType:
    """A state as `GET /monitor/state` gives it."""
    return Group(
        _head(state, url),
        _table("queues", ("model", "class", "#waiting", "#running"), map(_queue, state["queues"])),
        _table("workers", ("worker", "model", "#busy lanes", "#tokens/s", "state"), map(_worker, state["workers"])),
        _table(
            f"latency, the last {state['latencies_minutes']} minutes",
            ("model", "what", "#p50", "#p95", "#p99", "#measured"),
            (row for latency in state["latencies"] for row in _latency(latency)),
        ),
        _table(
            f"running requests{', and more' if state['running_more'] else ''}",
            ("request", "model", "class", "worker", "#tokens", "#since"),
            map(_running, state["running"]),
        ),
    )


def _head(state: dict[str, Any], url: str) -> Text:
    lanes, free = (sum(worker[field] for worker in state["workers"]) for field in ("lanes", "free"))
    waiting, running = (sum(queue[field] for queue in state["queues"]) for field in ("waiting", "running"))
    speed = sum(worker["tokens_per_second"] for worker in state["workers"])
    totals = state["totals"]
    repairs = totals["gap_repairs"] + totals["put_backs"]
    return Text.assemble(
        ("sluice top", "bold"),
        f"  {url}\n{speed:,.0f} tokens/s · {running} running · {waiting} waiting · {lanes - free}/{lanes} lanes busy · "
        f"{totals['failovers']} failovers · {repairs} repairs · {len(state['nodes'])} API processes\n",
    )


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Table:
    """Columns that begin with # hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    for column in columns:
        table.add_column(column.lstrip("#"), justify="right" if column.startswith("#") else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(value: object) -> Text:
    return Text("".join(character if character.isprintable() else "\ufffd" for character in str(value)))


def _queue(row: dict[str, Any]) -> tuple[object, ...]:
    return row["model"], row["class"], row["waiting"], row["running"]


def _worker(row: dict[str, Any]) -> tuple[object, ...]:
    busy = f"{row['lanes'] - row['free']} of {row['lanes']}"
    return (
        row["name"],
        row["model"],
        busy,
        f"{row['tokens_per_second']:,.0f}",
        "draining" if row["draining"] else "ready",
    )


def _latency(row: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (row["model"], words, *(_seconds(row[name][p]) for p in ("p50", "p95", "p99")), f"{row[name]['count']:,}")
        for name, words in LATENCIES.items()
        if row.get(name, {}).get("count")
    ]


def _running(row: dict[str, Any]) -> tuple[object, ...]:
    return row["id"], row["model"], row["class"], row["worker"], row["tokens"], f"{row['seconds']:.0f} s"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
