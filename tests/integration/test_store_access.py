"""Stores with a lock on the door: TLS with certificates on both sides, users with narrow rights, and no clusters.

Real processes on both sides of a real store. The rights are read from docs/store.md, so that what is written there is
what was tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis

from scripts.store import server_binary
from shared import connection, keys
from shared.api_keys import KeyStore
from shared.settings import Settings
from shared.store_rules import StoreRefused, check_store
from tests import batches
from tests.conftest import ROOT, Store, Worker, script, wait_for
from tests.stack import ANSWER_S, SCRIPTED, Client, free_port

RECIPE = ROOT / "docs" / "store.md"


class Api(Client):
    """`python -m api` as a child of the test, without a supervisor. `key`: sent with every call."""

    def __init__(self, url: str, *, key: str = "", **settings: object) -> None:
        super().__init__(free_port(), key)
        env = {f"SLUICE_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api", "--port", str(self.port)],
            env={**_plain_environment(), **env, "REDIS_URL": url},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stderr
        self.process.stderr.close()


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_") and name != "REDIS_URL"}


@pytest.fixture
def start_api() -> Iterator[Callable[..., Api]]:
    started: list[Api] = []

    def start(url: str, **more: Any) -> Api:
        started.append(Api(url, **more))
        return started[-1]

    yield start
    for api in started:
        api.close()


# -- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.pem`, `other-ca.pem`, and `server` and `client`, each a `.pem` and a `.key` that `ca` signed."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")

    def run(*words: str) -> None:
        subprocess.run([str(openssl), *words], cwd=folder, check=True, capture_output=True, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "other-ca"):
        run("req", "-x509", *curve, "-days", "2", "-subj", f"/CN={ca}", "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        run("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


@contextlib.contextmanager
def over_tls(certificates: Path, serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port that speaks TLS, wants a certificate, and gives each connection to `serve`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(context.wrap_socket(client, server_side=True)) as inside:
            serve(inside)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=talk, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


@pytest.fixture
def tls_port(store: Store, certificates: Path) -> Iterator[int]:
    """A port on which the store speaks TLS: the packaged server cannot do that itself."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(piece)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def serve(client: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX) as behind:
            behind.connect(store.url.removeprefix("unix://"))
            threading.Thread(target=pump, args=(client, behind), daemon=True).start()
            pump(behind, client)

    with over_tls(certificates, serve) as port:
        yield port


def test_everything_works_over_tls_with_certificates_on_both_sides(
    tls_port: int, certificates: Path, start_api: Callable[..., Api]
) -> None:
    files = {
        "redis_ca": certificates / "ca.pem",
        "redis_cert": certificates / "client.pem",
        "redis_key": certificates / "client.key",
    }
    url = f"rediss://localhost:{tls_port}/0"
    known = Settings(redis_url=url, **files).redis_url
    assert known is not None
    worker = Worker(url, "tls-worker", seen_by=known, **files)
    try:
        api = start_api(url, **files)
        wait_for(lambda: api.serves(SCRIPTED), 30)
        with api.stream(script("a", "b", "c", delay_ms=20)) as stream:
            assert (stream.text, stream.done) == ("abc", 1)
    finally:
        worker.stop()


def test_a_store_that_nobody_vouches_for_is_refused(tls_port: int, certificates: Path) -> None:
    own = f"ssl_certfile={certificates}/client.pem&ssl_keyfile={certificates}/client.key"
    check_store(f"rediss://localhost:{tls_port}?ssl_ca_certs={certificates}/ca.pem&{own}")
    for wrong in (
        f"rediss://localhost:{tls_port}?ssl_ca_certs={certificates}/other-ca.pem&{own}",
        f"rediss://localhost:{tls_port}?{own}",
        f"rediss://localhost:{tls_port}?ssl_ca_certs={certificates}/ca.pem",
        f"redis://localhost:{tls_port}",
    ):
        with pytest.raises(StoreRefused, match="cannot be reached"):
            check_store(wrong)


