"""What a request's text must be: the constraint as it travels with the job, and its limits.

A constraint is checked in the API before anything is queued, and again by the worker (`Constraint.check`); whether the
grammar engine can hold a text to it is in `shared/grammars.py`. Knows nothing of HTTP, engines and grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from shared.errors import InvalidRequest
from shared.tool_grammar import Calls

#: Longest source, bytes: a schema as JSON, a regular expression, a grammar, the choices.
MAX_SOURCE = 128 << 10
#: Deepest nesting of a schema, and of an answer: what `api/strict_json.py` takes.
MAX_DEPTH = 64
#: JSON values in a schema.
MAX_VALUES = 20_000
#: Properties of one object, each of which is a way to go on wherever one may be left out.
MAX_PROPERTIES = 500
#: Texts to choose from.
MAX_CHOICES = 1000
#: A string, or a number, that the schema does not bound is ended when it has so many bytes: some models never would.
MAX_STRING = 8192
#: So is a string at so much white space in a row.
MAX_BLANKS = 64
#: And one that goes in circles: no more than so many bytes, over and over, so many times and for so many bytes.
MAX_PERIOD, MAX_ROUNDS, MAX_ROUND = 64, 8, 128
#: Items of an array that are all alike: another kind comes, or none, behind so many in a row with so many bytes in all.
MAX_ALIKE, MAX_ALIKE_BYTES = 16, 256
#: A double is written with 24 characters at most.
MAX_NUMBER = 24
#: Digits of an exponent; more, and a number may be beyond a double.
MAX_EXPONENT = 2

#: The keywords of draft 2020-12 that hold schemas: one, a list of them, or an object of them.
_ONE = frozenset(
    [
        "items",
        "additionalProperties",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
    ]
)
_LIST = frozenset(("prefixItems", "allOf", "anyOf", "oneOf"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))

Kind = Literal["json", "regex", "grammar", "choice", "tools"]
#: A place in a JSON document: keys and indices from the root on.
Path = tuple[str | int, ...]

#: The schema of `{"type": "json_object"}`.
ANY_OBJECT = '{"type":"object"}'


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """`source`: a JSON schema, a regular expression, a grammar in Lark (llguidance's), an array of texts, as JSON, or
    calls of tools (`Calls`), as JSON.
    `whole`: masks alone do not guarantee it, so the text is sent when it is finished and found right, not before.
    """

    kind: Kind
    source: str
    whole: bool = False

    @property
    def schema(self) -> Any:
        """Of kind json."""
        return json.loads(self.source)

    @property
    def choices(self) -> list[str]:
        """Of kind choice."""
        texts: list[str] = json.loads(self.source)
        return texts

    @property
    def calls(self) -> Calls:
        """Of kind tools."""
        return msgspec.json.decode(self.source, type=Calls)

    def check(self) -> None:
        """Its limits, for what could cost much before anybody notices.

        Raises Unmet, or InvalidRequest for what is no constraint at all."""
        if len(self.source.encode()) > MAX_SOURCE:
            raise Unmet(f"is longer than the {MAX_SOURCE} bytes it may have")
        try:
            if self.kind == "json":
                _check_schema(self.schema)
            elif self.kind == "choice":
                _check_choices(json.loads(self.source))
            elif self.kind == "tools":
                _check_calls(self.calls)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            raise Unmet("is not readable") from None
        if not self.source:
            raise Unmet("must not be empty")


class Unmet(InvalidRequest):
    """A constraint that no text can be held to. `reason` goes on from its name; `path` is the place in its source."""

    def __init__(self, reason: str, path: Path = ()) -> None:
        super().__init__(f"The demanded form of the text {reason}.")
        self.reason = reason
        self.path = path

    def below(self, place: Path) -> Unmet:
        """The same, of a source that stands there in another."""
        return Unmet(self.reason, (*place, *self.path))


def of_schema(schema: Any) -> Constraint:
    """The constraint that a JSON schema is; the order of its keys stays, since properties come in it."""
    return Constraint("json", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def of_calls(calls: Calls) -> Constraint:
    return Constraint("tools", msgspec.json.encode(calls).decode())


def schema_place(number: int) -> Path:
    """Where the schema of a function is in the tools of a request."""
    return (number, "function", "parameters")


def of_choices(texts: list[str]) -> Constraint:
    return Constraint("choice", json.dumps(texts, ensure_ascii=False, separators=(",", ":")))


def subschemas(schema: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """All schemas in a schema that are objects, itself included, each with its place. What stands in `enum`, `const` or
    `default` is no schema."""
    waiting: list[tuple[Path, Any]] = [(path, schema)]
    while waiting:
        place, found = waiting.pop()
        if not isinstance(found, dict):
            continue
        yield place, found
        waiting += reversed([((*place, *step), part) for step, part in parts_of(found)])


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas right below a schema, each with the way to it."""
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield (keyword,), value
        if (keyword in _LIST or keyword == "items") and isinstance(value, list):
            yield from (((keyword, number), item) for number, item in enumerate(value))
        if keyword in _NAMED and isinstance(value, dict):
            yield from (((keyword, name), item) for name, item in value.items())


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise Unmet("must be a JSON schema: an object, true or false")
    values = 0
    level = [schema]
    for _ in range(MAX_DEPTH + 1):
        values += len(level)
        level = [item for value in level for item in _below(value)]
        if not level:
            break
    if level:
        raise Unmet(f"is nested deeper than {MAX_DEPTH} levels")
    if values > MAX_VALUES:
        raise Unmet(f"has more than {MAX_VALUES} values")
    for path, found in subschemas(schema):
        for keyword in ("properties", "patternProperties"):
            if isinstance(named := found.get(keyword), dict) and len(named) > MAX_PROPERTIES:
                raise Unmet(f"has more than {MAX_PROPERTIES} properties in one object", (*path, keyword))


def _check_calls(calls: Calls) -> None:
    if not calls.is_sound:
        raise Unmet("must be functions with names")
    for number, function in enumerate(calls.functions):
        try:
            _check_schema(function.parameters)
        except Unmet as unmet:
            raise unmet.below(schema_place(number)) from None


def _below(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value) if isinstance(value, list) else iter(())


def _check_choices(texts: Any) -> None:
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_CHOICES:
        raise Unmet(f"must be 1 to {MAX_CHOICES} texts")
    if not all(isinstance(text, str) and text for text in texts):
        raise Unmet("must be texts that are not empty")
