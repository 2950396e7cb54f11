"""Field cases of structured output, from outside, on the whole product."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import needs_jsonschema, script
from tests.integration.test_http_completions import refused, whole
from tests.integration.test_structured import BOOK, CUT, RIGHT, asking, failed, of_real, schema_format
from tests.stack import REAL, SCRIPTED, Answer, Stack

SCHEMA = "response_format.json_schema.schema"
#: A script that likes nothing better than white space, and letters less.
BLANKS = json.dumps({"prefer": ["\n", " ", "a"]})


def valid(schema: Any, text: str) -> bool:
    """Raises ValueError for what is no JSON."""
    value = json.loads(text)
    jsonschema = pytest.importorskip("jsonschema")
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    "schema",
    [
        "string", [], {"type": "strin"}, {"type": 5}, {"properties": []}, {"pattern": "("}, {"$ref": "#/nope"}, {"minimum": "a"},
        {"required": "a"}, False,
    ],
    ids=json.dumps,
)  # fmt: skip
def test_fb047_an_invalid_schema_is_refused(stack: Stack, model: str, schema: Any) -> None:
    answer = stack.complete("x", model=model, response_format=schema_format(schema))
    refused(answer, 400)
    assert answer.error["param"].startswith("response_format")
    assert stack.complete("x", model=model, max_tokens=1).status == 200, "the worker lives"


def test_fb047_nothing_is_fetched(stack: Stack, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        for schema in ({"$ref": address}, {"$schema": address}, {"$id": address, "items": {"$ref": "y"}}):
            refused(stack.complete("x", model=model, response_format=schema_format(schema)), 400)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("asked", [{"type": "json_schema"}, {"type": "xml"}, "json", {}], ids=json.dumps)
def test_fb049_an_unknown_response_format(stack: Stack, asked: Any) -> None:
    refused(stack.complete("x", response_format=asked), 400, param="response_format")
    assert stack.complete("x", response_format={"type": "text"}).text == "x"


CAPITAL = {
    "type": "object",
    "properties": {"country": {"type": "string", "maxLength": 30}, "capital": {"type": "string", "maxLength": 30}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("runs", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_fb050_a_schema_is_met_every_time(stack: Stack, runs: int) -> None:
    """Half of them beside requests that are free."""

    def ask(number: int) -> Answer | None:
        if number % 2:
            stack.complete("Once", model=REAL, max_tokens=30, seed=number)
        return stack.complete(**of_real(CAPITAL, temperature=1.0, seed=number))

    with ThreadPoolExecutor(6) as threads:
        answers = [answer for answer in threads.map(ask, range(runs)) if answer is not None]
    stopped = [answer for answer in answers if answer.finish == "stop"]
    assert len(stopped) >= runs * 0.9
    for answer in stopped:
        assert {name: type(value) for name, value in json.loads(answer.text).items()} == {
            "country": str,
            "capital": str,
        }
        assert all(len(value) <= 30 for value in json.loads(answer.text).values())


@pytest.mark.parametrize(
    "schema", [BOOK, {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}]
)
def test_fb051_white_space_ends(stack: Stack, schema: Any) -> None:
    answer = stack.complete(BLANKS, max_tokens=2000, response_format=schema_format(schema))
    assert answer.finish == "stop" and answer.usage["completion_tokens"] < 600
    json.loads(answer.text)
    blanks = max(len(run) for run in "".join(c if c.isspace() else "x" for c in answer.text).split("x"))
    assert blanks <= 64


@pytest.mark.parametrize("most", [1, 10])
def test_fb052_what_max_tokens_cuts_is_length(stack: Stack, most: int) -> None:
    schema = {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(20)}}
    schema["required"] = [*schema["properties"]]
    asked = of_real(schema, temperature=0, max_tokens=most)
    answer = stack.complete(**asked)
    assert answer.finish == "length" and answer.usage["completion_tokens"] == most and answer.text.startswith("{")
    stream = whole(stack.stream(**asked))
    assert stream.finish == "length" and stream.text.startswith("{")
    held = stack.complete(BLANKS, max_tokens=most, response_format=schema_format(BOOK))
    assert held.finish == "length" and held.text


def test_fb054_escapes_in_a_schema_are_the_characters(stack: Stack) -> None:
    schema = {
        "type": "object",
        "properties": {"größe": {"enum": ["é", "漢", "🙂"]}},
        "required": ["größe"],
        "additionalProperties": False,
    }
    for ascii_only in (True, False):
        raw = json.dumps(
            {"model": SCRIPTED, "prompt": BLANKS, "response_format": schema_format(schema)}, ensure_ascii=ascii_only
        )
        answer = stack.call("POST", "/v1/completions", raw=raw.encode())
        assert json.loads(answer.text)["größe"] in ("é", "漢", "🙂"), answer


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"$ref": "#/properties/a"}},
         "required": ["a", "b"], "additionalProperties": False},
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
            "v": {"type": "integer", "minimum": 0, "maximum": 99},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
            "required": ["v", "kids"], "additionalProperties": False}}},
        {"type": "array", "items": {"$ref": "#/definitions/x"}, "minItems": 1, "maxItems": 2,
         "definitions": {"x": {"enum": ["p", "q"]}}},
    ],
    ids=["properties", "tree", "definitions"],
)  # fmt: skip
@needs_jsonschema
def test_fb055_references_work(stack: Stack, schema: Any) -> None:
    answer = stack.complete(**of_real(schema, temperature=0))
    assert answer.finish == "length" or valid(schema, answer.text), answer


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}])
def test_fb055_a_reference_to_itself_is_refused(stack: Stack, schema: Any) -> None:
    refused(stack.complete("x", model=REAL, response_format=schema_format(schema)), 400)


def nested(levels: int) -> Any:
    return {"type": "object", "properties": {"a": nested(levels - 1)}} if levels else {"type": "string"}


EXPLOSIVE: dict[str, Any] = {
    "deep": nested(300),
    "brackets": {"type": "string", "pattern": "(" * 5000},
    "wide": {"anyOf": [{"anyOf": [{"anyOf": [{"type": "string", "maxLength": n} for n in range(20)]}] * 20}] * 20},
    "wide by reference": {
        "$defs": {
            "0": {"enum": ["a"]},
            **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n - 1}"}] * 20} for n in range(1, 7)},
        },
        "$ref": "#/$defs/6",
    },
    "many items": {"type": "array", "items": {"const": 1}, "maxItems": 100_000},
    "long enum": {"enum": [f"x{n:06}" for n in range(6500)]},
    "remainders": {"type": "integer", "multipleOf": 9_999_991},
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_fb056_an_explosive_schema_blocks_nobody(stack: Stack, name: str) -> None:
    with stack.open("Once upon a time", model=REAL, max_tokens=40, ignore_eos=True) as other:
        other.goes_on(2)
        began = time.monotonic()
        answer = stack.complete("Value: ", model=REAL, max_tokens=4, response_format=schema_format(EXPLOSIVE[name]))
        took = time.monotonic() - began
        other.read()
    assert answer.status in (200, 400), answer
    assert took < 20, "its limits are a second each; this machine may be busy"
    assert other.finish == "length" and other.error is None


def test_fb057_state_is_no_others(stack: Stack) -> None:
    schemas = [
        {"type": "array", "items": {"enum": [letter]}, "minItems": 3 + 4 * number, "maxItems": 3 + 4 * number}
        for number, letter in enumerate("pqrs")
    ]

    def ask(number: int) -> Answer:
        if number < 4:
            return stack.complete(**of_real(schemas[number], temperature=1.0, seed=number))
        fields = {"response_format": {"type": "json_object"}} if number < 6 else {}
        return stack.complete(asking({"type": "object"}), model=REAL, max_tokens=60, seed=number, **fields)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    for number, letter in enumerate("pqrs"):
        assert json.loads(answers[number].text) == [letter] * (3 + 4 * number)
    for answer in answers[4:6]:
        assert answer.text.startswith("{") and (answer.finish == "length" or isinstance(json.loads(answer.text), dict))
    assert all(answer.status == 200 for answer in answers[6:])


def test_fb058_a_raw_prompt_is_what_it_is(stack: Stack) -> None:
    """The constraint is one of the whole text; a model that thinks is asked in a chat, or told not to."""
    answer = stack.complete(**of_real(BOOK, temperature=0, enable_thinking=False))
    assert answer.text.startswith("{") and json.loads(answer.text).keys() == {"title", "year"}


@pytest.mark.parametrize("thought", ["", "<think>{no JSON</think>\n\n"])
def test_fb058_in_a_chat_the_answer_is_what_is_held_to_it(stack: Stack, thought: str) -> None:
    def ask(text: str) -> Answer:
        message = {"role": "user", "content": script(thought, *text) if thought else script(*text)}
        fields = {"model": SCRIPTED, "messages": [message], "response_format": schema_format(BOOK)}
        return stack.call("POST", "/v1/chat/completions", fields)

    message = ask(RIGHT).json["choices"][0]["message"]
    assert message["content"] == RIGHT and bool(message.get("reasoning_content")) is bool(thought)
    failed(ask(CUT))


@pytest.mark.parametrize("fields", [{}, {"response_format": schema_format({"type": "string", "maxLength": 5})}])
def test_fb059_ids_beyond_the_vocabulary_are_never_sampled(stack: Stack, fields: dict[str, Any]) -> None:
    prompt = json.dumps({"prefer_ids": [65_599, 65_536, 97]})
    answer = stack.complete(prompt, max_tokens=20, **fields)
    assert answer.text == ('"aaaaa"' if fields else "a" * 20)


@pytest.mark.parametrize("grammar", ["root ::= (", "", "x" * 1_000_000], ids=["wrong", "empty", "large"])
def test_fb060_a_wrong_grammar_is_refused(stack: Stack, model: str, grammar: str) -> None:
    refused(stack.complete("x", model=model, grammar=grammar), 400, param="grammar")
    refused(stack.complete("x", model=model, regex=grammar or "("), 400, param="regex")
    assert stack.complete("x", model=model, max_tokens=1).status == 200


_OBJECT = {"type": "object"}
SMALL: list[Any] = [
    {"const": "only this"}, {"const": 3}, {"const": None}, {"const": {"a": [1, "b"]}}, {"enum": ["a", 1, None, True]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]}, {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"},
    {"anyOf": [{"type": "null"}, {"type": "integer"}]}, {"anyOf": [{"minimum": 3}, {"maximum": 1}], "type": "number"},
    {"type": "integer", "minimum": 10, "maximum": 20}, {"type": "integer", "exclusiveMinimum": 5}, {"type": "number", "exclusiveMaximum": -1},
    {"type": "number", "minimum": 0.5, "maximum": 1.5}, {"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 0.25, "maximum": 9},
    {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "boolean"}},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"const": "a"}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "array", "contains": {"const": 5}, "maxItems": 3, "items": {"type": "integer"}},
    {**_OBJECT, "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False, "maxProperties": 2},
    {**_OBJECT, "propertyNames": {"maxLength": 3}, "maxProperties": 2, "additionalProperties": {"type": "integer"}},
    {**_OBJECT, "dependentRequired": {"a": ["b"]}, "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
    {**_OBJECT, "properties": {"a": {"type": "string", "format": "date-time"}}, "required": ["a"], "additionalProperties": False},
    {**_OBJECT, "properties": {"a": {"type": "string", "format": "uuid"}}, "required": ["a"], "additionalProperties": False},
    {**_OBJECT, "required": ["not in properties"], "additionalProperties": {"type": "integer"}, "maxProperties": 1},
    {**_OBJECT, "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}, {"maxLength": 4, "type": "string"},
    {"type": "string", "minLength": 3, "maxLength": 6}, {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"}, {"type": "string", "format": "date"},
    {"type": ["integer", "null"]}, {"type": "boolean"}, {"type": "null"}, {"not": {"type": "object"}, "maxLength": 5, "maxItems": 2},
    {"if": {"type": "integer"}, "then": {"minimum": 5}, "type": "integer"},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]}, {"type": "string", "format": "ipv4"}, {"type": "string", "format": "email"},
    {"type": "object", "maxProperties": 0}, {"type": "string", "pattern": "^(?=a)[a-c]{2}$", "maxLength": 3}, {},
]  # fmt: skip


@needs_jsonschema
@pytest.mark.parametrize("runs", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_fb134_valid_or_refused_and_nothing_in_between(stack: Stack, runs: int) -> None:
    """Forty small schemas. What masks enforce in part may fail, and says so."""
    cases = [(schema, seed) for schema in SMALL for seed in range(runs)]

    def ask(case: tuple[Any, int]) -> Answer:
        return stack.complete(**of_real(case[0], temperature=1.0 if case[1] else 0, seed=case[1], max_tokens=100))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, cases))
    told = {200: 0, 400: 0, 502: 0}
    for (schema, _), answer in zip(cases, answers, strict=True):
        told[answer.status] += 1
        if answer.status == 200 and answer.finish == "stop":
            assert valid(schema, answer.text), (schema, answer.text)
    assert told[400] == 0 and told[502] <= len(cases) * 0.1


def test_fb134_strict_is_kept_or_refused(stack: Stack) -> None:
    lock, told = threading.Lock(), {200: 0, 400: 0}

    def ask(schema: Any) -> None:
        answer = stack.complete("x", response_format=schema_format(schema, strict=True), max_tokens=1)
        if answer.status == 400:
            assert answer.error["code"] == "unsupported_parameter" and answer.error["param"].startswith(SCHEMA + "."), (
                answer
            )
        with lock:
            told[answer.status] += 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, SMALL))
    assert told[200] >= 30 and told[400] >= 5
