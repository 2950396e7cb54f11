"""What is admitted and what is refused before a request is queued, and how finished texts are judged, in processes that may
be killed for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from api.constraints import Constraints
from api.schemas.output_format import Demand
from shared.errors import Cancelled, InvalidRequest, UnsupportedParameter
from shared.frames import Error
from shared.structured import ANY_OBJECT, Constraint, of_choices, of_schema
from tests.conftest import ROOT, needs_jsonschema
from tests.unit.fakes import CARD, FakeStore

OBEYING = msgspec.structs.replace(CARD, constraints=True)
SCHEMA = "response_format.json_schema.schema"
PERSON = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["title", "year"],
    "additionalProperties": False,
}
#: A pattern that Python's `re` needs for ever for, and that only it can read.
CATASTROPHIC = "^(?=(a+)+$)"
#: Seconds that a check may take on a busy machine; without a limit it would be years.
SOON = 10.0


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints()
    yield made
    made.close()


def demand(schema: Any, *, strict: bool = False) -> Demand:
    return Demand(of_schema(schema), SCHEMA, strict)


@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        (demand(PERSON), False),
        (demand(PERSON, strict=True), False),
        (demand({"type": "array", "uniqueItems": True}), True),
        (Demand(Constraint("json", ANY_OBJECT), "response_format"), False),
        (Demand(Constraint("regex", "a+"), "regex"), False),
        (Demand(of_choices(["a", "b"]), "choice"), False),
    ],
)
def test_what_masks_guarantee_is_told_apart(constraints: Constraints, asked: Demand, whole: bool) -> None:
    assert constraints.admit(asked, OBEYING) == msgspec.structs.replace(asked.constraint, whole=whole)
    assert constraints.admit(asked, CARD).whole, "this engine obeys no mask"


def test_strict_with_a_keyword_that_is_not_enforced_is_refused(constraints: Constraints) -> None:
    for card in (OBEYING, CARD):
        with pytest.raises(UnsupportedParameter) as caught:
            constraints.admit(demand({"properties": {"a": {"uniqueItems": True}}}, strict=True), card)
        assert caught.value.param == f"{SCHEMA}.properties.a.uniqueItems" and "uniqueItems" in caught.value.message


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (demand(False), SCHEMA),
        (demand({"properties": {"a": {"$ref": "#/nope"}}}), f"{SCHEMA}.properties.a.$ref"),
        (demand({"items": {"$ref": "http://127.0.0.1:1/x"}}), f"{SCHEMA}.items.$ref"),
        (demand({"pattern": "("}), f"{SCHEMA}.pattern"),
        (demand({"$ref": "#"}), SCHEMA),
        (Demand(Constraint("regex", "("), "regex"), "regex"),
        (Demand(Constraint("grammar", "root ::= ("), "grammar"), "grammar"),
    ],
)
def test_what_cannot_be_met_is_refused_with_its_place(constraints: Constraints, asked: Demand, param: str) -> None:
    for _ in range(2):  # also when it is known already
        with pytest.raises(InvalidRequest) as caught:
            constraints.admit(asked, OBEYING)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", param)
        assert "Traceback" not in caught.value.message and caught.value.message.isprintable()


@needs_jsonschema
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "strin"}, "type"),
        ({"properties": {"a": {"type": 5}}}, "properties.a.type"),
        ({"properties": []}, "properties"),
        ({"minimum": "a"}, "minimum"),
        ({"required": "a"}, "required"),
        ({"items": {"anyOf": [{"maxLength": -1}]}}, "items.anyOf.0.maxLength"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$defs": 1, "definitions": {"a": 5}}, "definitions.a"),
    ],
)
def test_fb047_what_is_no_schema_is_refused_with_its_place(constraints: Constraints, schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraints.admit(demand(schema), OBEYING)
    assert caught.value.param == f"{SCHEMA}.{path}"


def test_a_constraint_is_checked_once(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = demand({"type": "object", "title": "once"})
    constraints.admit(asked, OBEYING)
    monkeypatch.setattr(constraints._children, "ask", None)
    assert constraints.admit(asked, OBEYING)


# -- finished texts

RIGHT = '{"title":"x","year":1}'
#: Of the script's texts, those that are not even one JSON object, and those that only a schema tells to be wrong.
NO_JSON = [
    "# Heading",
    '{"title":"x","year":1',
    '{"title":"x","title":"y","year":1}',
    '{"title":"x","year":NaN}',
    "",
    "[]",
]
NO_JSON += [RIGHT + RIGHT, '{"title":"\ud800","year":1}', '{"title":"x","year":1e999}', '{"a":' * 70 + "1" + "}" * 70]
WRONG = ['{"title":"x"}', '{"title":"x","year":1,"z":2}', '{"title":"x","year":"1"}']


@pytest.mark.parametrize("text", NO_JSON, ids=ascii)
def test_what_is_no_json_does_not_hold(constraints: Constraints, text: str) -> None:
    assert not constraints.holds(of_schema(PERSON), text)


@needs_jsonschema
@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_meet_the_schema_does_not_hold(constraints: Constraints, text: str) -> None:
    assert not constraints.holds(of_schema(PERSON), text)


def test_what_is_right_holds(constraints: Constraints) -> None:
    assert constraints.holds(of_schema(PERSON), RIGHT)
    assert constraints.holds(of_schema(PERSON), ' {"year": 1,\n"title": "é\\n"} '), "in any order"
    assert constraints.holds(of_schema({"minimum": 1}), "2") and constraints.holds(of_schema({}), "null")
    assert constraints.holds(Constraint("json", ANY_OBJECT), '{"a":[1]}')
    assert not constraints.holds(Constraint("json", ANY_OBJECT), "1")
    for constraint, right, wrong in [
        (Constraint("regex", "a+b"), "aab", "aa"),
        (Constraint("grammar", 'start: "x" | "y"'), "y", "z"),
        (of_choices(["ja", "nein"]), "nein", "ne"),
    ]:
        assert constraints.holds(constraint, right) and not constraints.holds(constraint, wrong)


@needs_jsonschema
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": r"^\p{L}+$"}, '"äb"', '"ä1"'),
        ({"type": "string", "pattern": "b"}, '"a\\nb\\u007f"', '"a"'),
        ({"type": "string", "pattern": "^(?=a)"}, '"ab"', '"b"'),
        ({"format": "date"}, '"2026-11-30"', '"2026-11-31"'),
        ({"items": {"$ref": "#/definitions/n"}, "definitions": {"n": {"type": "integer"}}}, "[1]", '["1"]'),
    ],
)
def test_what_a_schema_says_in_words_of_its_own(constraints: Constraints, schema: Any, right: str, wrong: str) -> None:
    assert constraints.holds(of_schema(schema), right) and not constraints.holds(of_schema(schema), wrong)


@needs_jsonschema
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": CATASTROPHIC}, json.dumps("a" * 50 + "b")),
        ({"type": "object", "patternProperties": {CATASTROPHIC: {}}}, json.dumps({"a" * 50 + "b": 1})),
        (
            {"$defs": {"0": {"type": "string"}, **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n - 1}"}] * 20} for n in range(1, 7)}},
             "$ref": "#/$defs/6"},
            "5",
        ),
    ],
)  # fmt: skip
def test_fb056_a_check_that_takes_for_ever_is_ended(constraints: Constraints, schema: Any, text: str) -> None:
    began = time.monotonic()
    assert not constraints.holds(of_schema(schema), text)
    assert time.monotonic() - began < SOON
    assert constraints.holds(of_schema(PERSON), RIGHT), "and the next one is made"


@needs_jsonschema
def test_fb056_what_the_package_stumbles_over_does_not_hold(constraints: Constraints) -> None:
    assert not constraints.holds(of_schema({"format": "regex"}), json.dumps("(" * 500))
    assert not constraints.holds(of_schema(PERSON), "[" * 100_000)
    assert not constraints.holds(of_schema({"items": {"$ref": "http://127.0.0.1:1/x"}}), "[1]"), "nothing is fetched"


def test_greenlets_run_on_while_a_text_is_checked() -> None:
    """In a process as the server's: a client's pattern stops no stream."""
    code = f"""
