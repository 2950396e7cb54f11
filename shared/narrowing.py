"""Schemas put into narrower words, at the price of leaving out some texts that would be right.

Where a schema says `not`, `oneOf` or `if`, which no grammar enforces, a text that was written without them would often be
wrong. Where an object may have properties that nobody named, small models invent them without end. A narrower schema, whose
texts all meet the wider one, is something a grammar can keep to. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from shared.structured import parts_of, subschemas

#: Of JSON; integers are numbers.
TYPES = ("null", "boolean", "number", "string", "array", "object")
#: Deepest look into what a schema refers to.
MAX_REFERENCES = 8
#: Keyword -> the type that it bounds, the keyword of the other side, and how far beyond the bound that one begins.
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
#: Strings that others can be told from by a pattern: so many, and such ones.
MAX_WORDS = 8
_WORD = re.compile(r"[A-Za-z0-9_ ]{1,32}")
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}

#: With these, a property that an object does not name may be wanted elsewhere in the schema.
_COUPLED = frozenset(
    [
        "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas", "dependentRequired", "enum", "const",
        "patternProperties", "propertyNames", "minProperties", "maxProperties", "contains",
    ]
)  # fmt: skip
#: These look beyond the place where they stand.
_FAR = frozenset(["$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"])
#: What stands beside a reference or alternatives without demanding anything of the same value.
_BESIDE = frozenset(
    [
        "$schema", "$id", "$defs", "definitions", "$comment", "type", "title", "description", "default", "examples",
        "deprecated", "readOnly", "writeOnly",
    ]
)  # fmt: skip


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema in which objects have the properties that it names for them and no others, unless it speaks of others, and
    wherever no other part of it may ask for more. The same one, if that is nowhere."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    places = _free_places(made)
    for found in places:
        named = {
            **found["properties"],
            **{name: True for name in found.get("required", ()) if name not in found["properties"]},
        }
        found.update(properties=named, additionalProperties=False)
    return made if places else schema


def _free_places(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects' schemas in `root` that nothing but themselves holds their values to, and that leave others open."""
    if any(_FAR & found.keys() or ("$id" in found and path) for path, found in subschemas(root)):
        return []
    free: dict[int, dict[str, Any]] = {}
    bound: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, True)]
    while waiting:
        found, alone = waiting.pop()
        if not isinstance(found, dict) or id(found) in (free if alone else bound):
            continue
        if alone:
            free[id(found)] = found
        else:
            bound.add(id(found))
        others = found.keys() - _BESIDE
        sole = others <= {"$ref"} or others <= {"anyOf"} or (others <= {"allOf"} and len(found.get("allOf", ())) < 2)
        alone = alone and (sole or not others & _COUPLED)
        if "$ref" in found:
            target = _target(found["$ref"], root)
            if target is True:
                return []
            waiting.append((target, alone))
        waiting += [(part, alone) for path, part in parts_of(found) if path[0] not in ("$defs", "definitions")]
    return [
        found
        for key, found in free.items()
        if key not in bound
        and isinstance(found.get("properties"), dict)
        and "additionalProperties" not in found
        and not found.keys() & _COUPLED
    ]


def narrowed(schema: dict[str, Any], keyword: str) -> dict[str, Any] | None:
    """The schema without `keyword`, whose texts meet it, as far as that can be told; None for a keyword with no rule."""
    rule = _RULES.get(keyword)
    if rule is None:
        return None
    made: dict[str, Any] = json.loads(json.dumps(schema))
    for _, found in list(subschemas(made)):
        if keyword in found:
            found["allOf"] = [*found.get("allOf", ()), rule(found, made)]
            for name in ("if", "then", "else") if keyword == "if" else (keyword,):
                found.pop(name, None)
    return made


def complement(schema: Any, root: Any, depth: int = 0) -> Any:
    """A schema none of whose texts meets `schema`: all others, or some of them. False: there are none; None: none is known."""
    if isinstance(schema, bool):
        return not schema
    if not schema:
        return False
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return None
    parts = [part for keyword, value in schema.items() for part in _against(keyword, value, schema, root, depth)]
    parts = [part for part in parts if part is not False and part is not None]
    return True if True in parts else {"anyOf": parts} if parts else None


