"""A narrower schema is narrower: whatever meets it meets the schema that it was made of, and something does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.grammars import meets, plan, simplified
from shared.narrowing import closed, complement, narrowed
from shared.structured import Unmet, of_schema
from tests.conformance.schema_corpus import sample
from tests.conftest import needs_jsonschema

VALUES: list[Any] = [
    None, True, False, 0, 1, 1.0, -1, 2, 2.5, 3, 30, 1e10, "", "a", "foo", "bar", "longer text", [], [1], ["a"], [1, "a"],
    [[]], [1, 2, 3], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"foo": "bar"}, {"a": {"a": 1}}, {"a": None},
]  # fmt: skip

SCHEMAS: list[Any] = [
    True, False, {}, {"title": "x"}, {"type": "integer"}, {"type": "number"}, {"type": ["string", "null"]}, {"const": 1},
    {"const": True}, {"const": "a"}, {"enum": [1, "foo", None]}, {"enum": [[1], {"a": 1}]}, {"minimum": 2}, {"maximum": 2},
    {"exclusiveMinimum": 1}, {"exclusiveMaximum": 1}, {"minLength": 2}, {"maxLength": 2}, {"minLength": 0}, {"minItems": 1},
    {"maxItems": 1}, {"minProperties": 1}, {"maxProperties": 1}, {"required": ["a"]}, {"required": ["a", "b"]},
    {"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {}, "b": {"const": 2}}}, {"items": {"type": "integer"}},
    {"allOf": [{"type": "object"}, {"required": ["a"]}]}, {"anyOf": [{"type": "object"}, {"minimum": 2}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, {"not": {"type": "integer"}}, {"pattern": "^a"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, {"$ref": "#/nothing"}, {"const": "ab"}, {"enum": ["a", "foo", "bar x", "é"]},
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
]  # fmt: skip


def holds(schema: Any, value: Any) -> bool:
    from jsonschema import Draft202012Validator
    from jsonschema_specifications import REGISTRY

    return bool(Draft202012Validator(schema, registry=REGISTRY).is_valid(value))  # nothing is fetched


@needs_jsonschema
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_no_value_meets_a_schema_and_its_complement(schema: Any) -> None:
    if schema == {"$ref": "#/nothing"}:
        assert complement(schema, schema) is None
        return
    other = complement(schema, schema) or False
    both = [value for value in VALUES if holds(other, value) and holds(schema, value)]
    assert not both


@pytest.mark.parametrize(
    "schema", [{}, {"pattern": "a"}, {"$ref": "#"}, {"minLength": 0}, {"uniqueItems": True}], ids=json.dumps
)
def test_where_no_complement_is_known_there_is_none(schema: Any) -> None:
    assert not complement(schema, schema)


#: Schemas with a text that was right only by luck before, and whether there is more than one kind of texts left.
MADE: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"not": {"type": "integer"}}, ['"a"', "{}"], ["1"]),
    ({"type": "object", "not": {"required": ["a"]}}, ['{"b":1}'], ['{"a":1}']),
    ({"not": {"type": ["integer", "boolean"]}}, ["null"], ["true", "1"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["1", '"a"'], ["3"]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
    ({"oneOf": [True, {"type": "string"}]}, ["1"], ['"a"']),
    ({"type": "string", "not": {"enum": ["yes", "no"]}}, ['"maybe"', '"nos"', '"ye"', '""'], ['"yes"', '"no"']),
    (
        {"type": "object", "properties": {"k": {"enum": ["x", "y"]}}, "required": ["k"],
         "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["a"]}, "else": {"properties": {"a": False}}},
        ['{"k":"x","a":1}', '{"k":"y"}'], ['{"k":"x"}', '{"k":"y","a":1}'],
    ),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, ['"ab"', "1"], ['"abc"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), MADE, ids=lambda value: json.dumps(value)[:50])
def test_texts_of_a_narrower_schema(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    planned = plan(of_schema(schema))
    assert planned.missing in ("not", "oneOf", "if"), "a strict client is told all the same"
    for text in right:
        assert meets(planned.grammar, text), text
    for text in wrong:
        assert not meets(planned.grammar, text), text


#: Schema, and texts that show that nothing of it is missing.
EXACT: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["c"]}}}, ['{"b":1}', '{"a":1,"c":1}'], ['{"a":1}']),
    ({"if": True, "then": {"type": "integer"}}, ["1"], ['"a"']),
    ({"if": False, "then": {"type": "integer"}, "else": {"type": "string"}}, ['"a"'], ["1"]),
    ({"not": False, "type": "null"}, ["null"], ["1"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), EXACT, ids=lambda value: json.dumps(value)[:50])
def test_keywords_that_others_say_as_well(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    planned = plan(of_schema(schema))
    assert planned.missing is None
    assert all(meets(planned.grammar, text) for text in right)
    assert not any(meets(planned.grammar, text) for text in wrong)


@needs_jsonschema
@pytest.mark.parametrize("schema", [schema for schema, *_ in MADE + EXACT], ids=lambda schema: json.dumps(schema)[:50])
def test_other_words_never_allow_more(schema: dict[str, Any]) -> None:
    missing = plan(of_schema(schema)).missing
    made = simplified(schema)
    if missing is not None:
        found = narrowed(made, missing)
        assert found is not None
        made = found
    for value in VALUES:
        assert holds(schema, value) or not holds(made, value)
        assert missing is not None or holds(schema, value) == holds(made, value)


@pytest.mark.parametrize(
    "schema", [{"not": {}}, {"not": True}, {"oneOf": [True, True]}, {"if": True, "then": False}], ids=json.dumps
)
def test_what_nothing_meets_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(Unmet):
        plan(of_schema(schema))


#: Objects that get no other properties than those that are named for them: schema, and texts of the closed one and of no such.
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (PAIR, ["{}", '{"a":1}', '{"a":1,"b":2}'], ['{"c":1}', '{"a":1,"c":1}']),
    ({"properties": {"a": True}, "required": ["b"]}, ['{"a":1,"b":2}', "1"], ['{"b":1,"c":1}', '{"a":1}']),
    ({"type": "array", "items": PAIR}, ['[{"a":1}]'], ['[{"c":1}]']),
    ({"properties": {"x": {"$ref": "#/$defs/pair"}}, "$defs": {"pair": PAIR}}, ['{"x":{"a":1}}'], ['{"x":{"c":1}}', '{"y":1}']),
    ({"anyOf": [PAIR, {"type": "null"}]}, ['{"a":1}', "null"], ['{"c":1}']),
    ({"properties": {"x": {"allOf": [PAIR], "title": "X"}}}, ['{"x":{"a":1}}'], ['{"x":{"c":1}}']),
    ({"properties": {"next": {"$ref": "#"}}}, ['{"next":{"next":{}}}'], ['{"next":{"c":1}}']),
    ({"type": "object", "additionalProperties": PAIR}, ['{"c":{"a":1}}'], ['{"c":{"c":1}}']),
]  # fmt: skip
#: And those that are left as they are, each with a text that closing would have cost it.
OPEN: list[tuple[dict[str, Any], str]] = [
    ({"type": "object"}, '{"c":1}'),
    ({**PAIR, "additionalProperties": True}, '{"c":1}'),
    ({**PAIR, "additionalProperties": {"type": "null"}}, '{"a":1,"c":null}'),
    ({**PAIR, "patternProperties": {"^x": True}}, '{"x":1}'),
    ({**PAIR, "minProperties": 3}, '{"c":1,"d":1,"e":1}'),
    ({"allOf": [PAIR, {"required": ["c"]}]}, '{"c":1}'),
    ({"allOf": [PAIR, {"properties": {"c": True}}]}, '{"a":1,"c":1}'),
    ({**PAIR, "anyOf": [{"required": ["c"]}, {"required": ["d"]}]}, '{"c":1}'),
    ({**PAIR, "dependentRequired": {"a": ["c"]}}, '{"a":1,"c":1}'),
    ({**PAIR, "dependentSchemas": {"a": {"required": ["c"]}}}, '{"a":1,"c":1}'),
    ({"$ref": "#/$defs/pair", "required": ["c"], "$defs": {"pair": PAIR}}, '{"c":1}'),
    ({"properties": {"x": {"$ref": "#/$defs/p"}, "y": {"$ref": "#/$defs/p", "required": ["c"]}}, "$defs": {"p": PAIR}}, '{"y":{"c":1}}'),
    ({**PAIR, "unevaluatedProperties": {"type": "null"}}, '{"c":null}'),
    ({"$id": "http://a.b/c", "$ref": "d", "$defs": {"d": {"$id": "d", **PAIR}}}, '{"c":1}'),
    ({"$ref": "#pair", "$defs": {"pair": {"$anchor": "pair", **PAIR}}}, '{"c":1}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), CLOSED, ids=lambda value: json.dumps(value)[:50])
def test_nobody_invents_properties(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    planned = plan(of_schema(schema))
    assert planned.missing is None
    assert [text for text in (*right, *wrong) if meets(planned.grammar, text)] == right


@pytest.mark.parametrize(("schema", "text"), OPEN, ids=lambda value: json.dumps(value)[:50])
def test_properties_that_are_wanted_elsewhere_may_come(schema: dict[str, Any], text: str) -> None:
    assert closed(schema) == schema or schema["properties"]["y"], "beside it something may be closed"
    assert meets(plan(of_schema(schema)).grammar, text)


@needs_jsonschema
@pytest.mark.parametrize(
    "schema",
    [schema for schema, *_ in CLOSED + OPEN] + [case.schema for case in sample() if isinstance(case.schema, dict)],  # type: ignore[operator]
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_a_closed_schema_allows_no_more(schema: dict[str, Any]) -> None:
    from referencing.exceptions import Unresolvable

    made = closed(schema)
    try:
        right = [value for value in VALUES if holds(schema, value)]
    except Unresolvable:
        return
    assert all(holds(schema, value) for value in VALUES if holds(made, value))
    assert not right or made == schema or any(holds(made, value) for value in right)


def test_a_schema_that_closing_would_leave_nothing_of_stays_open() -> None:
    """`required` asks for what `properties` forbid; the reason is told of the schema as it was sent."""
    with pytest.raises(Unmet):
        plan(of_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}))


def test_where_nothing_would_be_left_only_the_rest_is_enforced() -> None:
    planned = plan(of_schema({"type": "integer", "not": {"multipleOf": 2}}))
    assert planned.missing == "not" and meets(planned.grammar, "3") and not meets(planned.grammar, '"a"')