from gevent import monkey; monkey.patch_all()
import gevent, time
from api.constraints import Constraints
from shared.structured import Constraint, of_schema
constraints, gaps, stop = Constraints(), [], []
constraints.holds(of_schema({{}}), "1")
def tick():
    last = time.monotonic()
    while not stop:
        gevent.sleep(0.01)
        gaps.append(time.monotonic() - last - 0.01)
        last += gaps[-1] + 0.01
ticking = gevent.spawn(tick)
constraints.holds(of_schema({{"pattern": {CATASTROPHIC!r}}}), '"' + "a" * 50 + 'b"')
gevent.sleep(0.3)
stop.append(1)
ticking.join()
constraints.close()
print(len(gaps), sorted(gaps)[len(gaps) // 2])
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    ticks, median = out.stdout.split()[-2:]
    assert int(ticks) > 20 and float(median) < 0.05


# -- in a request


@pytest.fixture
def client(make_client: Callable[..., FlaskClient], store: FakeStore) -> FlaskClient:
    return make_client()


REFUSED: list[tuple[dict[str, Any], str]] = [
    # FB-049
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}}, "response_format"),
    # FB-047
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "string"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}}, SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "("}}}}, f"{SCHEMA}.pattern"),
    # FB-060
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": ""}, "grammar"),
    ({"grammar": "x" * 1_000_000}, "grammar"),
    ({"regex": ""}, "regex"),
    ({"choice": []}, "choice"),
    ({"choice": ["a", ""]}, "choice"),
    ({"choice": [1]}, "choice"),
    ({"regex": "a", "choice": ["a"]}, "choice"),
    ({"response_format": {"type": "json_object"}, "grammar": 'start: "a"'}, "grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: ascii(value)[:70])
def test_a_request_is_refused_before_it_is_queued(
    client: FlaskClient, store: FakeStore, fields: dict[str, Any], param: str
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert answer.status_code == 400 and answer.json is not None and answer.json["error"]["param"] == param, answer.data
    assert "submit" not in store.calls


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "regex": None}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json", ANY_OBJECT, whole=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": 1, "a": 2}, "strict": None}}},
            Constraint("json", '{"b":1,"a":2}', whole=True),
        ),
        ({"choice": ["a", "é"]}, Constraint("choice", '["a","é"]', whole=True)),
    ],
)  # fmt: skip
def test_a_request_takes_its_constraint_along(
    client: FlaskClient, store: FakeStore, fields: dict[str, Any], constraint: Constraint | None
) -> None:
    store.script = lambda job: iter([Error.of(Cancelled("that is enough"))])
    body = json.dumps({"prompt": "x", **fields})  # in this order
    answer = client.post("/v1/completions", data=body, content_type="application/json")
    [job] = store.jobs
    assert job.constraint == constraint and job.version == (1 if constraint is None else 2), answer.data
