"""The OpenAPI document and its page: complete, true to the contract, and safe to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from flask.testing import FlaskClient

from api import docs_page
from api.openapi import document
from api.schemas.completions import CompletionRequest
from shared.cards import ModelCard
from shared.errors import InvalidRequest, UnsupportedParameter
from shared.settings import Settings
from tests.conftest import needs_jsonschema

#: The fields of a raw completion, as the contract lists them: written down here a second time, on purpose.
_FIELDS = """
    model prompt suffix echo
    max_tokens fit_max_tokens min_tokens n best_of
    temperature top_p top_k min_p typical_p
    presence_penalty frequency_penalty repetition_penalty logit_bias seed
    stop stop_token_ids ignore_eos
    logprobs return_tokens_as_token_ids
    stream stream_options
    add_special_tokens parse_special skip_special_tokens
    response_format regex grammar choice
    enable_thinking chat_template chat_template_kwargs reasoning_effort reasoning thinking
    service_tier priority background webhook_url fanout store user
"""
COMPLETION_FIELDS = _FIELDS.split()

#: Field -> (schema types without null, smallest, largest value), where the contract names a range.
RANGES = {
    "temperature": ({"number"}, 0, 2),
    "top_p": ({"number"}, 0, 1),
    "presence_penalty": ({"number"}, -2, 2),
    "frequency_penalty": ({"number"}, -2, 2),
    "n": ({"integer"}, 1, 128),
    "logprobs": ({"integer"}, 0, 20),
    "seed": ({"integer"}, -(2**63), 2**63 - 1),
    "max_tokens": ({"integer"}, None, None),
    "echo": ({"boolean"}, None, None),
    "user": ({"string"}, None, None),
}

#: Described before they are served.


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return document(Settings())


@pytest.fixture(scope="module")
def fields(described: dict[str, Any]) -> dict[str, Any]:
    return described["components"]["schemas"]["CompletionRequest"]["properties"]


def test_the_fields_are_those_of_the_contract(fields: dict[str, Any]) -> None:
    assert sorted(fields) == sorted(COMPLETION_FIELDS)


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_of_the_contract(fields: dict[str, Any], name: str) -> None:
    kinds, low, high = RANGES[name]
    field = fields[name]
    assert set(field["type"]) == {*kinds, "null"}
    assert (field.get("minimum"), field.get("maximum")) == (low, high)


def test_what_tokenize_takes_is_not_what_a_completion_takes(described: dict[str, Any]) -> None:
    """A prompt of /tokenize is one text."""
    prompt = described["components"]["schemas"]["TokenizeRequest"]["properties"]["prompt"]
    assert set(prompt["type"]) == {"string", "null"} and "several" not in prompt["description"]


def test_limits_that_are_settings_are_the_settings() -> None:
    settings = Settings(max_logprobs=7, max_stops=3, max_prompts=5, max_logit_bias=2)
    fields = document(settings)["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["logprobs"]["maximum"] == 7
    assert fields["logit_bias"]["maxProperties"] == 2
    assert [s.get("maxItems") for s in fields["stop"]["anyOf"]] == [None, 3, None]
    assert [s.get("maxItems") for s in fields["prompt"]["anyOf"]] == [None, 5, None, 5, None]


@needs_jsonschema
def test_every_field_may_be_null(fields: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator

    for name, schema in fields.items():
        assert Draft202012Validator(schema).is_valid(None), name


@needs_jsonschema
@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({}, True),
        ({"prompt": "x", "stop": ["a", "b"], "logit_bias": {"50256": -100}}, True),
        ({"prompt": ["x", None], "stream": True, "stream_options": {"include_usage": True}}, True),
        ({"prompt": [[1, 2], [3]], "unknown": {"x": 1}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}, True),
        ({"reasoning": {"effort": "low"}, "thinking": {"type": "disabled"}}, True),
        ({"prompt": []}, False),
        ({"prompt": [1, "x"]}, False),
        ({"prompt": [True]}, False),
        ({"stop": ""}, False),
        ({"logit_bias": {"x": 1}}, False),
        ({"logit_bias": {"1": 101}}, False),
        ({"stream_options": {"other": True}}, False),
        ({"response_format": {"type": "xml"}}, False),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"reasoning_effort": "banana"}, False),
        ({"max_tokens": "10"}, False),
        ({"temperature": True}, False),
    ],
)
def test_the_schema_of_a_request_says_what_the_reader_does(
    described: dict[str, Any], body: dict[str, Any], valid: bool
) -> None:
    from jsonschema import Draft202012Validator

    schema = {"$ref": "#/components/schemas/CompletionRequest", "components": described["components"]}
    assert Draft202012Validator(schema).is_valid(body) is valid
    assert _is_read({"prompt": "x", **body}) is valid


def _is_read(body: dict[str, Any]) -> bool:
    """Whether the server understands a body, whether or not it can serve it."""
    card = ModelCard("m", "scripted", context=100, vocab_size=100_000, lanes=1, fingerprint="f", bos_id=1)
    try:
        CompletionRequest.read(body).to_call(card, Settings(), created=0)
    except UnsupportedParameter:
        return True
    except InvalidRequest:
        return False
    return True


def test_everything_is_described(described: dict[str, Any]) -> None:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
    for name, schema in described["components"]["schemas"].items():
        assert schema["type"] == "object", name
    request_schemas = [s for n, s in described["components"]["schemas"].items() if n.endswith("Request")]
    for schema in request_schemas:
        for name, field in schema["properties"].items():
            assert field["description"], f"{name} has no line in api/schemas/words.py"
    assert CompletionRequest.model_fields.keys() <= set(COMPLETION_FIELDS)


def test_every_route_is_described_and_served(described: dict[str, Any], client: FlaskClient) -> None:
    routes = {
        (method.lower(), re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule))
        for rule in client.application.url_map.iter_rules()
        if not rule.websocket  # OpenAPI 3.1 has no words for one; docs/websocket.md
        if not rule.rule.startswith("/web/")  # what pages load is no part of the API
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    paths = {(method, path) for path, methods in described["paths"].items() for method in methods}
    without_prefix = {(m, p.removeprefix("/v1")) if (m, p.removeprefix("/v1")) in paths else (m, p) for m, p in routes}
    assert without_prefix - paths == set(), "add them to OPERATIONS in api/openapi.py"
    assert paths - without_prefix == set()


@needs_jsonschema
def test_the_schemas_of_the_document_are_schemas(described: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator

    for schema in described["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_document_is_sound(described: dict[str, Any]) -> None:
    assert described["openapi"].startswith("3.1.")
    for ref in _refs(described):
        place: Any = described
        for part in ref.removeprefix("#/").split("/"):
            place = place[part]
    names = [item["operationId"] for methods in described["paths"].values() for item in methods.values()]
    assert len(set(names)) == len(names)


def test_the_document_is_served(client: FlaskClient, described: dict[str, Any]) -> None:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.content_type == "application/json"
    assert answer.json == described


class _Reader(HTMLParser):
    """Collects tags, attributes and text, and complains about tags that do not match."""

    VOID = frozenset({"meta", "br", "link", "img", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_the_document_and_nothing_that_runs(client: FlaskClient, described: dict[str, Any]) -> None:
    answer = client.get("/docs")
    assert answer.status_code == 200
    assert answer.content_type == "text/html; charset=utf-8"
    page = _Reader()
    page.feed(answer.text)
    assert page.open == []
    for path in described["paths"]:
        assert path in page.text
    for name in COMPLETION_FIELDS:
        assert name in page.text
    assert "-1 to 1000000" in page.text and "e+" not in page.text, "bounds are written in full"
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "style", "iframe", "form", "object"})
    ids = {attributes.get("id") for _, attributes in page.tags}
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}
        href = attributes.get("href")
        assert href is None or href.startswith("/") or href[1:] in ids, href


def test_the_page_escapes(described: dict[str, Any]) -> None:
    odd = {**described, "info": {**described["info"], "description": "<b>not bold</b> and `<i>`"}}
    page = docs_page.render(odd, 'http://x/"><script>alert(1)</script>')
    assert "<script" not in page
    assert "&lt;b&gt;not bold&lt;/b&gt; and <code>&lt;i&gt;</code>" in page


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)


def test_keys_are_described(described: dict[str, Any]) -> None:
    """A key in either header, or none where none is configured; probes never need one."""
    schemes = described["components"]["securitySchemes"]
    assert schemes["bearer"]["scheme"] == "bearer" and schemes["key"]["name"] == "x-api-key"
    assert described["security"] == [{}, {"bearer": []}, {"key": []}]
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert operation.get("security") == ([] if path in ("/health", "/ready") else None), path
    assert "x-ratelimit-reset-tokens" in described["components"]["responses"]["Error429"]["headers"]
    assert "WWW-Authenticate" in described["components"]["responses"]["Error401"]["headers"]