def test_sentinels_and_store_over_tls(tls_port: int, certificates: Path) -> None:
    """The packaged server has no TLS, and so no sentinel that has: this one knows one answer."""
    asked: list[list[bytes]] = []

    def sentinel(client: socket.socket) -> None:
        reader = hiredis.Reader()
        while piece := client.recv(65536):
            reader.feed(piece)
            while (command := reader.gets()) is not False:
                asked.append(command)
                found = hiredis.pack_command((b"127.0.0.1", str(tls_port).encode()))
                client.sendall(found if command[0] == b"SENTINEL" else b"+OK\r\n")

    files = f"ssl_ca_certs={certificates}/ca.pem&ssl_certfile={certificates}/client.pem&ssl_keyfile={certificates}/client.key"
    with over_tls(certificates, sentinel) as port:
        url = f"rediss+sentinel://localhost:1,localhost:{port}/main/0?{files}&sentinel_username=s&sentinel_password=p"
        check_store(url)
        client = connection.connect(url)
        assert client.set("over-tls", "1")
        assert [b"AUTH", b"s", b"p"] in asked and [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", b"main"] in asked
        with pytest.raises(StoreRefused, match="No sentinel tells where the store is"):
            check_store(f"redis+sentinel://localhost:{port}/main")


# -- users


def users() -> dict[str, list[str]]:
    """User -> its rules, as the page says them."""
    found = {}
    for line in re.findall(r"^ACL SETUSER .*?(?<!\\)$", RECIPE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        _, _, name, *rules = line.replace("\\\n", " ").split()
        found[name] = [rule if not rule.startswith(">") else f">{name}-secret" for rule in rules]
    return found


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Store]:
    """A store with the page's users, in which the default user may nothing."""
    guarded = Store(tmp_path)
    for name, rules in users().items():
        assert guarded.client.execute_command("ACL", "SETUSER", name, *rules) == b"OK"
    yield guarded
    guarded.close()


def as_user(guarded: Store, name: str) -> str:
    return f"unix://{name}:{name}-secret@{guarded.url.removeprefix('unix://')}"


def denied(guarded: Store) -> list[dict[str, Any]]:
    """What was refused to whom."""
    entries = guarded.client.acl_log()
    return [{key: entry[key] for key in ("reason", "object", "username", "context")} for entry in entries]


def test_api_and_workers_need_no_more_than_their_users_may(
    guarded: Store, start_api: Callable[..., Api], tmp_path: Path
) -> None:
    assert set(users()) == {"sluice-api", "sluice-worker", "sluice-keys", "sluice-reader"}
    keeper: Any = connection.connect(as_user(guarded, "sluice-keys"))
    secret, key = KeyStore(keeper).add(tenant="acme", requests=100, tokens=100_000, concurrent=3, scopes=("admin",))
    worker = Worker(as_user(guarded, "sluice-worker"), "acl-worker", seen_by=guarded.url)
    try:
        api = start_api(as_user(guarded, "sluice-api"), key=secret, data_dir=tmp_path)
        wait_for(lambda: api.serves(SCRIPTED), 30)
        assert api.complete(script("a", "b")).text == "ab"
        assert api.complete(script("a", "b"), n=2, logprobs=1, echo=True).status == 200
        with api.stream(script("a", "b", "c", delay_ms=20)) as stream:
            assert (stream.text, stream.done) == ("abc", 1)
        with api.open(script("tick ", repeat=0, delay_ms=20), fanout=True) as stream:
            stream.goes_on(3)
            stream.leave()
        wait_for(lambda: api.busy() == 0)
        assert api.complete(script("a", error_after=0)).status >= 400
        for path in ("/v1/models", "/tokenizer_info?model=scripted", "/ready"):
            assert api.call("GET", path).status == 200
        runner = subprocess.Popen(
            [sys.executable, "-m", "api.batches"],
            env={**_plain_environment(), "SLUICE_DATA_DIR": str(tmp_path), "REDIS_URL": as_user(guarded, "sluice-api")},
            cwd=ROOT,
        )
        try:
            batch = batches.ran(api, batches.lines(3) + batches.line("bad", temperature=9))
            assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
            assert api.call("DELETE", f"/v1/files/{batch['output_file_id']}").status == 200
            batch_id = batches.started(api, batches.line("endless", script("x", repeat=0, delay_ms=20)))
            wait_for(lambda: api.busy() == 1, 30)
            assert api.call("POST", f"/v1/batches/{batch_id}/cancel").status == 200
            assert batches.ended(api, batch_id)["status"] == "cancelled"
        finally:
            runner.terminate()
            assert runner.wait(20) == 0
        assert [listed.used is not None for listed in KeyStore(keeper).listed()] == [True]
        KeyStore(keeper).revoke(key.id)
        wait_for(lambda: api.call("GET", "/v1/models").status == 401)
        worker.stop()
        assert denied(guarded) == []
    finally:
        worker.kill()


def test_what_the_users_may_not(guarded: Store) -> None:
    guarded.client.hset(keys.KEYS, "digest", "{}")
    guarded.client.set("foreign", "x")
    guarded.client.xadd(keys.log("cmpl-1"), {"f": "[]"})
    forbidden: dict[str, list[tuple[str, ...]]] = {
        "sluice-api": [
            ("HSET", keys.KEYS, "digest", "{}"),
            ("DEL", keys.KEYS),
            ("GET", "foreign"),
            ("EVAL", f"return redis.call('DEL', '{keys.KEYS}')", "0"),
        ],
        "sluice-worker": [
            ("HGETALL", keys.KEYS),
            ("HSET", keys.KEYS, "digest", "{}"),
            ("GET", "foreign"),
            ("EVAL", f"return redis.call('HGETALL', '{keys.KEYS}')", "0"),
        ],
        "sluice-keys": [("GET", keys.job("x")), ("XRANGE", keys.log("cmpl-1"), "-", "+")],
        "sluice-reader": [
            ("XADD", keys.log("cmpl-1"), "*", "f", "[]"),
            ("HGETALL", keys.job("cmpl-1")),
            ("PUBLISH", keys.out_channel("cmpl-1"), "x"),
            ("SUBSCRIBE", keys.node_channel("p")),
            ("EVAL", "return 1", "0"),
        ],
    }
    everyone: list[tuple[str, ...]] = [
        ("FLUSHALL",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("MONITOR",),
        ("SHUTDOWN",), ("SCRIPT", "FLUSH"), ("FUNCTION", "LIST"), ("CLIENT", "KILL", "TYPE", "normal"),
    ]  # fmt: skip
    for name, commands in forbidden.items():
        client: Any = connection.connect(as_user(guarded, name))
        assert client.ping()
        for command in [*commands, *everyone]:
            with pytest.raises(redis.ResponseError, match=r"(?i)noperm|no permission|can't access"):
                client.execute_command(*command)
        client.close()
    reader: Any = connection.connect(as_user(guarded, "sluice-reader"))
    assert reader.xread({keys.log("cmpl-1"): "0"}, block=10)
    channel = reader.pubsub()
    channel.subscribe(keys.out_channel("cmpl-1"))
    assert wait_for(lambda: channel.get_message(timeout=0.1))["type"] == "subscribe"


def test_whoever_has_no_user_gets_in_nowhere(guarded: Store) -> None:
    guarded.client.execute_command("ACL", "SETUSER", "default", "off")
    with pytest.raises(StoreRefused, match=r"refuses the login|cannot be reached"):
        check_store(guarded.url)


# -- clusters


def test_a_cluster_is_refused_at_boot(tmp_path: Path, start_api: Callable[..., Api]) -> None:
    path = Path("/tmp") / f"sluice-cluster-{tmp_path.name[-20:]}.sock"
    words = [
        "--port",
        str(free_port()),
        "--bind",
        "127.0.0.1",
        "--unixsocket",
        str(path),
        "--cluster-enabled",
        "yes",
        "--save",
        "",
    ]
    server = subprocess.Popen([str(server_binary(print)), *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        url = f"unix://{path}"
        client = connection.connect(url)
        wait_for(lambda: _answers(client), 20)
        with pytest.raises(StoreRefused, match="is a cluster, which Sluice cannot use"):
            check_store(url)
        api = start_api(url)
        assert api.process.wait(ANSWER_S) == 2
        assert api.process.stderr is not None
        said = api.process.stderr.read()
        assert "is a cluster" in said and "Traceback" not in said
    finally:
        server.kill()
        server.wait(10)
        path.unlink(missing_ok=True)


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
