"""Texts that have to call tools: what the grammar takes is read as calls whose arguments follow the schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import constraint_process
from api.relay.tool_calls import CallParser
from shared.grammars import meets, plan
from shared.structured import Unmet, of_calls
from shared.tool_calls import Form, Tools
from shared.tool_grammar import MAX_CALLS, Calls, Function
from tests.conftest import needs_jsonschema

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}, "additionalProperties": False}
FUNCTIONS = [Function("get-weather", CITY), Function("f_2", DAYS)]
FORMS: list[Form] = ["hermes", "llama"]


def written(form: Form, name: str, arguments: str) -> str:
    if form == "llama":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def right(calls: Calls, text: str) -> bool:
    constraint = of_calls(calls)
    return bool(constraint_process.answer({"kind": "tools", "source": constraint.source, "text": text})["right"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("get-weather", '{"city": "</tool_call>\\" }"}', True), ("f_2", "{}", True), ("f_2", '{"days":3}', True),
        pytest.param("get-weather", "{}", False, marks=needs_jsonschema), pytest.param("f_2", '{"days": "3"}', False, marks=needs_jsonschema), pytest.param("f_2", '{"days": 3, "x": 1}', False, marks=needs_jsonschema),
        ("other", "{}", False), ("f_2", "[]", False),
    ],
)  # fmt: skip
def test_one_call(form: Form, name: str, arguments: str, expected: bool) -> None:
    calls, text = Calls(form, FUNCTIONS), written(form, name, arguments)
    grammar = plan(of_calls(calls)).grammar
    assert meets(grammar, text) is right(calls, text) is expected
    assert not meets(grammar, f"x{text}") and not right(calls, f"x{text}")
    assert not meets(grammar, text[:-1]) and not meets(grammar, "")


def test_how_many_calls() -> None:
    one = written("hermes", "f_2", "{}")
    several, single = Calls("hermes", FUNCTIONS), Calls("hermes", FUNCTIONS, single=True)
    grammars = [plan(of_calls(calls)).grammar for calls in (several, single)]
    for count in (1, 2, MAX_CALLS, MAX_CALLS + 1):
        text = "\n".join([one] * count)
        assert [meets(grammar, text) for grammar in grammars] == [count <= MAX_CALLS, count == 1]
    assert right(several, f"{one}\n{one}") and not right(single, f"{one}\n{one}")
    assert not meets(plan(of_calls(Calls("llama", FUNCTIONS))).grammar, "\n".join([written("llama", "f_2", "{}")] * 2))


#: In the strings of a grammar DEL is escaped, which JSON does not ask for.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=12)
ARGUMENTS = st.one_of(
    st.tuples(st.just("get-weather"), st.builds(lambda city: {"city": city}, TEXTS)),
    st.tuples(st.just("f_2"), st.builds(lambda days: {"days": days}, st.integers(-(10**9), 10**9))),
)


@settings(max_examples=40)
@given(st.sampled_from(FORMS), ARGUMENTS, st.integers(1, 9))
def test_what_the_grammar_takes_is_read(form: Form, call: tuple[str, Any], step: int) -> None:
    name, value = call
    text = written(form, name, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    assert meets(plan(of_calls(Calls(form, FUNCTIONS))).grammar, text)
    parser = CallParser(Tools(form, ("get-weather", "f_2")))
    found = [parser.feed(text[a : a + step]) for a in range(0, len(text), step)] + [parser.flush()]
    assert "".join(part.content for part in found) == "" and parser.whole and parser.calls == 1
    assert json.loads("".join(call.arguments for part in found for call in part.calls)) == value


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, (1, "function", "parameters", "properties", "a", "pattern")),
        ({"type": "object", "$ref": "#/nope"}, (1, "function", "parameters", "$ref")),
        ({"type": "object", "properties": {f"p{n}": {} for n in range(501)}}, (1, "function", "parameters", "properties")),
    ],
)  # fmt: skip
def test_a_schema_at_fault_is_named(parameters: dict[str, Any], path: tuple[Any, ...]) -> None:
    constraint = of_calls(Calls("hermes", [FUNCTIONS[0], Function("g", parameters)]))
    with pytest.raises(Unmet) as caught:
        plan(constraint)
    assert caught.value.path == path
    answer = constraint_process.answer({"kind": "tools", "source": constraint.source})
    assert answer["reason"] and tuple(answer["path"]) == path


def test_what_is_not_enforced() -> None:
    """Without strict the finished call is checked, with it the request is refused."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)x"}}, "required": ["a"]}
    planned = plan(of_calls(Calls("hermes", [FUNCTIONS[0], Function("g", odd)])))
    assert (planned.missing, planned.path[:3]) == ("pattern", (1, "function", "parameters"))
    with pytest.raises(Unmet, match="pattern"):
        plan(of_calls(Calls("hermes", [Function("g", odd, strict=True)])))


@pytest.mark.parametrize(
    "source", ["{}", "[]", "x", '{"form":"x","functions":[]}', '{"form":"hermes","functions":[]}',
               '{"form":"hermes","functions":[{"name":"a b","parameters":{}}]}'],
)  # fmt: skip
def test_the_worker_looks_again(source: str) -> None:
    constraint = of_calls(Calls("hermes", FUNCTIONS))
    constraint.check()
    with pytest.raises(Unmet):
        type(constraint)("tools", source).check()
