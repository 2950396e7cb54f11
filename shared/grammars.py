"""From a constraint to what llguidance enforces, and what of a JSON schema it does not.

The API asks before it queues a request, the worker before it runs one: by the same code, so they agree. Nothing here knows a
model's vocabulary; the answer is the same for all of them. Importing it loads llguidance.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from math import prod
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.narrowing import closed, narrowed
from shared.reasoning import Reasoning
from shared.structured import Constraint, Path, Unmet, schema_place, subschemas
from shared.tool_grammar import grammar_of

#: White space between the tokens of JSON: a run of it once at each place, with or without a line break. Without a bound, a
#: model that likes white space writes nothing else (FB-051).
WHITESPACE = r" {1,16}|\n {0,16}"
#: Largest multiple, without trailing zeros: the engine counts remainders, a state each. Several may meet in one number.
MAX_MULTIPLE = 10_000
#: Characters of the engine's own words in a message.
_MAX_WORDS = 200

#: What bounds a mask: some 15 ms at most, then the text fails. `precompute_large_lexemes` would walk the whole vocabulary
#: when a grammar is compiled, for minutes if a pattern is made for it.
LIMITS = LLParserLimits(max_items_in_row=5000, precompute_large_lexemes=False, verbose_errors=False)

#: What llguidance says of a keyword that it does not enforce -> the keyword, unless the words name it.
_NOT_ENFORCED: tuple[tuple[str, str | None], ...] = (
    (r'Unimplemented keys: \["([^"]+)"', None),
    (r"Unknown format", "format"),
    (r"oneOf constraints are not supported", "oneOf"),
    (r"patternProperty regexes .* are not disjoint", "patternProperties"),
    (r"look-?around|backreferences? (?:is|are) not supported", "pattern"),
    (r"'multipleOf' has too many digits", "multipleOf"),
    (r"min/maxProperties only supported", "minProperties"),
)
#: Of those, what its lenient mode does not leave out by itself.
_DROPPED = ("patternProperties", "pattern", "multipleOf")
#: Formats of draft 2020-12, section 7.3 of its validation part. Any other is a note for people.
_FORMATS = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
_COUNTS = re.compile("(?:min|max)(?:Items|Length|Properties|Contains)")


@dataclass(frozen=True, slots=True)
class Plan:
    """`grammar`: for LLMatcher. `missing`: the first keyword that it does not enforce, at `path`; None: it enforces all."""

    grammar: str
    missing: str | None = None
    path: Path = ()


def plan(constraint: Constraint) -> Plan:
    """How a text is held to the constraint. Raises Unmet where it cannot be, not even in part.

    May take a second, most of it without the GIL; a pattern made for it could take longer, which only a process of its own
    can be kept from."""
    constraint.check()
    if constraint.kind == "json":
        return _plan_json(constraint.schema)
    if constraint.kind == "tools":
        return _plan_tools(constraint)
    if constraint.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(constraint.source)
    elif constraint.kind == "choice":
        texts = " | ".join(map(_quoted, constraint.choices))
        grammar = LLMatcher.grammar_from_lark(f"start: {texts}")
    else:
        grammar = LLMatcher.grammar_from_lark(constraint.source)
        _, words = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
        if any("no tokenizer" in word for word in words):
            raise Unmet("names tokens of a model; a grammar here is one of texts")
    if (error := _error(grammar)) is not None:
        raise Unmet(f"cannot be used: {_in_short(error)}")
    return Plan(grammar)


def behind_reasoning(grammar: str, reasoning: Reasoning) -> str:
    """A grammar of texts that follow `grammar` once the model has reasoned; unless it is inside already, it need not."""
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    begin = "thinking" if reasoning.opened else f"(blank {_quoted(reasoning.open)} thinking)?"
    text = (
        f"start: {begin} blank @answer\nblank: /[ \\n\\r\\t]{{0,16}}/\n"
        f"thinking[suffix={_quoted(reasoning.close)}]: /(?s:.*)/\n"
    )
    first = {"name": "reasoning", "lark_grammar": text}
    return json.dumps({"grammars": [first, {**parts[0], "name": "answer"}, *parts[1:]]}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """As Lark writes a text."""
    return json.dumps(text, ensure_ascii=False)


def meets(grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=LIMITS)
    raw = text.encode()
    return matcher.try_consume_tokens(list(raw)) == len(raw) and not matcher.is_error() and matcher.is_accepting()


def _plan_tools(constraint: Constraint) -> Plan:
    plans: list[Plan] = []
    missing: Plan | None = None
    for number, function in enumerate(constraint.calls.functions):
        place = schema_place(number)
        try:
            planned = _plan_json(function.parameters)
        except Unmet as unmet:
            raise unmet.below(place) from None
        if planned.missing is not None:
            path = (*place, *planned.path)
            if function.strict:
                raise Unmet(f"has {planned.missing}, which is not enforced here, and strict asks for that", path)
            missing = missing or Plan("", planned.missing, path)
        plans.append(planned)
    grammar = grammar_of(constraint.calls, [planned.grammar for planned in plans])
    if (error := _error(grammar)) is not None:
        raise Unmet(f"cannot be used: {_in_short(error)}")
    return Plan(grammar) if missing is None else Plan(grammar, missing.missing, missing.path)


def _plan_json(schema: Any) -> Plan:
    try:
        return _planned(schema)
    except (TypeError, ValueError, AttributeError):  # nobody may have looked whether its keywords have values of theirs
        raise Unmet("is no JSON schema") from None


def _planned(schema: Any) -> Plan:
    if schema is False:
        raise Unmet("allows no text at all")
    schema = {} if schema is True else schema
    if (narrower := closed(schema)) is not schema:
        try:
            return _planned_as(simplified(narrower))
        except Unmet:  # the wider one may be met, and if not, its own words are the reason
            pass
    return _planned_as(simplified(schema))


def _planned_as(simple: dict[str, Any]) -> Plan:
    error, grammar = "", ""
    if _multiples(simple) > MAX_MULTIPLE:
        missing: str | None = "multipleOf"
    else:
        grammar = _json_grammar(simple)
        if (found := _error(grammar)) is None:
            return Plan(grammar)
        error, missing = found, _keyword(found, simple)
    if missing is None:
        raise _unmet(simple, error)
    path = _place(simple, missing, error)
    try:
        return Plan(_in_part(simple, missing, narrow=True), missing, path)
    except Unmet:  # what was left may be nothing, or too much
        return Plan(_in_part(simple, missing, narrow=False), missing, path)


def _in_part(schema: dict[str, Any], keyword: str | None, *, narrow: bool) -> str:
    """A grammar of what can be enforced, without `keyword` and what else cannot be. `narrow`: where that can be put into other
    words, it is, so that its texts will be right. Raises Unmet."""
    done: set[str] = set()
    lenient = False
    while True:
        new = keyword is not None and keyword not in done
        if narrow and new and (narrower := narrowed(schema, keyword or "")) is not None:
            schema = narrower
        elif keyword in _DROPPED and new:
            schema = _without(schema, keyword)
        else:
            lenient = True
        done.add(keyword or "")
        grammar = _json_grammar(schema, lenient=lenient)
        if (error := _error(grammar)) is None:
            return grammar
        keyword = _keyword(error, schema)
        if keyword is None or (lenient and (keyword in done or keyword not in _DROPPED)):
            raise _unmet(schema, error)


def _unmet(schema: dict[str, Any], error: str) -> Unmet:
    return Unmet(f"cannot be used: {_in_short(error)}", _at_fault(schema, error))


def simplified(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema in words that the engine knows, without those that say nothing."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    made.pop("x-guidance", None)  # the engine's own options
    places = list(subschemas(made))
    # These say what is left for others, also where they forbid nothing themselves.
    counted = any(keyword.startswith("unevaluated") for _, found in places for keyword in found)
    for _, found in places:
        for keyword, value in list(found.items()):
            if _COUNTS.fullmatch(keyword) and isinstance(value, float) and value.is_integer():
                found[keyword] = int(value)
        if found.get("uniqueItems") is False:
            del found["uniqueItems"]
        if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
            del found["format"]
        if not counted:
            _rewrite(found)
    return made


def _rewrite(schema: dict[str, Any]) -> None:
    """Puts keywords into others that mean the same, or leaves out what means nothing."""
    more: list[Any] = []
    if schema.get("not", False) in (True, {}, False):
        more += [schema.pop("not", False) is False]
    condition = schema.get("if")
    if isinstance(condition, bool):
        more.append(schema.get("then" if condition else "else", True))
    if condition is None or isinstance(condition, bool) or not schema.keys() & {"then", "else"}:
        _drop(schema, "if", "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    if isinstance(options := schema.get("oneOf"), list) and sum(option is True for option in options) > 1:
        more.append(False)
        del schema["oneOf"]
    for keyword in ("dependentRequired", "dependentSchemas"):
        for name, needed in _items(schema.pop(keyword, None)):
            needs = (
                {"required": [name, *needed]} if isinstance(needed, list) else {"required": [name], "allOf": [needed]}
            )
            more.append({"anyOf": [{"properties": {name: False}}, needs]})
    if more := [part for part in more if part is not True]:
        schema["allOf"] = [*schema.get("allOf", ()), *more]


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _drop(schema: dict[str, Any], *keywords: str) -> None:
    for keyword in keywords:
        schema.pop(keyword, None)


def _json_grammar(schema: dict[str, Any], *, lenient: bool = False) -> str:
    options: Any = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": WHITESPACE,
        "coerce_one_of": lenient,
        "lenient": lenient,
    }
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:  # nested too deep for its reader
        raise Unmet(f"cannot be used: {_in_short(str(error))}") from None


def _multiples(schema: dict[str, Any]) -> int:
    """What numbers that are multiples of all that the schema names are multiples of, at most; without trailing zeros."""
    found = {
        subschema.get("multipleOf") for _, subschema in subschemas(schema) if _is_number(subschema.get("multipleOf"))
    }
    return prod(int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))) for value in found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _keyword(error: str, schema: dict[str, Any]) -> str | None:
    """The keyword that is not enforced; None: the schema is at fault, or too much."""
    for words, keyword in _NOT_ENFORCED:
        if found := re.search(words, error):
            keyword = keyword or found[1]
            if keyword == "minProperties" and not _place(schema, keyword):
                return "maxProperties"
            if keyword in ("then", "else"):
                return "if"
            if keyword == "pattern" and not any(map(_is_foreign, _values(schema, "pattern"))):
                return "patternProperties"
            return keyword
    return None


def _values(schema: dict[str, Any], keyword: str) -> list[Any]:
    return [found[keyword] for _, found in subschemas(schema) if keyword in found]


def _is_foreign(pattern: Any) -> bool:
    """Whether the engine cannot read the pattern."""
    return isinstance(pattern, str) and _error(_json_grammar({"pattern": pattern}, lenient=True)) is not None


def _place(schema: dict[str, Any], keyword: str, error: str = "") -> Path:
    """Where the keyword stands first; with the value of which the error speaks, if there is one. () if nowhere."""
    places = {(*path, keyword): found[keyword] for path, found in subschemas(schema) if keyword in found}
    named = [(len(value), path) for path, value in places.items() if isinstance(value, str) and value in error]
    return max(named, key=lambda entry: entry[0])[1] if named else next(iter(places), ())


def _at_fault(schema: dict[str, Any], error: str) -> Path:
    """Where the schema is at fault, as far as the error tells."""
    if found := re.match(r"(?:Resource|Pointer|Anchor) '([^']*)'", error):
        for keyword in ("$ref", "$schema", "$dynamicRef"):
            for path, subschema in subschemas(schema):
                if str(subschema.get(keyword, "")).endswith(found[1]):
                    return (*path, keyword)
    return _place(schema, "pattern", error) if error.startswith("regex") else ()


def _without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """The schema without a keyword; of patterns, without those that the engine cannot read."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    for _, found in subschemas(made):
        if keyword != "pattern" or _is_foreign(found.get("pattern")):
            found.pop(keyword, None)
    return made


def _error(grammar: str) -> str | None:
    """Why no text can follow the grammar, in the engine's words; None if some can."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what leads nowhere only shows here
    return matcher.get_error() if matcher.is_error() else None


def _in_short(error: str) -> str:
    """The engine's words as they may stand in a message."""
    if error.startswith("NoExtension"):
        return "no text can ever be finished"
    if found := re.match("Resource '([^']*)' is not present", error):
        return f"it refers to {found[1][:_MAX_WORDS]!r}, which is not in it, and nothing is fetched"
    line = error.rpartition("error: ")[2].partition("\n")[0]  # behind it, the place in the grammar's text
    return "".join(character if character.isprintable() else " " for character in line[:_MAX_WORDS])


@functools.cache
def _bytes() -> LLTokenizer:
    """A vocabulary of the 256 bytes."""
    return LLTokenizer("byte")
