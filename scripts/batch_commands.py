"""`sluice batch`: batches on a server, from the command line, and the process that runs them.

`run` uploads a file, waits with a progress bar and fetches the results. With `--direct` nothing is uploaded: the lines
are sent from here (`scripts/direct_batch.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from api.strict_json import parse
from scripts.client import Client
from scripts.up import base_url
from shared.errors import InvalidJson
from shared.settings import given

app = typer.Typer(no_args_is_help=True, help="Many requests from a file, run when nobody else wants the lanes.")

#: Seconds between two looks at a batch.
LOOK = 0.5
OVER = ("completed", "failed", "expired", "cancelled")

Url = Annotated[
    str | None, typer.Option("--url", envvar="SLUICE_URL", help="Server to talk to. Default: the one settings name.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="SLUICE_API_KEY", help="Key, if the server wants one.")]
AsJson = Annotated[bool, typer.Option("--json", help="The server's JSON.")]


class BatchRefused(Exception):
    """The file is no batch, or the batch did not end well; the message says why."""


@app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Requests, one JSON object a line.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: FILE.output.jsonl.")] = None,
    errors: Annotated[Path | None, typer.Option("--errors", help="Default: FILE.errors.jsonl.")] = None,
    window: Annotated[str, typer.Option(help="Longest time: 24h, 90m, 30s.")] = "24h",
    direct: Annotated[
        bool, typer.Option("--direct", help="Send the lines from here, without uploading the file.")
    ] = False,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="With --direct: requests at one time.")] = 32,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Runs the requests of a file and writes the results beside it. Exit status 1 if not all were completed."""
    out = output or file.with_name(file.name + ".output.jsonl")
    err = errors or file.with_name(file.name + ".errors.jsonl")
    server = url or base_url(given())
    endpoint = _endpoint(file)
    if direct:
        from scripts.direct_batch import DirectBatch  # what checks lines is a second of imports

        client = Client(server, api_key, timeout_s=86_400)
        batch = DirectBatch(client, file, endpoint, out, err, parallel)
        for fault in batch.faults[:1]:
            raise BatchRefused(f"{file}: {f'line {fault.line}: ' if fault.line else ''}{fault.message}")
        with _progress() as progress:
            task = progress.add_task(file.name, total=batch.total, completed=batch.known, failed=0)
            batch.run(lambda done, failed: progress.update(task, completed=done, failed=failed))
        ended = batch.summary()
    else:
        ended = _on_the_server(Client(server, api_key), file, endpoint, window, out, err)
    if as_json:
        print(json.dumps(ended, ensure_ascii=False))
    if ended["status"] != "completed" or ended["request_counts"]["failed"]:
        raise typer.Exit(1)


def _on_the_server(client: Client, file: Path, endpoint: str, window: str, out: Path, err: Path) -> dict[str, Any]:
    with _progress() as progress:
        size = file.stat().st_size
        uploading = progress.add_task(f"upload {file.name}", total=size, failed=0, bytes=True)
        with file.open("rb") as source:
            uploaded = client.upload(file.name, source, size, lambda count: progress.advance(uploading, count))
        progress.remove_task(uploading)
        asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        batch: dict[str, Any] = client.post("/v1/batches", asked)
        progress.console.print(f"{batch['id']} (goes on without this command: sluice batch show {batch['id']})")
        batch = _wait(client, batch, progress)
    _fetch(client, batch, out, err)
    return batch


def _wait(client: Client, batch: dict[str, Any], progress: Progress) -> dict[str, Any]:
    task = progress.add_task(batch["status"], total=None, failed=0)
    while True:
        counts = batch["request_counts"]
        progress.update(
            task,
            description=batch["status"],
            total=counts["total"] or None,
            completed=counts["completed"] + counts["failed"],
            failed=counts["failed"],
        )
        if batch["status"] in OVER:
            return batch
        time.sleep(LOOK)
        batch = client.get(f"/v1/batches/{batch['id']}")


def _fetch(client: Client, batch: dict[str, Any], out: Path, err: Path) -> None:
    """Writes the results, and says how it went."""
    console = Console(stderr=True)
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] else ""
        console.print(f"{where}{error['message']} ({error['code']})", markup=False)
    for file_id, path in ((batch["output_file_id"], out), (batch["error_file_id"], err)):
        if file_id is not None:
            with path.open("wb") as target:
                for piece in client.download(f"/v1/files/{file_id}/content"):
                    target.write(piece)
            console.print(f"{path}", markup=False)
    counts = batch["request_counts"]
    console.print(
        f"{batch['status']}: {counts['completed']} of {counts['total']} completed, {counts['failed']} failed",
        highlight=False,
    )


@app.command("list")
def list_command(
    url: Url = None,
    api_key: ApiKey = None,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    as_json: AsJson = False,
) -> None:
    """The newest batches."""
    answer = Client(url or base_url(given()), api_key, timeout_s=30).get(f"/v1/batches?limit={limit}")
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    table = Table(Column("id", no_wrap=True, min_width=38), "status", "model", "total", "completed", "failed")
    for batch in answer["data"]:
        counts = batch["request_counts"]
        table.add_row(
            batch["id"],
            batch["status"],
            batch["model"] or "",
            *(str(counts[name]) for name in ("total", "completed", "failed")),
        )
    Console().print(table)


@app.command("show")
def show_command(batch_id: str, url: Url = None, api_key: ApiKey = None) -> None:
    """A batch as the server has it."""
    _print(Client(url or base_url(given()), api_key, timeout_s=30).get(f"/v1/batches/{batch_id}"))


@app.command("cancel")
def cancel_command(batch_id: str, url: Url = None, api_key: ApiKey = None) -> None:
    """Ends a batch; what was completed is in its output file."""
    _print(Client(url or base_url(given()), api_key, timeout_s=30).post(f"/v1/batches/{batch_id}/cancel", {}))


@app.command("replay")
def replay_command(batch_id: str, url: Url = None, api_key: ApiKey = None) -> None:
    """A new batch of those requests of an ended one that were not completed."""
    _print(Client(url or base_url(given()), api_key, timeout_s=30).post(f"/v1/batches/{batch_id}/replay", {}))


@app.command("fetch")
def fetch_command(
    batch_id: str,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the output goes.")],
    errors: Annotated[Path, typer.Option("--errors", help="Where the errors go.")],
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Waits for a batch and writes its results."""
    client = Client(url or base_url(given()), api_key)
    with _progress() as progress:
        batch = _wait(client, client.get(f"/v1/batches/{batch_id}"), progress)
    _fetch(client, batch, output, errors)


@app.command(
    "runner", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def runner_command(context: typer.Context) -> None:
    """The process that runs batches; `sluice up` has one."""
    os.execv(sys.executable, [sys.executable, "-m", "scripts.batch_runner", *context.args])


def _print(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


def _endpoint(file: Path) -> str:
    """The url of the first request. Raises BatchRefused."""
    with file.open("rb") as source:
        first = next((line for line in source if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:
        url = parse(first.removeprefix(b"\xef\xbb\xbf"), "first line").get("url")
    except InvalidJson as error:
        raise BatchRefused(f"{file}: {error.message}") from None
    if not isinstance(url, str):
        raise BatchRefused(f"{file}: the first line has no url.")
    return url


class _Rate(ProgressColumn):
    """Requests (or kB) a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed / 1000:.0f} kB/s" if task.fields.get("bytes") else f"{speed:.1f}/s")


class _Failed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['failed']} failed", style="red") if task.fields.get("failed") else Text("")


def _progress() -> Progress:
    """On standard error, so that standard output is the results' alone."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Failed(),
        _Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
