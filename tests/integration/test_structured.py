"""Structured output on raw completions, from outside, on the whole product: what a client gets, streamed and not."""

from __future__ import annotations

import json
import re
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.conftest import needs_jsonschema, script, wait_for
from tests.integration.test_http_completions import refused, whole
from tests.integration.test_websocket import Socket
from tests.stack import REAL, Answer, Stack, Stream, endless

BOOK = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "year": {"type": "integer"}},
    "required": ["title", "year"],
    "additionalProperties": False,
}
RIGHT = '{"title":"x","year":1}'
#: What a model may write instead; the last three only a schema tells to be wrong.
HEADING, CUT, TWICE, NO_NUMBER = (
    "# Heading",
    '{"title":"x","year":1',
    '{"title":"x","title":"y","year":1}',
    '{"year":NaN}',
)
MISSING, EXTRA, QUOTED = '{"title":"x"}', '{"title":"x","year":1,"z":2}', '{"title":"x","year":"1"}'
INVALID = [
    *(pytest.param(text, id=text) for text in (HEADING, CUT, TWICE, NO_NUMBER)),
    *(pytest.param(text, id=text, marks=needs_jsonschema) for text in (MISSING, EXTRA, QUOTED)),
]
#: Makes a small model write short values.
EXAMPLES = """Schema: {"type": "integer", "minimum": 5}
Value: 7

Schema: {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
Value: {"name": "Ann"}

Schema: {"items": {"type": "string"}}
Value: ["a", "b"]

"""


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def asking(schema: Any) -> str:
    return f"{EXAMPLES}Schema: {json.dumps(schema)}\nValue: "


def of_real(schema: Any, **more: Any) -> dict[str, Any]:
    """A request of the real model for a value of a schema."""
    return {
        "prompt": asking(schema),
        "model": REAL,
        "max_tokens": 200,
        "response_format": schema_format(schema),
        **more,
    }


def failed(answer: Answer) -> None:
    refused(answer, 502, code="structured_output_failed")
    assert answer.error["type"] == "structured_output_failed" and answer.headers["x-should-retry"] == "false"


def failed_stream(stream: Stream) -> None:
    assert stream.status == 200 and stream.answer is None, stream
    assert [list(event) for event in stream.data] == [["error"]], "one error, and no chunk"
    assert stream.error is not None and stream.error["code"] == "structured_output_failed"
    assert stream.done == 1 and stream.ended and b"HTTP/1" not in stream.raw


@pytest.mark.parametrize("text", INVALID)
def test_a_text_that_is_wrong_is_never_a_success(stack: Stack, text: str) -> None:
    prompt, fields = script(*text), {"response_format": schema_format(BOOK)}
    failed(stack.complete(prompt, **fields))
    with stack.open(prompt, **fields) as stream:
        failed_stream(stream.read())
        assert stream.same_connection() == 200


def test_an_engine_that_obeys_no_mask_may_still_be_right(stack: Stack) -> None:
    prompt, fields = script(*RIGHT, delay_ms=20), {"response_format": schema_format(BOOK, strict=True)}
    assert stack.complete(prompt, **fields).text == RIGHT
    stream = whole(stack.stream(prompt, **fields))
    assert (stream.text, stream.finish) == (RIGHT, "stop")
    assert min(stream.times) > len(RIGHT) * 0.02, "nothing before all was there"
    assert stream.usage == {**stack.complete(prompt, **fields).usage}


def test_masks_let_a_stream_go_live(stack: Stack) -> None:
    stream = whole(stack.stream(**of_real(BOOK, temperature=0)))
    assert json.loads(stream.text).keys() == {"title", "year"} and stream.finish == "stop"
    assert stream.times[0] < stream.times[-2], "token by token"


