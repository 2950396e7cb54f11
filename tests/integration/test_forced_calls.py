"""Texts that have to call tools, on both engines: what comes is a call that its tool can take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import needs_jsonschema, script
from tests.integration.test_http_completions import refused
from tests.stack import REAL, SCRIPTED, Stack, said

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
ASKED = said("What is the weather in Paris, and what time is it there?")
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_model_calls(stack: Stack, choice: Any, parallel: bool) -> None:
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 200}
    answer = stack.complete(ASKED, model=REAL, temperature=0.7, seed=3, **fields)
    stream = stack.stream(ASKED, model=REAL, temperature=0.7, seed=3, **fields)
    assert answer.finish == stream.finish == "tool_calls", answer
    assert stream.text == "" and answer.choice["message"]["content"] is None
    assert len(stream.data) > 5, "arguments come while they are written"
    if choice == NAMED or not parallel:
        assert len(answer.calls) == len(stream.calls) == 1
    for name, arguments in (*answer.calls, *stream.calls):
        value = json.loads(arguments)
        if choice == NAMED or name == "get_weather":
            assert name == "get_weather" and value.keys() == {"city", "unit"} and value["unit"] in ("C", "F")
        else:
            assert (name, value) == ("get_time", {})


def test_a_call_that_is_cut_off_is_length(stack: Stack) -> None:
    answer = stack.complete(ASKED, model=REAL, tools=[WEATHER], tool_choice="required", max_tokens=5)
    assert answer.finish == "length"


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        "It is sunny.", call_of("nope"), call_of("get_time") * 2, "<tool_call>", call_of("get_time") + "so",
        pytest.param(call_of("get_weather", city="Paris"), marks=needs_jsonschema),
        pytest.param(call_of("get_weather", city="Paris", unit="K"), marks=needs_jsonschema),
    ],
)  # fmt: skip
def test_what_is_not_the_call_fails(stack: Stack, text: str) -> None:
    """On an engine that obeys no masks, which stands for a mask with a hole."""
    fields = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    answer = stack.complete(said(script(text)), **fields)
    assert (answer.status, answer.error["code"]) == (502, "structured_output_failed")
    stream = stack.stream(said(script(text)), **fields)
    assert (stream.error or {})["code"] == "structured_output_failed" and not stream.calls and not stream.text
    assert stream.done == 1 and stream.finish is None
    right = stack.complete(said(script(call_of("get_time"))), **fields)
    assert right.calls == (("get_time", "{}"),) and right.finish == "tool_calls"


def test_fb058_a_call_that_has_to_come_comes_behind_the_reasoning(stack: Stack) -> None:
    """And so does any text that has to have a form."""
    fields = {"tools": [TIME], "tool_choice": "required"}
    thought = ["<think>", '<tool_call>{"name": "get_time", ', "no", "</think>\n\n", call_of("get_time")]
    answer, stream = stack.complete(said(script(*thought)), **fields), stack.stream(said(script(*thought)), **fields)
    assert answer.calls == stream.calls == (("get_time", "{}"),) and answer.text == stream.text == ""
    assert answer.reasoning == stream.reasoning == '<tool_call>{"name": "get_time", no'
    assert answer.finish == stream.finish == "tool_calls"
    answer = stack.complete(said(script("<think>{", "</think>", '{"a": 1}')), response_format={"type": "json_object"})
    assert (answer.reasoning, answer.text, answer.finish) == ("{", '{"a": 1}', "stop")
    refused(stack.complete(said(script(*thought[:4], "so")), **fields), 502, code="structured_output_failed")


@needs_jsonschema
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_schemas_are_checked_before_queueing(stack: Stack, choice: str) -> None:
    """FB-047, FB-056: as those of response_format."""
    for parameters, place in (
        ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"), ({"properties": []}, "properties"),
        ({"$ref": "http://127.0.0.1:1/x"}, "$ref"), ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        ({"required": "a"}, "required"),
    ):  # fmt: skip
        tools = [TIME, {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]
        answer = stack.complete(said("x"), model=SCRIPTED, tools=tools, tool_choice=choice)
        assert answer.status == 400 and answer.error["param"].startswith("tools.1.function.parameters"), (
            parameters,
            answer,
        )
        assert place in answer.error["param"]


def test_tools_and_another_form_exclude_each_other(stack: Stack) -> None:
    for field, value in (("response_format", {"type": "json_object"}), ("regex", "a+"), ("choice", ["a"])):
        refused(stack.complete(said("x"), tools=[TIME], **{field: value}), 400, param=field)
    assert stack.complete(said("x"), tools=[TIME], response_format={"type": "text"}).status == 200
    assert stack.complete(said(script("{}")), tools=[], response_format={"type": "json_object"}).text == "{}"
