"""Everything that is refused before a route sees it, and the headers that every response has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.errors import error_response
from shared import errors
from tests.contract.schemas import check_error
from tests.unit.completion_frames import told
from tests.unit.fakes import FakeStore

JSON = "application/json"


def refused(response: Any, status: int, code: str | None) -> None:
    assert (response.status_code, response.headers["Content-Type"]) == (status, JSON)
    check_error(response.json)
    assert response.json["error"]["code"] == code


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/nope", "/v1", "/web", "/v1/completions/x/y/z", "/v1//models", "/%00", "/v1/é"]
)
def test_unknown_paths(client: FlaskClient, path: str) -> None:
    refused(client.get(path), 404, "not_found")
    refused(client.post(path, json={}), 404, "not_found")


def test_methods(client: FlaskClient) -> None:
    for method, path, allow in (
        ("GET", "/v1/completions", "OPTIONS, POST"), ("HEAD", "/v1/completions", "OPTIONS, POST"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"), ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("BREW", "/v1/status", "GET, HEAD, OPTIONS"),
    ):  # fmt: skip
        response = client.open(path, method=method)
        assert (response.status_code, response.headers["Allow"]) == (405, allow)
        if method != "HEAD":
            refused(response, 405, "method_not_allowed")


def test_options(client: FlaskClient) -> None:
    response = client.options("/v1/completions/")
    assert (response.status_code, response.data, response.headers["Allow"]) == (204, b"", "OPTIONS, POST")
    assert "Content-Type" not in response.headers
    assert not [name for name, _ in response.headers if name.lower().startswith("access-control")]
    refused(client.options("/nope"), 404, "not_found")


def test_head_is_get_without_a_body(client: FlaskClient) -> None:
    get, head = client.get("/v1/models"), client.head("/v1/models")
    assert (head.status_code, head.data, head.headers["Content-Length"]) == (200, b"", get.headers["Content-Length"])


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models?limit=5", "/v1/models/?x", "/health/", "/v1/status/"])
def test_trailing_slash_and_query_do_not_matter(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code == 200
    refused(client.post("/v1/completions/?api-version=1", json={"model": "nope"}), 404, "model_not_found")


@pytest.mark.parametrize(
    "kind",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/jsonx", "text/json", "application/json; charset=latin-1", "application/vnd.api+json", "json"],
)  # fmt: skip
def test_media_types_refused(client: FlaskClient, kind: str | None) -> None:
    refused(client.post("/v1/completions", data=b'{"prompt":"x"}', content_type=kind), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", [JSON, "Application/JSON", "application/json;charset=UTF-8", 'application/json; charset="utf-8"; x=y']
)
def test_media_types_taken(client: FlaskClient, store: FakeStore, kind: str) -> None:
    store.script = lambda job: iter(told("a"))
    assert client.post("/v1/completions", data=b'{"prompt":"x"}', content_type=kind).status_code == 200


@pytest.mark.parametrize(
    "body", [b"{:", b"", b"[]", b"5", b'"x"', b"null", b"true", b'{"a":1', b'{"a":1}x', b'{"a":1,"a":1}']
)
def test_bodies_that_are_not_one_object(client: FlaskClient, body: bytes) -> None:
    """FB-039"""
    refused(client.post("/v1/completions", data=body, content_type=JSON), 400, "invalid_json")


def test_deep_nesting(client: FlaskClient) -> None:
    body = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"
    refused(client.post("/v1/completions", data=body, content_type=JSON), 400, "invalid_json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_name_their_field(client: FlaskClient, number: str) -> None:
    """FB-014"""
    body = f'{{"prompt":"x","temperature":{number}}}'
    response = client.post("/v1/completions", data=body, content_type=JSON)
    refused(response, 400, "invalid_json")
    assert response.json["error"]["param"] == "temperature"


def test_the_body_limit(make_client: Callable[..., FlaskClient], store: FakeStore) -> None:
    client = make_client(max_body_bytes=2000)
    store.script = lambda job: iter(told("a"))
    fits = b'{"prompt":"' + b"x" * (2000 - 13) + b'"}'
    assert client.post("/v1/completions", data=fits, content_type=JSON).status_code == 200
    refused(client.post("/v1/completions", data=fits + b" ", content_type=JSON), 413, "body_too_large")


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "٣", "9" * 30])
def test_odd_lengths(client: FlaskClient, length: str) -> None:
    environ = {"CONTENT_LENGTH": length.encode().decode("latin-1")}
    response = client.post("/v1/completions", content_type=JSON, environ_overrides=environ)
    refused(response, 400, "invalid_json")


def test_request_ids(client: FlaskClient) -> None:
    def sent_back(**headers: str) -> str:
        response = client.get("/nope", headers={name.replace("_", "-"): value for name, value in headers.items()})
        assert float(response.headers["openai-processing-ms"]) >= 0
        return response.headers["x-request-id"]

    assert sent_back(X_Request_Id="abc 1~") == "abc 1~"
    assert sent_back(X_Client_Request_Id="xyz") == "xyz"
    assert sent_back(X_Request_Id="a" * 129, X_Client_Request_Id="b") == "b"
    assert sent_back(X_Request_Id="é") != "é" and sent_back() != sent_back()


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "api.example:80"]
)
def test_known_hosts(make_client: Callable[..., FlaskClient], host: str) -> None:
    assert make_client(allowed_hosts=["API.example"]).get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil", "127.0.0.2", "localhost:x", "a@localhost", "::1", ""],
)
def test_unknown_hosts(client: FlaskClient, host: str) -> None:
    response = client.get("/v1/models", environ_overrides={"HTTP_HOST": host})
    refused(response, 403, None)
    assert client.get("/health", environ_overrides={"HTTP_HOST": host}).status_code == 200


def test_origins(client: FlaskClient) -> None:
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:5"):
        assert client.get("/v1/models", headers={"Origin": origin}).status_code == 200
    for origin in (
        "http://evil.example",
        "null",
        "",
        "file://localhost",
        "http://localhost.evil",
        "http://a@localhost",
    ):
        response = client.post("/v1/completions", json={}, headers={"Origin": origin})
        refused(response, 403, None)


@pytest.mark.parametrize(
    ("error", "retry"),
    [(errors.Cancelled("m"), "false"), (errors.DeadlineExceeded("m"), "false"), (errors.NoWorker("m"), "true"),
     (errors.InternalError(), None), (errors.InvalidRequest("m"), None),
     (errors.SluiceError("m", code="poison_request"), "false")],
)  # fmt: skip
def test_what_the_official_client_is_told_about_retrying(error: errors.SluiceError, retry: str | None) -> None:
    response = error_response(error)
    assert response.headers.get("x-should-retry") == retry
    assert ("Retry-After" in response.headers) == (retry == "true")


def test_retry_after_in_both_units() -> None:
    error = errors.NoWorker("m")
    error.retry_after_s = 2.25
    headers = error_response(error).headers
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("3", "2250")


def test_bugs_of_ours_are_a_500_without_details(client: FlaskClient, store: FakeStore) -> None:
    def broken(job: Any) -> Any:
        raise RuntimeError("/secret/path.py")

    store.script = broken
    response = client.post("/v1/completions", json={"prompt": "x"})
    refused(response, 500, "internal_error")
    assert b"secret" not in response.data and b"Traceback" not in response.data
