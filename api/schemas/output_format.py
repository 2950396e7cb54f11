"""Fields that constrain the form of the output: response_format, regex, grammar, choice.

Their shape is checked here; what they may say is checked in `api/constraints.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema

from api.schemas.strict import StrictRequest
from shared.errors import InvalidRequest
from shared.structured import ANY_OBJECT, Constraint, Unmet, of_choices, of_schema

#: What `check_output_format` takes, as JSON schemas. Further keys are ignored.
RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "oneOf": [
        {"properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "required": ["json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["name", "schema"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "schema": {"type": ["object", "boolean"]},
                        "strict": {"type": ["boolean", "null"]},
                    },
                },
            },
        },
    ],
}
#: What errors of a schema begin their `param` with.
SCHEMA_PARAM = "response_format.json_schema.schema"
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TEXTS: dict[str, Any] = {"type": "array", "minItems": 1, "items": _TEXT}


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request's text must be. `param`: the field that says so; `strict`: masks must enforce all of it."""

    constraint: Constraint
    param: str
    strict: bool = False

    def where(self, path: Sequence[str | int] = ()) -> str:
        """A place in it, as a client would write it. (Names in a schema may be long, and anything.)"""
        return ".".join([self.param, *map(str, path)])[:256]

    def refusal(self, reason: str, path: Sequence[str | int] = ()) -> InvalidRequest:
        """The error that says why no text can be held to it."""
        where = self.where(path)
        return InvalidRequest(f"{where} {reason}.", param=where)


class OutputFormatFields(StrictRequest):
    """Mixed into the request models of both completion endpoints."""

    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] = None
    regex: Annotated[str | None, WithJsonSchema(_TEXT)] = None
    grammar: Annotated[str | None, WithJsonSchema(_TEXT)] = None
    choice: Annotated[list[str] | None, WithJsonSchema(_TEXTS)] = None

    def demand(self) -> Demand | None:
        """What the text must be; None: anything. Raises InvalidRequest for what is malformed, or more than one of them."""
        demands = list(self._response_format())
        if self.regex is not None:
            demands.append(Demand(Constraint("regex", self.regex), "regex"))
        if self.grammar is not None:
            demands.append(Demand(Constraint("grammar", self.grammar), "grammar"))
        if self.choice is not None:
            demands.append(Demand(of_choices(self.choice), "choice"))
        if len(demands) > 1:
            raise _wrong(demands[1].param, f"{demands[0].param} and {demands[1].param} exclude each other.")
        for demand in demands:
            try:
                demand.constraint.check()
            except Unmet as unmet:
                raise demand.refusal(unmet.reason, unmet.path) from None
        return demands[0] if demands else None

    def _response_format(self) -> Iterator[Demand]:
        if self.response_format is None:
            return
        kind = self.response_format.get("type")
        if kind == "json_object":
            yield Demand(Constraint("json", ANY_OBJECT), "response_format")
        elif kind == "json_schema":
            value = _schema_object(self.response_format.get("json_schema"))
            yield Demand(of_schema(value["schema"]), SCHEMA_PARAM, strict=value.get("strict") is True)
        elif kind != "text":
            raise _wrong("response_format", "response_format.type must be text, json_object or json_schema.")


def _schema_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong("response_format", "response_format.json_schema must be an object.")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise _wrong("response_format", "response_format.json_schema.name must be a non-empty string.")
    if not isinstance(value.get("schema"), dict | bool):
        raise _wrong("response_format", "response_format.json_schema.schema must be a JSON schema.")
    if not isinstance(value.get("strict"), bool | None):
        raise _wrong("response_format", "response_format.json_schema.strict must be true or false.")
    return value


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=field)
