"""API keys on the whole product: made and revoked while it runs, counted by two API processes together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import keys
from shared.scripts import Scripts
from tests import batches
from tests.conftest import Store, script, wait_for
from tests.contract.schemas import check_error
from tests.stack import SCRIPTED, Answer, Client, Stack, endless, run_keys, said


def refused(answer: Answer, status: int, code: str | None) -> None:
    assert answer.status == status, answer
    check_error(answer.json)
    assert answer.error["code"] == code


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two API processes; `key` is one that may everything."""
    with Stack(tmp_path_factory.mktemp("locked"), (SCRIPTED,), api_workers=2) as locked:
        locked.key = run_keys(locked.env, "add", "--scope", "admin", "--name", "root")["key"]
        wait_for(lambda: all(Client(locked.port).call("GET", "/v1/models").status == 401 for _ in range(20)))
        yield locked


@pytest.fixture
def with_key(locked: Stack) -> Callable[..., Client]:
    def make(*words: str) -> Client:
        return Client(locked.port, run_keys(locked.env, "add", *words)["key"])

    return make


def test_keys_come_and_go_while_the_server_runs(locked: Stack) -> None:
    made = run_keys(locked.env, "add", "--tenant", "acme", "--rpm", "60", "--name", "shop")
    client = Client(locked.port, made["key"])
    assert made["key"].startswith("sk-sluice-") and len(made["key"]) == len("sk-sluice-") + 64
    wait_for(lambda: client.call("GET", "/v1/models").status == 200, 1)
    with client.open(endless(delay_ms=50)) as stream:
        stream.goes_on(2)
        run_keys(locked.env, "revoke", made["id"])
        revoked = time.monotonic()
        # two processes answer: until each has heard of it
        wait_for(lambda: all(client.call("GET", "/v1/models").status == 401 for _ in range(20)), 5)
        assert time.monotonic() - revoked < 2
        refused(client.call("GET", "/v1/models"), 401, "invalid_api_key")
        stream.goes_on(3)  # what runs already runs on
    [row] = [row for row in run_keys(locked.env, "list") if row["id"] == made["id"]]
    assert (row["tenant"], row["name"], row["rpm"], row["hint"]) == ("acme", "shop", 60, made["key"][-4:])
    assert row["revoked"] and row["used"] and "key" not in row


def test_the_store_knows_no_key(locked: Stack) -> None:
    with locked.store() as store:
        kept = b"".join(b"%b %b" % pair for pair in store.hgetall(keys.KEYS).items())  # type: ignore[misc]
    assert locked.key.encode() not in kept and locked.key[:-4].encode() not in kept


def test_the_tenant_goes_into_the_queue(locked: Stack, with_key: Callable[..., Client]) -> None:
    client = with_key("--tenant", "wool.co", "--class", "batch")
    with client.open(endless(delay_ms=20)) as stream, locked.store() as store:
        stream.goes_on(1)
        tenant, klass, origin = store.hmget(keys.job(stream.id), "tenant", "class", "origin")
        assert (tenant, klass, origin) == (b"wool.co", b"batch", b"scripted:batch:wool.co")


