"""The process that checks schemas and grammars, and finished texts against them, for `constraints.py`; run as a script.

Its time and memory are limited (`child_process.py`): a client's pattern may take for ever, and so may a schema. Without the
jsonschema package it only looks whether a text is JSON, and an object where the schema says so.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Of a constraint alone: `missing` and `path` as in Plan, or `reason` and `path` as in Unmet. With a `text`: whether it is
    `right`. `validates`: there is jsonschema."""
    constraint = Constraint(question["kind"], question["source"])
    found: dict[str, Any] = {"validates": jsonschema is not None}
    try:
        if "text" in question:
            return {**found, "right": _is_right(constraint, question["text"])}
        if constraint.kind == "json":
            constraint.check()
            _check_schema(constraint.schema)
        elif constraint.kind == "tools":
            constraint.check()
            for number, function in enumerate(constraint.calls.functions):
                try:
                    _check_schema(function.parameters)
                except Unmet as unmet:
                    raise unmet.below(schema_place(number)) from None
        planned = plan(constraint)
    except Unmet as unmet:
        return {**found, "reason": unmet.reason, "path": unmet.path}
    except (MemoryError, RecursionError):
        return {**found, "reason": "is too complex", "path": ()}
    return {**found, "missing": planned.missing, "path": planned.path}


def _is_right(constraint: Constraint, text: str) -> bool:
    if constraint.kind == "json":
        return _is_valid(constraint, text)
    if constraint.kind == "tools":
        return _are_right_calls(constraint.calls, text)
    return meets(_plan(constraint).grammar, text)


def _are_right_calls(calls: Calls, text: str) -> bool:
    functions = {function.name: function for function in calls.functions}
    parser = CallParser(Tools(calls.form, tuple(functions), calls.single))
    found = parser.flush(text)
    if found.content.strip() or not found.calls or not parser.whole:
        return False
    return all(_is_valid(of_schema(functions[call.name or ""].parameters), call.arguments) for call in found.calls)


def _is_valid(constraint: Constraint, text: str) -> bool:
    try:
        value = parse_value(text.encode())
    except (InvalidJson, UnicodeEncodeError):
        return False
    schema = constraint.schema
    if jsonschema is None:
        return isinstance(value, dict) or not _is_object(schema)
    try:
        return bool(_validator(constraint.source).is_valid(value))
    except Exception:  # noqa: BLE001 - a pattern, a format or a reference that the package stumbles over
        return False


@functools.lru_cache(maxsize=64)
def _plan(constraint: Constraint) -> Plan:
    return plan(constraint)


@functools.lru_cache(maxsize=64)
def _validator(source: str) -> Any:
    schema = Constraint("json", source).schema
    kind = jsonschema.validators.extend(_draft(schema), {"pattern": _pattern})
    # A registry of its own, or the package would fetch what a schema refers to.
    return kind(schema, registry=SPECIFICATIONS, format_checker=kind.FORMAT_CHECKER)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """As the grammars read it, in linear time; as Python does only where they cannot (look-around)."""
    if not isinstance(instance, str):
        return
    planned = _plan(of_schema({"type": "string", "pattern": pattern}))
    if planned.missing is None:
        written = json.dumps(instance, ensure_ascii=False).replace("\x7f", "\\u007f")
        found = meets(planned.grammar, written)
    else:
        found = re.search(pattern, instance) is not None
    if not found:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_schema(schema: Any) -> None:
    """Raises Unmet for what is no schema."""
    if jsonschema is None:
        return
    try:
        # Without formats: what a pattern may be, the grammars decide.
        _draft(schema).check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    except jsonschema.SchemaError as error:
        path = tuple(error.absolute_path)
        raise Unmet(f"is no JSON schema: {error.message[:200]}", path) from None


def _draft(schema: Any) -> Any:
    """The validator of the draft that a schema names; of 2020-12, if it names none."""
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)


def _is_object(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") in ("object", ["object"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from api.relay.tool_calls import CallParser  # noqa: E402 - as a script it has to be told where
from api.strict_json import parse_value  # noqa: E402
from shared.errors import InvalidJson  # noqa: E402
from shared.grammars import Plan, meets, plan  # noqa: E402
from shared.structured import Constraint, Unmet, of_schema, schema_place  # noqa: E402
from shared.tool_calls import Tools  # noqa: E402
from shared.tool_grammar import Calls  # noqa: E402

try:
    import jsonschema
    from jsonschema_specifications import REGISTRY as SPECIFICATIONS
except ImportError:
    jsonschema = None

if __name__ == "__main__":
    from api.child_process import run

    run(answer)
