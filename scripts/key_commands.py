"""`sluice keys`: makes, lists and revokes API keys, in the store itself.

Whoever may write to the store may make keys; no server has to run. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import redis
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.store import DataFolder, FolderInUse, StoreRefused, server_binary, server_command, wait_until_answering
from shared.api_keys import DEFAULT_SCOPES, SCOPES, KeyStore, Listed
from shared.connection import connect
from shared.jobs import DEFAULT_TENANT
from shared.settings import Settings, given
from shared.store_rules import without_password

app = typer.Typer(no_args_is_help=True, help="API keys. While there is none, a server is open and listens on loopback.")

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


_LIMITS = {"rpm": "requests/min", "tpm": "tokens/min", "concurrent": "at one time"}


class KeyRefused(Exception):
    """There is no such key or it cannot be made so, or the store is out of reach; the message says what to do."""


@app.command("add")
def add_command(
    tenant: Annotated[str, typer.Option(help="Whose requests are those of this key.")] = DEFAULT_TENANT,
    name: Annotated[str, typer.Option(help="A note for people.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(SCOPES)}; may be repeated. Default: {', '.join(DEFAULT_SCOPES)}."),
    ] = None,
    rpm: Annotated[int | None, typer.Option(help="Requests a minute. Default: no limit.")] = None,
    tpm: Annotated[int | None, typer.Option(help="Tokens a minute, prompt and completion.")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Requests waiting or running at one time.")] = None,
    klass: Annotated[
        str, typer.Option("--class", help="batch: all its requests wait behind interactive ones.")
    ] = "interactive",
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="--no-store: what its requests say is not kept.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Makes a key and shows it, this once."""
    if klass not in ("interactive", "batch"):
        raise KeyRefused(f"--class {klass}: there is interactive, and batch.")
    with _keys() as kept:
        try:
            secret, key = kept.add(
                tenant=tenant,
                name=name,
                scopes=tuple(dict.fromkeys(scope)) if scope else DEFAULT_SCOPES,
                requests=rpm,
                tokens=tpm,
                concurrent=concurrent,
                klass=klass,
                keep=store,
            )
        except ValueError as error:
            raise KeyRefused(str(error)) from None
    if as_json:
        print(json.dumps({"key": secret, **_shown(Listed(key, None))}))
        return
    print(secret)
    typer.echo(f"This is {key.id} of tenant {key.tenant}. It is shown only now.", err=True)


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """All keys, also revoked ones; not the keys themselves."""
    with _keys() as kept:
        rows = [_shown(listed) for listed in kept.listed()]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    table = Table("id", "tenant, name", "scopes", "limits", "last used")
    for row in rows:
        limits = [f"{row[name]} {words}" for name, words in _LIMITS.items() if row[name] is not None]
        limits += [word for word, so in (("batch", row["class"] == "batch"), ("no store", not row["store"])) if so]
        used = "revoked" if row["revoked"] is not None else _date(row["used"])
        who = f"{row['tenant']}\n{escape(row['name'])}".strip()
        table.add_row(f"{row['id']}\n(...{row['hint']})", who, "\n".join(row["scopes"]), "\n".join(limits), used)
    Console().print(table)


@app.command("revoke")
def revoke_command(key_id: Annotated[str, typer.Argument(metavar="ID")], as_json: AsJson = False) -> None:
    """Ends a key. Servers notice within a second; what runs already runs on."""
    with _keys() as kept:
        try:
            key = kept.revoke(key_id)
        except KeyError:
            raise KeyRefused(f"There is no key {key_id}; `sluice keys list` shows the ids.") from None
    print(json.dumps(_shown(Listed(key, None))) if as_json else f"{key.id} is revoked.")


@contextmanager
def _keys() -> Iterator[KeyStore]:
    settings = given()
    try:
        with _store(settings) as url:
            client = connect(url, max_connections=1)
            try:
                yield KeyStore(client)
            except redis.RedisError as error:
                raise KeyRefused(f"The store at {without_password(url)}: {error}") from None
            finally:
                client.close()
    except (FolderInUse, StoreRefused, ValueError) as error:
        raise KeyRefused(str(error)) from None


@contextmanager
def _store(settings: Settings) -> Iterator[str]:
    """The URL of the store: the configured one, that of a running `up`, or else the data folder's own, for the moment."""
    folder = DataFolder(settings.data_dir)
    running = settings.redis_url or folder.running()
    if running is not None:
        yield running
        return
    with folder:
        command = server_command(server_binary(lambda line: None), folder.socket)
        server = subprocess.Popen(
            command, cwd=folder.path, stdout=subprocess.DEVNULL, pass_fds=(folder.lock_fd,), start_new_session=True
        )
        try:
            if not wait_until_answering(folder.url, lambda: server.poll() is None):
                raise StoreRefused(f"The store in {folder.path} does not start.")
            yield folder.url
        finally:
            server.terminate()
            server.wait(30)


def _shown(listed: Listed) -> dict[str, Any]:
    key = msgspec.structs.asdict(listed.key)
    return {
        "id": key["id"],
        "hint": key["hint"],
        "tenant": key["tenant"],
        "name": key["name"],
        "scopes": list(key["scopes"]),
        "rpm": key["requests"],
        "tpm": key["tokens"],
        "concurrent": key["concurrent"],
        "class": key["klass"],
        "store": key["keep"],
        "created": key["created"],
        "used": listed.used,
        "revoked": key["revoked"],
    }


def _date(seconds: int | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
