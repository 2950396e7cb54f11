"""Fields that constrain the form of the output: response_format, regex, grammar, choice.

Their shape is checked here; what a schema may say is checked where it is compiled.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from api.schemas.strict import StrictRequest, not_built
from shared.errors import InvalidRequest

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
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TEXTS: dict[str, Any] = {"type": "array", "minItems": 1, "items": _TEXT}


class OutputFormatFields(StrictRequest):
    """Mixed into the request models of both completion endpoints."""

    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] = None
    regex: Annotated[str | None, WithJsonSchema(_TEXT)] = None
    grammar: Annotated[str | None, WithJsonSchema(_TEXT)] = None
    choice: Annotated[list[str] | None, WithJsonSchema(_TEXTS)] = None

    def check_output_format(self) -> None:
        """Raises InvalidRequest for a malformed constraint and UnsupportedParameter for any other than text."""
        if self.response_format is not None:
            kind = self.response_format.get("type")
            if kind not in ("text", "json_object", "json_schema"):
                raise _wrong("response_format", "response_format.type must be text, json_object or json_schema.")
            if kind == "json_schema":
                _check_schema_object(self.response_format.get("json_schema"))
            if kind != "text":
                raise not_built("response_format", f"The type {kind}")
        for field in ("regex", "grammar"):
            if getattr(self, field) == "":
                raise _wrong(field, f"{field} must not be empty.")
        if self.choice is not None and (not self.choice or "" in self.choice):
            raise _wrong("choice", "choice must be an array of at least one non-empty string.")
        for field in ("regex", "grammar", "choice"):
            if getattr(self, field) is not None:
                raise not_built(field)


def _check_schema_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise _wrong("response_format", "response_format.json_schema must be an object.")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise _wrong("response_format", "response_format.json_schema.name must be a non-empty string.")
    if not isinstance(value.get("schema"), dict | bool):
        raise _wrong("response_format", "response_format.json_schema.schema must be a JSON schema.")
    if not isinstance(value.get("strict"), bool | None):
        raise _wrong("response_format", "response_format.json_schema.strict must be true or false.")


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=field)