def _against(keyword: str, value: Any, schema: dict[str, Any], root: Any, depth: int) -> list[Any]:
    """Schemas whose texts do not meet one keyword."""

    def against(part: Any) -> Any:
        return complement(part, root, depth + 1) or False

    if keyword == "type":
        return [_other_types([value] if isinstance(value, str) else value)]
    if keyword in ("const", "enum"):
        return _other_values([value] if keyword == "const" else value)
    if keyword in _BOUNDS:
        return [{"type": "number", _BOUNDS[keyword]: value}]
    if keyword in _COUNTS:
        kind, other, step = _COUNTS[keyword]
        return [{"type": kind, other: value + step}] if value + step >= 0 else []
    if keyword == "required":
        return [{"type": "object", "properties": {name: False}} for name in value]
    if keyword == "properties":
        wrong = {name: against(part) for name, part in value.items()}
        return [
            {"type": "object", "required": [name], "properties": {name: wrong[name]}} for name in wrong if wrong[name]
        ]
    if keyword == "items" and "prefixItems" not in schema and (part := against(value)):
        return [{"type": "array", "minItems": 1, "prefixItems": [part]}]
    if keyword == "allOf":
        return [against(part) for part in value]
    if keyword in ("anyOf", "oneOf"):
        wrong_parts = [against(part) for part in value]
        return [] if False in wrong_parts else [{"allOf": wrong_parts}]
    if keyword == "not":
        return [value]
    if keyword == "$ref":
        return [against(_target(value, root))]
    return []


def _other_types(types: Any) -> Any:
    """All other types; beside integers no numbers, since a grammar of the others among them is not known."""
    left = [kind for kind in TYPES if kind not in types and not (kind == "number" and "integer" in types)]
    return {"type": left} if left else False


def _other_values(values: list[Any]) -> list[Any]:
    """Values of other types; of the same ones those that are beyond all, and strings that differ from each."""
    others: list[Any] = [_other_types([_type_of(value) for value in values])]
    booleans = [value for value in values if isinstance(value, bool)]
    numbers = [value for value in values if _type_of(value) == "number"]
    strings = [value for value in values if isinstance(value, str)]
    if len(set(booleans)) == 1:
        others.append({"const": not booleans[0]})
    if numbers:
        others += [
            {"type": "number", "exclusiveMinimum": max(numbers)},
            {"type": "number", "exclusiveMaximum": min(numbers)},
        ]
    if strings and len(strings) <= MAX_WORDS and all(map(_WORD.fullmatch, strings)):
        others.append({"type": "string", "allOf": [_other_than(string) for string in strings]})
    elif strings:
        others.append({"type": "string", "minLength": max(map(len, strings)) + 1})
    return others


def _other_than(word: str) -> dict[str, Any]:
    """Strings that differ from a word in a character, or in their length."""
    differs = "|".join(f"{word[:place]}[^{character}]" for place, character in enumerate(word))
    return {"anyOf": [{"pattern": f"^({differs})"}, {"maxLength": len(word) - 1}, {"minLength": len(word) + 1}]}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _target(reference: Any, root: Any) -> Any:
    """What a reference into the schema itself stands for; True, which has no complement, where that is not plain to see."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found


def _not(schema: dict[str, Any], root: Any) -> Any:
    return complement(schema["not"], root) or True


def _one_of(schema: dict[str, Any], root: Any) -> Any:
    """Each alternative without what the others allow; where that is not known, with it."""
    options = schema["oneOf"]
    wrong = [complement(option, root) for option in options]
    return {
        "anyOf": [
            {"allOf": [option, *(part for other, part in enumerate(wrong) if other != number and part is not None)]}
            for number, option in enumerate(options)
        ]
    }


def _if(schema: dict[str, Any], root: Any) -> Any:
    condition = schema["if"]
    return {
        "anyOf": [
            {"allOf": [condition, schema.get("then", True)]},
            {"allOf": [complement(condition, root) or False, schema.get("else", True)]},
        ]
    }


_RULES: dict[str, Callable[[dict[str, Any], Any], Any]] = {"not": _not, "oneOf": _one_of, "if": _if}
