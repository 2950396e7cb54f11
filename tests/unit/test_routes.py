"""Plain answers and the small routes, as a client sees them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.services import services_of
from shared.errors import EngineOverloaded, WorkerLost
from shared.frames import Delta, End, Error, Finish, Frame, Start, Take
from shared.jobs import Job
from tests.contract.schemas import check_completion, check_error
from tests.unit.completion_frames import told, usage
from tests.unit.fakes import FakeStore


def ask(client: FlaskClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "p", **fields})


def says(*items: Frame | list[Frame] | Exception) -> Callable[[Job], Iterator[Any]]:
    return lambda job: iter(items)


def test_a_plain_answer(client: FlaskClient, store: FakeStore) -> None:
    store.script = says(*told("Hel", "lo"))
    response = ask(client)
    assert response.status_code == 200 and response.headers["Content-Type"] == "application/json"
    check_completion(response.json)
    choice = response.json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("Hello", "stop", 0)
    assert response.json["id"] == response.headers["x-sluice-id"] == store.jobs[0].id
    assert response.json["model"] == "scripted" and response.json["usage"]["total_tokens"] == 6
    assert not store.detached


def test_echo(client: FlaskClient, store: FakeStore) -> None:
    """FB-035"""
    store.script = says(*told(" Paris\n"))
    assert ask(client, prompt=["\n P"], echo=True).json["choices"][0]["text"] == "\n P Paris\n"


def test_unicode_is_sent_as_it_is(client: FlaskClient, store: FakeStore) -> None:
    """FB-003"""
    store.script = says(*told("🌍", "你"))
    response = ask(client)
    assert "🌍你".encode() in response.data and response.json["choices"][0]["text"] == "🌍你"


@pytest.mark.parametrize("error", [EngineOverloaded("full"), WorkerLost("gone")])
def test_failures_have_their_status(client: FlaskClient, store: FakeStore, error: Any) -> None:
    store.script = says(Take("w"), Start(1), Delta(0, [1], "ab"), Error(error.to_object(), error.status, True))
    response = ask(client)
    assert (response.status_code, response.json) == (503, {"error": error.to_object()})
    assert response.headers["x-should-retry"] == "true"


def test_codes_of_other_versions_pass_through(client: FlaskClient, store: FakeStore) -> None:
    error = {"message": "m", "type": "server_error", "param": None, "code": "poison_request"}
    store.script = says(Error(error, 503))
    response = ask(client)
    assert (response.status_code, response.json) == (503, {"error": error})
    assert response.headers["x-should-retry"] == "false"


def test_a_hang_up_lets_go(client: FlaskClient, store: FakeStore) -> None:
    """FB-007: not only streams."""

    def gone(job: Job) -> Iterator[Any]:
        yield from (Take("w"), Start(1), Delta(0, [1], "abc"))
        threading.Timer(0.1, store.open_subscriptions[job.id].hang_up).start()

    store.script = gone
    response = ask(client)
    assert (response.status_code, response.json["error"]["code"]) == (409, "cancelled")
    assert response.headers["x-should-retry"] == "false" and store.detached == [store.jobs[0].id]


def test_fitted_max_tokens_are_told(client: FlaskClient, store: FakeStore) -> None:
    store.script = says(*told("a", prompt_tokens=400))
    for stream in (False, True):
        response = ask(client, max_tokens=5000, fit_max_tokens=True, stream=stream)
        assert response.status_code == 200 and response.headers["x-sluice-max-tokens"] == "600"
        assert "x-sluice-max-tokens" not in ask(client, max_tokens=600, fit_max_tokens=True, stream=stream).headers
        assert "x-sluice-max-tokens" not in ask(client, stream=stream).headers
    assert ask(client, max_tokens=1000).json["error"]["code"] == "context_length_exceeded"


def test_ignored_fields_are_named(client: FlaskClient, store: FakeStore) -> None:
    store.script = says(*told("a"))
    assert ask(client, foo=1, bar=None, verbosity="low").headers["x-sluice-ignored"] == "foo, verbosity"
    many = {"prompt": "p"} | {f"f{i}": 1 for i in range(12)} | {"bad name": 1, "x" * 65: 1, "é": 1, "a\r\nb": 1}
    response = client.post("/v1/completions", data=json.dumps(many), content_type="application/json")
    assert response.headers["x-sluice-ignored"] == ", ".join([f"f{i}" for i in range(10)] + ["+6"])
    assert "x-sluice-ignored" not in ask(client).headers


def test_strict_fields(make_client: Callable[..., FlaskClient], store: FakeStore) -> None:
    response = ask(make_client(strict_fields=True), foo=1)
    assert response.status_code == 400 and response.json["error"]["param"] == "foo" and not store.jobs


def test_nothing_refused_is_queued(client: FlaskClient, store: FakeStore) -> None:
    """FB-014, FB-039"""
    for body in (
        b'{"prompt":"x","temperature":NaN}',
        b"[]",
        b'{"prompt":{}}',
        b'{"prompt":"x","stop":{}}',
        b'{"model":5}',
    ):
        response = client.post("/v1/completions", data=body, content_type="application/json")
        assert response.status_code == 400
        check_error(response.json)
    assert not store.jobs and not store.open_subscriptions


def test_models(client: FlaskClient) -> None:
    listing = client.get("/v1/models").json
    assert listing["object"] == "list" and [model["id"] for model in listing["data"]] == ["scripted", "org/model"]
    assert {"object", "created", "owned_by"} <= listing["data"][0].keys()
    for path in ("/v1/models/org/model", "/v1/models/org%2Fmodel", "/v1/models/org/model/?x=1"):
        assert client.get(path).json["id"] == "org/model"
    assert client.get("/v1/models/alias").json["id"] == "scripted"
    missing = client.get("/v1/models/nope")
    assert (missing.status_code, missing.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("model", ["no-such-model", ""])
def test_unknown_models(client: FlaskClient, model: str) -> None:
    response = ask(client, model=model)
    assert (response.status_code, response.json["error"]["code"]) == (404, "model_not_found")
    assert response.json["error"]["param"] == "model"


def test_health_readiness_status(client: FlaskClient, store: FakeStore) -> None:
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    assert sorted(client.get("/v1/status").json) == ["models", "nodes", "queues", "workers"]
    store.alive = False
    ready = client.get("/ready")
    assert (ready.status_code, ready.json["error"]["code"]) == (503, "store_unavailable")
    assert client.get("/health").status_code == 200


def test_draining(client: FlaskClient, store: FakeStore) -> None:
    services_of(client.application).lifecycle.drain()
    for response in (client.get("/ready"), ask(client)):
        assert (response.status_code, response.json["error"]["code"]) == (503, "worker_shutdown")
        assert response.headers["x-should-retry"] == "true"
    assert client.get("/health").status_code == 200 and not store.jobs


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_at_the_end_of_a_drain_gets_an_error_and_runs_on(
    client: FlaskClient, store: FakeStore, stream: bool
) -> None:
    lifecycle = services_of(client.application).lifecycle
    store.script = says(Take("w"), Start(1), Delta(0, [1], "abc"))
    threading.Timer(0.3, lifecycle.give_up).start()
    response = ask(client, stream=stream)
    assert b"worker_shutdown" in response.data and store.detached == []
    response.close()
    assert lifecycle.wait_idle(1) and not lifecycle.give_up()


def test_usage_is_the_same_streamed_and_not(client: FlaskClient, store: FakeStore) -> None:
    """FB-030"""
    frames: list[Frame] = [Take("w"), Start(2), Delta(0, [1, 2, 3], "🌍"), Finish(0, "length"), End(usage(2, 10))]
    store.script = says(*frames)
    plain = ask(client).json["usage"]
    raw = ask(client, stream=True, stream_options={"include_usage": True}).data
    assert plain["completion_tokens"] == 10 and b'"completion_tokens":10,"total_tokens":12' in raw