def test_what_masks_enforce_in_part_comes_whole(stack: Stack) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    refused(
        stack.complete(**{**of_real(schema), "response_format": schema_format(schema, strict=True)}),
        400,
        param="response_format.json_schema.schema.uniqueItems",
        code="unsupported_parameter",
    )
    answers = [stack.stream(**of_real(schema, temperature=1.0, seed=seed)) for seed in range(4)]
    for stream in answers:
        if stream.error is None:
            assert len(set(json.loads(whole(stream).text))) == 2
            assert stream.times[-1] - stream.times[0] < 1.0, "all at once"
        else:
            failed_stream(stream)


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True}])
def test_several_choices_are_each_what_they_should_be(stack: Stack, fields: dict[str, Any]) -> None:
    def ask(*texts: str) -> Any:
        prompt = json.dumps({"choices": [{"pieces": list(text)} for text in texts]})
        asked = {"n": len(texts), "response_format": schema_format(BOOK)}
        return stack.stream(prompt, **asked) if fields["stream"] else stack.complete(prompt, **asked)

    right, wrong = ask(RIGHT, RIGHT, RIGHT), ask(RIGHT, CUT, RIGHT)
    if fields["stream"]:
        assert right.error is None and right.text.count("}") == 3
        failed_stream(wrong)
    else:
        assert [choice["text"] for choice in right.json["choices"]] == [RIGHT] * 3
        failed(wrong)
    answer = stack.complete(**of_real(BOOK, n=3, temperature=1.0, seed=2))
    for choice in answer.json["choices"]:
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["text"]).keys() == {"title", "year"}


