"""The `sluice` command.

Each command is a few lines around the module that does the work. What goes wrong in a known way is one line on standard
error and exit status 1 (2 for a wrong command line), never a traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from scripts import batch_commands, key_commands, top
from scripts.batch_commands import BatchRefused
from scripts.carried_model import ModelUnavailable
from scripts.client import Client, ServerError, ServerUnreachable
from scripts.key_commands import KeyRefused
from scripts.up import CannotStart, Options, base_url, parse_workers, up
from shared.settings import WrongSettings, given

BENCHMARKS = ("engine", "serve", "relay", "queue", "batch", "chaos", "coldstart", "exllamav2")


class NotText(Exception):
    """What should be a prompt is none."""


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="OpenAI-compatible completions from a queue.",
)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Url = Annotated[
    str | None, typer.Option("--url", envvar="SLUICE_URL", help="Server to talk to. Default: the one settings name.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="SLUICE_API_KEY", help="Key, if the server wants one.")]
#: Longest wait for a server that is to complete a model's name, s.
COMPLETION_WAIT = 0.5


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the ids that begin so, of the server that the command line names; none if it does not answer at once."""
    given_url, key = (context.params.get(name) for name in ("url", "api_key"))
    try:
        server = Client(given_url or base_url(given()), key, timeout_s=COMPLETION_WAIT)
        return [model for model in server.models() if model.startswith(incomplete)]
    except (ServerUnreachable, ServerError, WrongSettings, OSError, TypeError, KeyError):
        return []


@app.command("up")
def up_command(
    engine: Annotated[list[str] | None, typer.Option(help="llamacpp, exllamav2 or scripted; may be repeated.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="PATH[=ID]", help="Model file or folder of the engine, and its name.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="A=ID", help="Another name of a model; may be repeated.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    api_workers: Annotated[int | None, typer.Option(help="API processes.")] = None,
    workers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MIN:MAX", help="Workers of each engine, by what waits; may be given once for each. [1:1]"
        ),
    ] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Listen beyond loopback without keys.")] = None,
) -> None:
    """Store, API and workers on this machine, until Ctrl-C."""
    ranges = tuple(map(parse_workers, workers or ("1:1",)))
    options = Options(tuple(engine or ("llamacpp",)), tuple(model or ()), tuple(alias or ()), ranges)
    raise typer.Exit(up(options, given(host=host, port=port, api_workers=api_workers, insecure=insecure)))


@app.command("api", context_settings=_PASS_ON)
def api_command(context: typer.Context) -> None:
    """The API alone; the same as python -m api."""
    _become("api", context.args)


@app.command("worker", context_settings=_PASS_ON)
def worker_command(context: typer.Context) -> None:
    """One worker alone; the same as python -m workers."""
    _become("workers", context.args)


@app.command("complete")
def complete_command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, or for -, standard input.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Model id. Default: the server's.", autocompletion=model_names)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 for the likeliest token each time.")] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The server's JSON, one event a line.")] = False,
) -> None:
    """A completion from a running server. Standard output gets its text and nothing else, into a pipe not even a newline."""
    if prompt is None or prompt == "-":
        prompt = _standard_input()
    asked = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    body: dict[str, Any] = {"prompt": prompt, **{k: v for k, v in asked.items() if v is not None}}
    client = Client(url or base_url(given()), api_key)
    answers = client.stream("/v1/completions", body) if stream else iter([client.post("/v1/completions", body)])
    for answer in answers:
        if as_json:
            _write(json.dumps(answer, ensure_ascii=False) + "\n")
        else:
            _write("".join(choice.get("text") or "" for choice in answer.get("choices", ())))
    if not as_json and sys.stdout.isatty():
        _write("\n")


def _standard_input() -> str:
    """Raises NotText."""
    if sys.stdin.isatty():
        print("Reading the prompt from the terminal; end it with Ctrl-D.", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise NotText(f"The prompt on standard input is not UTF-8 (byte {error.start}).") from None


def _write(text: str) -> None:
    """In UTF-8, whatever the terminal's locale: texts hold all of Unicode. If the reader has left (`| head`), this process dies
    of it, as programs do; its connection closes, which cancels the request."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


@app.command("models")
def models_command(
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="The server's JSON.")] = False,
) -> None:
    """The models of a running server."""
    answer = Client(url or base_url(given()), api_key, timeout_s=30).get("/v1/models")
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    rows = answer["data"]
    columns = [
        "id",
        *sorted({k for row in rows for k, v in row.items() if isinstance(v, str | int)} - {"id", "object"}),
    ]
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console().print(table)


@app.command("top")
def top_command(
    url: Url = None,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="As it is now, and no more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The server's JSON, once.")] = False,
) -> None:
    """Queues, workers, latencies and running requests of a running server, live."""
    top.top(Client(url or base_url(given()), api_key, timeout_s=top.PATIENCE_S), once=once, as_json=as_json)


app.add_typer(batch_commands.app, name="batch")
app.add_typer(key_commands.app, name="keys")


@app.command("smoke", context_settings=_PASS_ON)
def smoke_command(context: typer.Context) -> None:
    """A fresh environment from requirements.txt, the whole stack, one completion; --report FILE for the result."""
    from scripts import minimal_server_smoke

    raise typer.Exit(minimal_server_smoke.main(context.args))


@app.command("bench", context_settings=_PASS_ON)
def bench_command(context: typer.Context) -> None:
    """Benchmarks: engine, serve, relay, queue, batch, chaos, coldstart, exllamav2; --json FILE for the numbers."""
    name, *arguments = context.args or [""]
    if name not in BENCHMARKS:
        raise CannotStart(f"Usage: bench NAME [--json FILE], NAME one of: {', '.join(BENCHMARKS)}.")
    try:
        benchmark = importlib.import_module(f"scripts.benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("scripts.benchmarks", f"scripts.benchmarks.{name}"):
            raise
        raise CannotStart(f"The benchmark {name} is not there yet.") from None
    raise typer.Exit(benchmark.main(arguments) or 0)


def _become(module: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main() -> None:
    """Entry point of `sluice` and `python -m scripts.cli`."""
    try:
        app(prog_name="sluice")
    except (
        BatchRefused,
        CannotStart,
        KeyRefused,
        WrongSettings,
        ModelUnavailable,
        NotText,
        ServerUnreachable,
        ServerError,
    ) as error:
        print(f"sluice: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our output left (`| head`); what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
