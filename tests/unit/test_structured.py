"""Constraints: their limits, what of them is enforced, and what is said of those that nothing can meet."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from shared.grammars import meets, plan, simplified
from shared.structured import (
    ANY_OBJECT,
    MAX_CHOICES,
    MAX_SOURCE,
    Constraint,
    Path,
    Unmet,
    of_choices,
    of_schema,
    subschemas,
)


def refused(constraint: Constraint) -> Unmet:
    began = time.monotonic()
    with pytest.raises(Unmet) as caught:
        plan(constraint)
    assert time.monotonic() - began < 10, "soon, also on a busy machine"
    assert caught.value.status == 400 and caught.value.message.isprintable() and len(caught.value.message) < 400
    return caught.value


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def wide(levels: int) -> dict[str, Any]:
    return {"anyOf": [wide(levels - 1)] * 20} if levels else {"type": "string"}


#: FB-047: schema -> where it is wrong.
NO_SCHEMAS: list[tuple[Any, Path]] = [
    ("string", ()),
    ([], ()),
    (5, ()),
    (None, ()),
    (False, ()),
    ({"type": "strin"}, ()),
    ({"type": 5}, ()),
    ({"properties": []}, ()),
    ({"pattern": "("}, ("pattern",)),
    ({"properties": {"a": {"pattern": "("}}}, ("properties", "a", "pattern")),
    ({"$ref": "#/nope"}, ("$ref",)),
    ({"minimum": "a"}, ()),
    ({"required": "a"}, ()),
    ({"items": {"$ref": "http://127.0.0.1:1/x"}}, ("items", "$ref")),
    ({"$schema": "http://127.0.0.1:1/x", "type": "object"}, ("$schema",)),
    ({"$ref": "#"}, ()),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ()),
    ({"type": "integer", "minimum": 5, "maximum": 2}, ()),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, ()),
    ({"enum": []}, ()),
    # FB-056
    (nested(200), ()),
    (wide(3), ()),
    ({"type": "string", "pattern": "(" * 5000}, ("pattern",)),
    ({"enum": [f"x{number}" for number in range(30_000)]}, ()),
    ({"type": "object", "properties": {f"p{number}": {} for number in range(501)}}, ("properties",)),
]


@pytest.mark.parametrize(("schema", "path"), NO_SCHEMAS, ids=map(str, range(len(NO_SCHEMAS))))
def test_fb047_fb056_what_is_no_schema_is_refused_with_its_place(schema: Any, path: Path) -> None:
    assert refused(of_schema(schema)).path == path


LARGE: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "maxItems": 100_000},
    {"type": "string", "minLength": 100_000},
    {"enum": [f"x{number:06}" for number in range(6500)]},
    {"type": "string", "pattern": "^(a+)+$"},
    {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}},
    nested(30),
    {"type": "integer", "multipleOf": 9999},
]


@pytest.mark.parametrize("schema", LARGE, ids=lambda schema: json.dumps(schema)[:40])
def test_fb056_what_is_large_is_planned_soon(schema: dict[str, Any]) -> None:
    began = time.monotonic()
    assert plan(of_schema(schema)).missing is None
    assert time.monotonic() - began < 10


#: Schema -> the keyword that masks do not enforce, and where it is.
IN_PART: list[tuple[dict[str, Any], str, Path]] = [
    ({"properties": {"a": {"not": {"type": "string"}}}}, "not", ("properties", "a", "not")),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", ("uniqueItems",)),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf", ("oneOf",)),
    ({"items": {"format": "json-pointer"}}, "format", ("items", "format")),
    ({"properties": {"a": {"pattern": "x"}, "b": {"pattern": "^(?=a)"}}}, "pattern", ("properties", "b", "pattern")),
    ({"pattern": r"(a)\1"}, "pattern", ("pattern",)),
    ({"patternProperties": {"(?=a)": {"type": "string"}}}, "patternProperties", ("patternProperties",)),
    ({"patternProperties": {"a*": {}, "b*": {"minimum": 1}}}, "patternProperties", ("patternProperties",)),
    ({"multipleOf": 9_999_991}, "multipleOf", ("multipleOf",)),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf", ("allOf", 0, "multipleOf")),
    ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties", ("maxProperties",)),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if", ("if",)),
    ({"$defs": {"a": {"contains": {"type": "null"}}}, "$ref": "#/$defs/a"}, "contains", ("$defs", "a", "contains")),
]


@pytest.mark.parametrize(("schema", "keyword", "path"), IN_PART, ids=lambda value: json.dumps(value)[:50])
def test_what_is_enforced_in_part_is_told(schema: dict[str, Any], keyword: str, path: Path) -> None:
    planned = plan(of_schema(schema))
    assert (planned.missing, planned.path) == (keyword, path)


def test_what_can_be_enforced_is_although_something_else_cannot() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"pattern": "^(?=a)"}, "c": {"type": "string", "pattern": "^x"}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    }
    grammar = plan(of_schema(schema)).grammar
    assert meets(grammar, '{"a":1,"b":"z","c":"xy"}')
    assert not meets(grammar, '{"a":1,"b":"z","c":"y"}'), "the other pattern holds"
    assert not meets(grammar, '{"a":1.5,"b":"z","c":"x"}')


@pytest.mark.parametrize(
    "schema",
    [
        {"maxItems": 2.0},
        {"uniqueItems": False},
        {"then": {"type": "string"}, "else": False},
        {"if": {"type": "string"}},
        {"contains": {"type": "string"}, "minContains": 0},
        {"maxContains": 3},
        {"type": "integer", "format": "int32"},
        {"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}},
    ],
    ids=json.dumps,
)
def test_what_says_nothing_keeps_nothing_from_being_enforced(schema: dict[str, Any]) -> None:
    assert plan(of_schema(schema)).missing is None


def test_what_says_what_is_left_keeps_what_it_counts() -> None:
    schema = {"if": {"properties": {"a": True}}, "unevaluatedProperties": False}
    assert simplified(schema) == schema


def test_a_schemas_options_for_the_grammar_engine_are_not_heard() -> None:
    """They could take the limits on white space away."""
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": ".*"}}
    assert not meets(plan(of_schema(schema)).grammar, "{" + " " * 40 + "}")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a":1}', True),
        ('{\n    "a" : 1\n}', True),
        ("{}", True),
        ('{"a":' + " " * 17 + "1}", False),
        ('{"a":\n\n1}', False),
        ('{"a":1} ', False),
        ("[]", False),
        ('{"a":01}', False),
        ('{"a":NaN}', False),
    ],
)
def test_fb051_white_space_is_bounded_and_json_is_json(text: str, right: bool) -> None:
    assert meets(plan(Constraint("json", ANY_OBJECT)).grammar, text) is right


def test_fb054_escapes_in_a_schema_are_the_characters() -> None:
    raw = '{"type":"object","properties":{"größe":{"enum":["é","漢","🙂"]}},"required":["größe"]}'
    escaped = json.dumps(json.loads(raw))
    assert "\\u" in escaped
    assert of_schema(json.loads(raw)) == of_schema(json.loads(escaped))
    assert meets(plan(of_schema(json.loads(escaped))).grammar, '{"größe":"🙂"}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}, "required": ["b"]}, '{"b":"x"}'),
        ({"definitions": {"n": {"type": "integer"}}, "items": {"$ref": "#/definitions/n"}}, '["x"]'),
        ({"$defs": {"n": {"$anchor": "n", "type": "integer"}}, "items": {"$ref": "#n"}}, '["x"]'),
    ],
)
def test_fb055_references_inside_a_schema(schema: dict[str, Any], text: str) -> None:
    planned = plan(of_schema(schema))
    assert planned.missing is None
    assert meets(planned.grammar, text.replace('"x"', "1")) and not meets(planned.grammar, text)


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (Constraint("regex", "(yes|no), [a-zé]{3}!"), "no, abé!", "no, ab!"),
        (Constraint("regex", "^a+$"), "aaa", "aab"),
        (Constraint("grammar", 'start: "a" number\nnumber: /[0-9]+/'), "a12", "12"),
        (Constraint("grammar", 'start: %json {"type": "integer"}'), "12", "x"),
        (of_choices(["ja", 'ne"in\n', "vielleicht 🙂"]), 'ne"in\n', "nein"),
        (of_choices(["a", "ab"]), "a", "b"),
    ],
)
def test_other_kinds(constraint: Constraint, right: str, wrong: str) -> None:
    grammar = plan(constraint).grammar
    assert meets(grammar, right) and not meets(grammar, wrong)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", ""),
        Constraint("regex", "("),
        Constraint("regex", "(?=a)b"),
        Constraint("regex", r"[^\s\S]"),
        Constraint("grammar", ""),
        Constraint("grammar", "root ::= ("),
        Constraint("grammar", "start: start"),
        Constraint("grammar", "x" * (MAX_SOURCE + 1)),
        Constraint("grammar", "start: <[1]>"),
        Constraint("grammar", "start: <|im_end|>"),
        Constraint("grammar", 'start: %json {"$ref": "http://127.0.0.1:1/x"}'),
        Constraint("choice", "[]"),
        Constraint("choice", '["a", ""]'),
        Constraint("choice", '["a", 1]'),
        Constraint("choice", '{"a": 1}'),
        of_choices(["a"] * (MAX_CHOICES + 1)),
        Constraint("json", "{"),
        Constraint("json", ""),
        Constraint("json", "[" * 100_000),
        Constraint("json", json.dumps({"enum": ["x" * MAX_SOURCE]})),
    ],
    ids=lambda constraint: f"{constraint.kind} {constraint.source[:20]}",
)
def test_fb060_what_cannot_be_used_is_refused(constraint: Constraint) -> None:
    refused(constraint)


def test_schemas_in_schemas_and_nothing_else() -> None:
    schema = {
        "enum": [{"not": {}}],
        "properties": {"not": {"const": {"items": {}}}},
        "items": [{"title": "a"}],
        "prefixItems": [{"title": "b"}, True],
        "$defs": {"x": {"if": {"title": "c"}}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        (),
        ("properties", "not"),
        ("items", 0),
        ("prefixItems", 0),
        ("$defs", "x"),
        ("$defs", "x", "if"),
    ]