@pytest.mark.parametrize("fields", [{"best_of": 3, "n": 1}, {"echo": True, "logprobs": 2}, {"logprobs": 0}])
def test_other_fields_go_along(stack: Stack, fields: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    asked = of_real(schema, temperature=1.0, seed=1, **fields)
    answer = stack.complete(**asked)
    [choice] = answer.json["choices"]
    text = choice["text"].removeprefix(asked["prompt"]) if fields.get("echo") else choice["text"]
    assert all(isinstance(value, bool) for value in json.loads(text))
    if "logprobs" in fields and not fields.get("echo"):
        assert len(choice["logprobs"]["tokens"]) == answer.usage["completion_tokens"]
        assert "".join(choice["logprobs"]["tokens"]) == text


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, r"[a-f]{3}-[0-9]{2}"),
        ({"choice": ["positive", "negative", "no idea 🙂"]}, "positive|negative|no idea 🙂"),
        ({"grammar": 'start: "x=" NUMBER\nNUMBER: /[1-9][0-9]{1,4}/'}, r"x=[1-9][0-9]{1,4}"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
        ({"response_format": {"type": "text"}}, r"(?s).*"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_kinds_of_constraints(stack: Stack, fields: dict[str, Any], pattern: str) -> None:
    prompt = f"{EXAMPLES}Schema: {{}}\nValue: "
    for temperature in (0, 1):
        answer = stack.complete(prompt, model=REAL, max_tokens=120, temperature=temperature, seed=3, **fields)
        if answer.finish == "stop" or not fields.get("response_format"):
            assert re.fullmatch(pattern, answer.text), answer


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"regex": "a+b"}, "aab", "aac"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'start: "x" | "y"'}, "y", "xy"),
        ({"response_format": {"type": "json_object"}}, '{"a":[1]}', "[1]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_kinds_are_judged_too(stack: Stack, fields: dict[str, Any], right: str, wrong: str) -> None:
    assert stack.complete(script(*right), **fields).text == right
    failed(stack.complete(script(*wrong), **fields))
    failed_stream(stack.stream(script(*wrong), **fields))


def test_a_stop_string_that_cuts_the_text_is_no_success(stack: Stack) -> None:
    failed(stack.complete(script(*RIGHT), stop=["year"], response_format=schema_format(BOOK)))
    assert stack.complete(script(*RIGHT, "###"), stop=["##"], response_format=schema_format(BOOK)).text == RIGHT


def test_whoever_comes_back_is_told_the_same(stack: Stack) -> None:
    for text, status in ((RIGHT, "completed"), (TWICE, "failed")):
        prompt, fields = script(*text), {"response_format": schema_format(BOOK)}
        stream = stack.stream(prompt, **fields)
        again = stack.resume(stream.id).read()
        assert (again.data, again.ids, again.done) == (stream.data, stream.ids, 1)
        job = stack.job(stream.id).json
        assert job["status"] == status
        if status == "failed":
            assert job["error"]["code"] == "structured_output_failed" and job["choices"] == []
            assert job["usage"]["completion_tokens"] == len(TWICE) + 1
        else:
            assert job["error"] is None and job["choices"][0]["text"] == RIGHT
            rest = stack.resume(stream.id, stream.ids[0]).read()
            assert rest.data == stream.data[1:]


def test_in_the_background_and_over_a_websocket(stack: Stack) -> None:
    job_id = stack.complete(script(*CUT), background=True, response_format=schema_format(BOOK)).json["id"]
    wait_for(lambda: stack.job(job_id).json["status"] == "failed", 30)
    with Socket(stack.port) as socket:
        socket.ask(script(*CUT), response_format=schema_format(BOOK))
        [message] = socket.until_done()
        assert message["error"]["code"] == "structured_output_failed"
        socket.ask(script(*RIGHT), response_format=schema_format(BOOK))
        chunks = socket.until_done()
        assert "".join(chunk["data"]["choices"][0]["text"] for chunk in chunks) == RIGHT


SIX: list[tuple[dict[str, Any], str]] = [
    ({"response_format": schema_format({"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 8})}, "[-0-9]"),
    ({"response_format": schema_format({"type": "object", "properties": {"only": {"type": "boolean"}}, "required": ["only"],
                                        "additionalProperties": False})}, "only"),
    ({"response_format": schema_format({"enum": ["red", "green", "blue"]})}, "red|green|blue"),
    ({"response_format": schema_format({"type": "string", "pattern": "^[a-f]{12}$"})}, '"[a-f]{12}"'),
    ({"regex": "[XYZ]{9}"}, "[XYZ]{9}"),
    ({"choice": ["either", "or"]}, "either|or"),
]  # fmt: skip


def test_six_at_once_never_mix(stack: Stack) -> None:
    """With two that are free beside them."""

    def ask(number: int) -> Answer:
        fields = SIX[number % 8][0] if number % 8 < 6 else {}
        return stack.complete(asking({}), model=REAL, max_tokens=80, temperature=1.0, seed=number, **fields)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(24)))
    for number, answer in enumerate(answers):
        if number % 8 < 6:
            assert re.search(SIX[number % 8][1], answer.text), answer
            assert answer.finish == "stop"
        else:
            assert answer.usage["completion_tokens"] > 0
    assert all(json.loads(answer.text) is not None for answer in answers[:4])


@needs_jsonschema
def test_a_catastrophic_pattern_stops_nobody_else(stack: Stack) -> None:
    schema = {"type": "string", "pattern": "^(?=(a+)+$)"}
    text = json.dumps("a" * 50 + "b")
    with stack.open(endless(delay_ms=20)) as ticking, ThreadPoolExecutor(3) as threads:
        ticking.goes_on(5)
        checks = [threads.submit(stack.complete, script(text), response_format=schema_format(schema)) for _ in range(3)]
        while not all(check.done() for check in checks):
            ticking.goes_on(1)
        for check in checks:
            failed(check.result())
        gaps = [later - earlier for earlier, later in pairwise(ticking.times)]
        assert len(gaps) > 10 and statistics.median(gaps) < 0.2, "while three checks took their second"


def test_a_pattern_that_costs_the_engine_too_much_stops_nobody_else(stack: Stack) -> None:
    schema = {"type": "string", "pattern": "^(.*a.{60}){4}$"}
    with stack.open("Once upon a time", model=REAL, max_tokens=60, ignore_eos=True) as other:
        other.goes_on(2)
        answer = stack.complete(**of_real(schema, temperature=1.0, seed=1, max_tokens=60))
        assert answer.status in (200, 502), answer
        other.read()
    assert other.finish == "length" and other.error is None