def test_requests_of_a_minute_are_counted_over_all_processes(with_key: Callable[..., Client]) -> None:
    client = with_key("--rpm", "4")
    answers = [client.complete(script("a")) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["3", "2", "1", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"4"}
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    limited = client.complete(script("a"))
    refused(limited, 429, "rate_limit_exceeded")
    assert limited.error["type"] == "rate_limit_error" and limited.headers["x-should-retry"] == "true"
    assert 1 <= int(limited.headers["retry-after"]) <= 15
    assert int(limited.headers["retry-after-ms"]) <= 15_000
    assert limited.headers["x-ratelimit-remaining-requests"] == "0"
    assert 45 < seconds(limited.headers["x-ratelimit-reset-requests"]) <= 60
    with client.stream(script("a")) as stream:
        assert stream.answer is not None and stream.answer.status == 429
    # what does not queue anything is not counted
    assert client.call("GET", "/v1/models").status == 200


def test_chats_and_raw_completions_share_a_keys_minute(with_key: Callable[..., Client]) -> None:
    client = with_key("--rpm", "3")
    answers = [client.complete(prompt) for prompt in (said(script("a")), script("a"), said(script("a")))]
    assert [answer.status for answer in answers] == [200] * 3
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
    refused(client.complete(said(script("a"))), 429, "rate_limit_exceeded")
    talker, writer = with_key("--scope", "chat"), with_key("--scope", "completions")
    chat, raw = talker.complete(said(script("a"))), writer.complete(script("a"))
    assert (chat.status, raw.status) == (200, 200)
    assert talker.job(chat.json["id"]).status == writer.job(raw.json["id"]).status == 200
    for answer in (
        talker.complete(script("a")),
        writer.complete(said(script("a"))),
        talker.job(raw.json["id"]),
        writer.job(chat.json["id"]),
        writer.cancel(chat.json["id"]),
    ):
        assert (answer.status, answer.error["type"]) == (403, "permission_error")
    assert with_key("--scope", "chat", "--tenant", "other").job(chat.json["id"]).status == 404


def test_tokens_are_reserved_and_what_was_not_used_comes_back(with_key: Callable[..., Client]) -> None:
    client = with_key("--tpm", "1000")
    first = client.complete(script("a", "b"), max_tokens=900)
    assert first.status == 200 and int(first.headers["x-ratelimit-remaining-tokens"]) < 100
    # the answer goes out before the account is settled
    left = wait_for(lambda: _left(client), 5)
    assert left > 1000 - 2 * first.usage["total_tokens"] - 10
    with client.open(endless(delay_ms=20), max_tokens=900) as stream:
        stream.goes_on(2)
        refused(client.complete(script("a"), max_tokens=900), 429, "rate_limit_exceeded")
    assert wait_for(lambda: client.complete(script("a"), max_tokens=400).status == 200, 5)


def _left(client: Client) -> int:
    """Tokens left before a small request, once a big reservation is back; else 0."""
    answer = client.complete(script("a"), max_tokens=1)
    return int(answer.headers["x-ratelimit-remaining-tokens"]) if answer.status == 200 else 0


def test_what_runs_without_its_client_is_counted_too(with_key: Callable[..., Client]) -> None:
    """In the background nobody waits for the end, who could tell what was used: it is taken all the same, and the rest of
    the reservation comes back."""
    client = with_key("--tpm", "3000", "--concurrent", "1")
    spent = 0
    for delay_ms in (0, 4):
        asked = client.complete(script(*["a"] * 100, delay_ms=delay_ms), max_tokens=1500, background=True)
        assert asked.status == 202, asked
        ended = wait_for(lambda made=asked: _ended(client, made.json["id"]), 20)
        spent += ended["usage"]["total_tokens"]
    left = wait_for(lambda: _left(client), 5)
    assert 3000 - 2 * spent < left < 3000 - spent / 2, (spent, left)


def _ended(client: Client, job_id: str) -> dict[str, Any] | None:
    job: dict[str, Any] = client.job(job_id).json
    return job if job["status"] == "completed" else None


def test_running_requests_are_counted(with_key: Callable[..., Client]) -> None:
    client = with_key("--concurrent", "2")
    with client.open(endless(delay_ms=20)) as one, client.open(endless(delay_ms=20)) as two:
        one.goes_on(1)
        two.goes_on(1)
        refused(client.complete(script("a")), 429, "rate_limit_exceeded")
        one.leave()
        assert wait_for(lambda: client.complete(script("a")).status == 200, 5)


def test_a_process_that_dies_leaks_no_running_request(store: Store) -> None:
    """Nobody has settled them; the jobs themselves say that they are over, or were never there."""
    scripts = Scripts(store.client)

    def admit(job_id: str) -> str:
        verdict: bytes = scripts.call("admit", "key-x", job_id, "", "", "2", "0")[0]
        return verdict.decode()

    assert [admit("cmpl-1"), admit("cmpl-2"), admit("cmpl-3")] == ["ok", "ok", "concurrent"]
    store.client.hset(keys.job("cmpl-1"), mapping={"status": "started"})
    store.client.hset(keys.job("cmpl-2"), mapping={"status": "failed", "terminal": "reaper"})
    assert [admit("cmpl-3"), admit("cmpl-4")] == ["ok", "concurrent"]
    # admitted long ago and never submitted
    store.client.zadd("sluice:running:key-x", {"cmpl-3": 1})
    assert [admit("cmpl-4"), admit("cmpl-5")] == ["ok", "concurrent"]


def test_buckets_fill_evenly_and_carry_debts(store: Store) -> None:
    scripts = Scripts(store.client)

    def admit(tokens: int) -> tuple[str, int, int, int]:
        answer = scripts.call("admit", "key-y", "cmpl-bucket", "600", "6000", "", tokens)
        return answer[0].decode(), int(answer[1]), int(answer[3]), int(answer[5])

    assert admit(1000) == ("ok", 0, 599, 5000)
    scripts.call("settle", "key-y", "cmpl-bucket", "6000", 1000, 400)
    verdict, _, requests, tokens = admit(100_000)  # more than a minute's: waits for the whole bucket
    assert (verdict, requests) == ("tokens", 599 if requests < 600 else 600) and 5600 <= tokens <= 5700
    scripts.call("settle", "key-y", "cmpl-bucket", "6000", 0, 9000)
    verdict, wait, _, tokens = admit(100)
    assert (verdict, tokens) == ("tokens", 0) and 30_000 < wait < 36_000
    # twenty seconds pass: a third of each bucket
    at = int(store.client.hget("sluice:limit:key-y", "at"))
    store.client.hset("sluice:limit:key-y", mapping={"at": at - 40_000})
    assert admit(100)[0] == "ok"
    assert 0 < store.client.pttl("sluice:limit:key-y") < 200_000


def test_a_request_that_runs_on_without_its_client_keeps_what_it_has_until_its_end(store: Store) -> None:
    scripts = Scripts(store.client)
    scripts.call("admit", "key-z", "cmpl-z", "", "1000", "1", 900)
    store.client.hset(keys.job("cmpl-z"), mapping={"status": "started"})
    assert scripts.call("settle", "key-z", "cmpl-z", "1000", 900, 0) == 0
    assert scripts.call("admit", "key-z", "cmpl-y", "", "1000", "1", 10)[0] == b"concurrent"
    scripts.end("cmpl-z", "w", b'{"k":"end","usage":{"prompt_tokens":30,"completion_tokens":270}}', "finished")
    answer = scripts.call("admit", "key-z", "cmpl-y", "", "1000", "1", 10)
    assert answer[0] == b"ok" and 690 <= int(answer[5]) < 750, "300 were used"


def test_a_key_without_limits_is_not_counted(with_key: Callable[..., Client], locked: Stack) -> None:
    client = with_key()
    answer = client.complete(script("a"))
    assert answer.status == 200 and not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_forwarding_headers_are_not_believed(locked: Stack) -> None:
    for headers in (
        {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil.example", "X-Forwarded-Prefix": "/evil"},
        {"X-Forwarded-Ssl": "on", "X-Forwarded-Protocol": "ssl", "Forwarded": "proto=https;host=evil.example"},
    ):
        page = locked.call("GET", "/docs", headers=headers)
        assert page.status == 200 and f"http://127.0.0.1:{locked.port}".encode() in page.raw
        assert b"https://127.0.0.1" not in page.raw and b"evil" not in page.raw
    stranger = Client(locked.port)
    for headers in ({"SCRIPT_NAME": "/v1"}, {"PATH_INFO": "/health"}, {"X-Forwarded-For": "127.0.0.1"}):
        refused(stranger.call("GET", "/v1/models", headers=headers), 401, "invalid_api_key")


def test_a_proxy_that_is_named_may_say_that_it_spoke_tls(tmp_path: Path) -> None:
    with Stack(tmp_path, (SCRIPTED,), trusted_proxies='["127.0.0.1/32"]') as stack:
        page = stack.call("GET", "/docs", headers={"X-Forwarded-Proto": "https"})
        assert f"https://127.0.0.1:{stack.port}".encode() in page.raw
        # the path is nobody's to say
        assert stack.call("GET", "/v1/nothing", headers={"PATH_INFO": "/health", "SCRIPT_NAME": "/v1"}).status == 404


def test_beyond_loopback_only_with_a_key(tmp_path: Path) -> None:
    """First a key, made with no server running; then the address."""
    environment = {"SLUICE_DATA_DIR": str(tmp_path / "data")}
    key = run_keys(environment, "add", "--scope", "admin")
    with Stack(tmp_path, (SCRIPTED,), options=("--host", "0.0.0.0"), key=key["key"]) as served:
        assert served.complete(script("a")).text == "a"
        refused(Client(served.port).call("GET", "/v1/models"), 401, "invalid_api_key")


def seconds(duration: str) -> float:
    """`1m2.5s` and `300ms` as seconds."""
    if duration.endswith("ms"):
        return float(duration[:-2]) / 1000
    minutes, _, rest = duration.rpartition("m")
    return float(minutes or 0) * 60 + float(rest.rstrip("s"))


def test_fb106_over_the_wire(locked: Stack) -> None:
    """The same as the unit tests say, through the real server: odd headers, HEAD, and what is no path of ours."""

    def status(head: str, *headers: bytes) -> int:
        lines = [f"{head} HTTP/1.1".encode(), b"Host: elsewhere.example", b"Connection: close", *headers, b"", b""]
        with socket.create_connection(("127.0.0.1", locked.port), timeout=20) as client:
            client.sendall(b"\r\n".join(lines))
            return int(client.makefile("rb").read().split(b" ", 2)[1])

    key = locked.key.encode()
    for head in ("GET /v1/models", "HEAD /v1/models/", "GET /metrics", "DELETE /x", "GET /docs", "OPTIONS /v1/models"):
        for right in (b"Authorization: Bearer " + key, b"authorization:  bEARER  " + key, b"X-API-Key: " + key):
            assert status(head, right) not in (401, 400), (head, right)
        wrong = [
            (), (b"Authorization: Bearer ",), (b"Authorization: Bearer",), (b"Authorization: " + key,), (b"x-api-key:",),
            (b"Authorization: Bearer " + key + "ü".encode(),), (b"Authorization: Bearer " + key[:-1] + b"\xff",),
            (b"Authorization: Bearer " + key, b"Authorization: Bearer " + key), (b"x_api_key: " + key,),
        ]  # fmt: skip
        for headers in wrong:
            assert status(f"{head}?key={locked.key}", *headers) in (401, 400), (head, headers)
            assert status(head, *headers) in (401, 400), (head, headers)
    for open_path in ("GET /health", "HEAD /ready/", "GET /health?x"):
        assert status(open_path) == 200


def test_fb120_files_and_batches_are_their_tenants(locked: Stack, with_key: Callable[..., Client]) -> None:
    """Another tenant finds nothing, whatever it tries; what an administrator cancels stays its owner's."""
    owner, colleague, other = with_key("--tenant", "a"), with_key("--tenant", "a"), with_key("--tenant", "b")
    raw = batches.line("short") + batches.line("endless", endless(delay_ms=20))
    file_id = batches.uploaded(owner, raw)
    batch_id = batches.create(owner, file_id).json["id"]
    wait_for(lambda: batches.look(owner, batch_id)["request_counts"]["completed"] == 1, 60)
    output = batches.look(colleague, batch_id)["partial_output_file_id"]
    for method, path in (
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
        ("POST", f"/v1/batches/{batch_id}/replay"),
        *(("GET", f"/v1/files/{name}{what}") for name in (file_id, output) for what in ("", "/content")),
        *(("DELETE", f"/v1/files/{name}") for name in (file_id, output)),
    ):
        refused(other.call(method, path, {} if method == "POST" else None), 404, "not_found")
    refused(batches.create(other, file_id), 404, "not_found")
    assert other.call("GET", "/v1/batches").json["data"] == other.call("GET", "/v1/files").json["data"] == []
    assert batches.look(owner, batch_id)["status"] == "in_progress"
    assert locked.call("POST", f"/v1/batches/{batch_id}/cancel").json["status"] == "cancelling", "the administrator"
    batch = batches.ended(owner, batch_id)
    assert batch["status"] == "cancelled" and batch["output_file_id"] == output
    assert batches.texts(batches.rows(owner, output)) == {"short": "short"}
    assert batches.codes(batches.rows(colleague, batch["error_file_id"])) == {"endless": "batch_cancelled"}
    refused(other.call("GET", f"/v1/files/{output}"), 404, "not_found")
    assert batch_id in [b["id"] for b in locked.call("GET", "/v1/batches").json["data"]]


def test_scopes_of_files_and_batches(with_key: Callable[..., Client]) -> None:
    """A batch may do no more than its key."""
    without = with_key("--scope", "completions")
    refused(batches.upload(without, b"x"), 403, None)
    refused(without.call("GET", "/v1/batches"), 403, None)
    alone = with_key("--scope", "batches")
    refused(batches.create(alone, batches.uploaded(alone, batches.lines(1))), 403, None)
    both = with_key("--scope", "batches", "--scope", "completions")
    assert batches.ran(both, batches.lines(1))["status"] == "completed"
