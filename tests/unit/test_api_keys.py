"""Keys at the gate, as a client sees them, over a table in memory: FB-106, scopes, Hosts, a store that is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient

from api.app import create_app
from api.auth import SCOPE_OF
from api.keyring import JUST_NOW, REFRESH, Keyring
from api.limits import duration, reserve
from shared.api_keys import Key, decoded, digest
from shared.jobs import Job
from shared.settings import Settings
from tests.contract.schemas import check_error
from tests.unit.completion_frames import told
from tests.unit.fakes import FakeStore

SECRET = "sk-sluice-" + "a1" * 32
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
OPEN = {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/ready", "/", "/monitor")}


class FakeKeys:
    """What the store has of keys. `away`: it does not answer; `full`: it takes no writes."""

    def __init__(self, **keys: Key) -> None:
        self.table = {digest(secret): key for secret, key in keys.items()}
        self.changes, self.reads, self.away, self.full = 0, 0, False, False
        self.used: list[str] = []

    def version(self) -> bytes | None:
        if self.away:
            raise redis.ConnectionError("gone")
        return str(self.changes).encode() if self.table else None

    def read(self) -> dict[str, Key]:
        self.reads += 1
        return dict(self.table)

    def note_used(self, key_id: str) -> None:
        self.used.append(key_id)
        if self.full:
            raise redis.ResponseError("OOM")

    def put(self, secret: str, key: Key) -> None:
        self.table[digest(secret)] = key
        self.changes += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def kept() -> FakeKeys:
    return FakeKeys(**{SECRET: Key("key-1", tenant="acme")})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_app(store: FakeStore, kept: FakeKeys, clock: Clock) -> Callable[..., Flask]:
    def make(**settings: Any) -> Flask:
        keyring = Keyring(kept, clock=clock)
        return create_app(Settings(**settings), gateway=store, hub=store, keyring=keyring)  # type: ignore[arg-type]

    return make


@pytest.fixture
def locked(make_app: Callable[..., Flask]) -> FlaskClient:
    return make_app().test_client()


def bearer(secret: str = SECRET) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def refused(response: Any, status: int, code: str | None) -> None:
    assert (response.status_code, response.headers["Content-Type"]) == (status, "application/json")
    check_error(response.json)
    assert response.json["error"]["code"] == code
    assert ("WWW-Authenticate" in response.headers) == (status == 401)


WRONG = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": f"Bearer {SECRET}x"},
    {"Authorization": f"Bearer {SECRET[:-1]}"},
    {"Authorization": f"Bearer {SECRET} {SECRET}"},
    {"Authorization": f"Bearer{SECRET}"},
    {"Authorization": SECRET},
    {"Authorization": f"Basic {SECRET}"},
    {"Authorization": f"Bearer {SECRET}".replace("a", "ä")},
    {"Authorization": "Bearer kéy"},
    {"Authorization": f"Bearer\t{SECRET}"},
    {"Authorization": f"Bearer {digest(SECRET)}"},
    {"Authorization": "Bearer wrong", "x-api-key": SECRET},
    {"x-api-key": ""},
    {"x-api-key": "ключ"},
    {"x-api-key": f"Bearer {SECRET}"},
    {"Cookie": f"key={SECRET}"},
]


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_fb106_no_route_answers_without_its_key(locked: FlaskClient, headers: dict[str, str]) -> None:
    """Every route with every method, also those that do not exist: 401 comes before 404 and 405."""
    rules = [rule.rule.replace("<path:model>", "x") for rule in locked.application.url_map.iter_rules()]
    assert len(rules) > 10
    environ = {
        f"HTTP_{name.upper().replace('-', '_')}": value.encode().decode("latin-1") for name, value in headers.items()
    }
    for path in {
        *rules,
        "/nothing",
        "/v1",
        "/metrics",
        "/monitor/x",
        "/v1//models",
        "/health//x",
        "/health/x",
        "/x/../health",
        "/web",
        "/web/base.html",
        "/web/../pages.py",
    }:
        for method in METHODS if not headers else ("GET", "POST"):
            for asked in (path, path.rstrip("/") + "/", f"{path}?api_key={SECRET}&key={SECRET}"):
                response = locked.open(asked, method=method, environ_overrides=environ)
                if (method, path) in OPEN:
                    assert response.status_code == 200
                elif method == "HEAD":
                    assert (response.status_code, response.data) == (401, b"")
                else:
                    refused(response, 401, "invalid_api_key")


RIGHT = [
    {"Authorization": f"Bearer {SECRET}"},
    {"Authorization": f"bearer {SECRET}"},
    {"Authorization": f"BEARER  {SECRET}"},
    {"Authorization": f"Bearer {SECRET} "},
    {"x-api-key": SECRET},
    {"Authorization": "Basic dXNlcjpwYXNz", "x-api-key": SECRET},
]


@pytest.mark.parametrize("headers", RIGHT, ids=str)
def test_fb106_a_key_opens(locked: FlaskClient, store: FakeStore, headers: dict[str, str]) -> None:
    store.script = lambda job: iter(told("a"))
    assert locked.get("/v1/models", headers=headers).status_code == 200
    assert locked.post("/v1/completions/", json={"prompt": "p"}, headers=headers).status_code == 200
    refused(locked.get("/nothing", headers=headers), 404, "not_found")
    refused(locked.get("/v1/completions", headers=headers), 405, "method_not_allowed")


def test_the_playground_and_its_files_are_open_and_no_way_around_the_key(locked: FlaskClient) -> None:
    for path in ("/", "/web/base.css", "/web/playground.js"):
        assert locked.get(path).status_code == locked.head(path).status_code == 200
        refused(locked.post(path), 401, "invalid_api_key")
    for path in ("/web/base.html", "/web/nothing.js", "/web/base.css/x", "/web/%2e%2e/pages.py"):
        refused(locked.get(path), 401, "invalid_api_key")
        refused(locked.get(path, headers=bearer()), 404, "not_found")


def test_fb036_a_preflight_needs_no_key(make_app: Callable[..., Flask]) -> None:
    client = make_app(cors_origins=["https://app.example"]).test_client()
    ask = {"Origin": "https://app.example", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = client.options("/v1/completions", headers={**ask, "Access-Control-Request-Method": "POST"})
    assert answer.status_code == 204
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    refused(client.options("/v1/completions", headers=ask), 401, "invalid_api_key")
    refused(client.post("/v1/completions", json={"prompt": "x"}, headers=ask), 401, "invalid_api_key")


def test_fb037_a_page_can_read_why_its_key_is_wrong(make_app: Callable[..., Flask]) -> None:
    client = make_app(cors_origins=["https://app.example"]).test_client()
    for headers in ({}, bearer("wrong")):
        answer = client.get("/v1/models", headers={"Origin": "https://app.example", **headers})
        refused(answer, 401, "invalid_api_key")
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert "x-ratelimit-reset-tokens" in answer.headers["Access-Control-Expose-Headers"]


def test_with_keys_hosts_and_origins_are_not_looked_at(locked: FlaskClient) -> None:
    for headers in ({"Host": "api.example"}, {"Origin": "https://evil.example"}):
        assert locked.get("/v1/models", headers={**bearer(), **headers}).status_code == 200
        refused(locked.get("/v1/models", headers=headers), 401, "invalid_api_key")


def test_every_blueprint_has_its_scope(locked: FlaskClient) -> None:
    """One that has none needs `admin`, which is safe but rarely meant."""
    assert set(locked.application.blueprints) <= SCOPE_OF.keys()


@pytest.mark.parametrize(
    ("scopes", "may", "may_not"),
    [
        (("completions",), ("completions", "models"), ("chat", "tokenize", "status")),
        (("chat",), ("chat", "models"), ("completions", "tokenize", "status")),
        (("tokenize",), ("tokenize", "models"), ("completions", "chat", "status")),
        (("monitor",), ("status", "models"), ("completions", "chat", "tokenize")),
        (("admin",), ("status", "models", "completions", "chat", "tokenize"), ()),
    ],
)
def test_scopes(
    locked: FlaskClient, kept: FakeKeys, store: FakeStore, scopes: Any, may: tuple[str, ...], may_not: tuple[str, ...]
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "completions": lambda: locked.post("/v1/completions", json={"prompt": "p"}, headers=bearer("s")),
        "chat": lambda: locked.post(
            "/v1/chat/completions", json={"model": "none", "messages": [1]}, headers=bearer("s")
        ),
        "tokenize": lambda: locked.post("/v1/tokenize", json={"model": "none", "prompt": "p"}, headers=bearer("s")),
        "status": lambda: locked.get("/v1/status", headers=bearer("s")),
        "models": lambda: locked.get("/v1/models", headers=bearer("s")),
    }
    store.script = lambda job: iter(told("a"))
    kept.put("s", Key("key-2", scopes=scopes))
    for name in may:
        assert calls[name]().status_code == (404 if name in ("tokenize", "chat") else 200), name
    for name in may_not:
        answer = calls[name]()
        refused(answer, 403, None)
        assert answer.json["error"]["type"] == "permission_error" and "scope" in answer.json["error"]["message"]


def test_the_tenant_class_and_keeping_are_those_of_the_key(
    locked: FlaskClient, kept: FakeKeys, store: FakeStore, clock: Clock
) -> None:
    store.script = lambda job: iter(told("a"))
    kept.put("b", Key("key-2", tenant="other", klass="batch", keep=False))
    ask = {"prompt": "p", "store": True, "service_tier": "priority"}
    locked.post("/v1/completions", json=ask, headers=bearer())
    locked.post("/v1/completions", json=ask, headers=bearer("b"))
    locked.post("/v1/completions", json={**ask, "service_tier": "flex", "store": False}, headers=bearer())
    seen = [(place.tenant, place.klass, place.keep) for place in store.placements]
    assert seen == [("acme", "interactive", True), ("other", "batch", False), ("acme", "batch", False)]


def test_a_revoked_key_stops_within_the_refresh(locked: FlaskClient, kept: FakeKeys, clock: Clock) -> None:
    assert locked.get("/v1/models", headers=bearer()).status_code == 200
    kept.put(SECRET, Key("key-1", revoked=5))
    clock.now += REFRESH + 0.01
    refused(locked.get("/v1/models", headers=bearer()), 401, "invalid_api_key")
    # the list is not empty: the door does not open again
    refused(locked.get("/v1/models"), 401, "invalid_api_key")


def test_a_request_costs_no_round_trip_for_its_key(locked: FlaskClient, kept: FakeKeys, clock: Clock) -> None:
    for _ in range(50):
        assert locked.get("/v1/models", headers=bearer()).status_code == 200
    assert kept.reads == 1
    kept.put("new", Key("key-2"))
    clock.now += JUST_NOW + 0.01
    assert locked.get("/v1/models", headers=bearer("new")).status_code == 200
    for _ in range(50):
        refused(locked.get("/v1/models", headers=bearer("wrong")), 401, "invalid_api_key")
    assert kept.reads == 2


def test_use_is_noted_once_a_minute(locked: FlaskClient, kept: FakeKeys, clock: Clock) -> None:
    kept.full = True  # which is no reason to refuse anybody
    for _ in range(100):
        assert locked.get("/v1/models", headers=bearer()).status_code == 200
        clock.now += 1
    assert kept.used == ["key-1", "key-1"]


def test_a_store_that_is_away_is_503_and_not_401(locked: FlaskClient, kept: FakeKeys, clock: Clock) -> None:
    assert locked.get("/v1/models", headers=bearer()).status_code == 200
    kept.away = True
    clock.now += REFRESH + 0.01
    for headers in ({}, bearer(), bearer("wrong")):
        response = locked.get("/v1/models", headers=headers)
        if headers:
            refused(response, 503, "store_unavailable")
            assert response.headers["x-should-retry"] == "true"
        else:
            assert response.status_code in (401, 503)
    assert locked.get("/health").status_code == 200
    kept.away = False
    clock.now += 1
    assert locked.get("/v1/models", headers=bearer()).status_code == 200


def test_a_store_that_lost_its_keys_does_not_open_the_door(
    locked: FlaskClient, make_app: Callable[..., Flask], kept: FakeKeys, clock: Clock
) -> None:
    assert locked.get("/v1/models", headers=bearer()).status_code == 200
    kept.table.clear()
    clock.now += 10
    refused(locked.get("/v1/models", headers=bearer()), 401, "invalid_api_key")
    refused(locked.get("/v1/models"), 401, "invalid_api_key")
    # a new process has seen no key: it is open on loopback, and closed elsewhere and where that is set
    assert make_app().test_client().get("/v1/models").status_code == 200
    for settings in ({"require_keys": True}, {"host": "0.0.0.0"}):
        refused(make_app(**settings).test_client().get("/v1/models"), 401, "invalid_api_key")
    assert make_app(host="0.0.0.0", insecure=True).test_client().get("/v1/models").status_code == 200


def test_an_entry_that_is_no_key_neither_opens_nor_breaks_anything(locked: FlaskClient, kept: FakeKeys) -> None:
    for raw in (b"", b"{", b"[]", b'{"id": 5}', b"\xff", b'{"id":"x","requests":"many"}'):
        assert decoded(raw).revoked is not None
    kept.table = {"\ufffd": decoded(b"{"), **kept.table}
    assert locked.get("/v1/models", headers=bearer()).status_code == 200
    refused(locked.get("/v1/models", headers=bearer("\x7e")), 401, "invalid_api_key")


def test_keys_come_and_the_door_closes(make_app: Callable[..., Flask], kept: FakeKeys, clock: Clock) -> None:
    kept.table.clear()
    client = make_app().test_client()
    assert client.get("/v1/models").status_code == 200
    refused(client.get("/v1/models", headers={"Host": "evil.example"}), 403, None)
    kept.put("first", Key("key-9"))
    clock.now += REFRESH + 0.01
    refused(client.get("/v1/models"), 401, "invalid_api_key")
    assert client.get("/v1/models", headers=bearer("first")).status_code == 200


def test_a_refused_request_reaches_nothing(locked: FlaskClient, store: FakeStore) -> None:
    locked.post("/v1/completions", json={"prompt": "p"})
    assert not store.calls


def test_durations_are_written_as_openai_writes_them() -> None:
    written = [duration(ms) for ms in (0, 17, 999, 1000, 1500, 60000, 61250, 360000)]
    assert written == ["0ms", "17ms", "999ms", "1s", "1.5s", "1m0s", "1m1.25s", "6m0s"]


def test_what_is_reserved() -> None:
    job = Job("i", "m", ["x" * 40, [1, 2, 3]], seed=1, created=1, n=2, best_of=3, max_tokens=10)
    assert reserve(job) == 11 + 3 + 2 * 3 * 10
    assert reserve(Job("i", "m", ["x"], seed=1, created=1)) == 1 + 256
