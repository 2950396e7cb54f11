"""The base of all request models: strict types, null = absent, errors in words a client can act on.

Knows pydantic and the error object, no endpoint and no field.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import InvalidRequest, UnsupportedParameter

_MUST_BE = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


class StrictRequest(BaseModel):
    """A request body. `true` is no number, `"10"` is no number, 1.0 is no integer; number fields take integers."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())

    #: Beginnings of further names that are known to some engine, but are fields of no model.
    engine_extras: ClassVar[tuple[str, ...]] = ()

    #: Names in the body that begin so and are no fields.
    _extras: tuple[str, ...] = ()

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """The checked fields of a parsed body. Raises InvalidRequest naming the first field that is wrong."""
        try:
            request = cls.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            _refuse(error)
        extras = [name for name in body if body[name] is not None and name.startswith(cls.engine_extras)]
        request._extras = tuple(name for name in extras if name not in cls.model_fields)
        return request

    @classmethod
    def unknown(cls, body: dict[str, Any]) -> list[str]:
        """Names of the fields that nobody will look at, in the body's order."""
        known = cls.model_fields
        return [
            name
            for name, value in body.items()
            if value is not None and name not in known and not name.startswith(cls.engine_extras)
        ]


def _refuse(error: ValidationError) -> NoReturn:
    first = error.errors(include_url=False, include_input=False)[0]
    path, kind, limits = ".".join(map(str, first["loc"])), first["type"], first.get("ctx", {})
    if kind in _MUST_BE:
        message = f"{path} must be {_MUST_BE[kind]}."
    elif kind == "greater_than_equal":
        message = f"{path} must be at least {written(limits['ge'])}."
    elif kind == "less_than_equal":
        message = f"{path} must be at most {written(limits['le'])}."
    elif kind == "literal_error":
        message = f"{path} must be {limits['expected']}."
    elif kind == "missing":
        message = f"{path} is required."
    else:
        message = f"{path} is not valid: {first['msg']}."
    raise InvalidRequest(message, param=str(first["loc"][0]))


def written(bound: float) -> str:
    """A bound of a field in words: in full, or a client that tries it could be refused again."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def not_built(field: str, what: str = "This value") -> UnsupportedParameter:
    """The error for a valid value of a field that this server does not serve."""
    return UnsupportedParameter(f"{what} of {field} is not supported by this server.", param=field)


def only_keys(field: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raises InvalidRequest if the object has a non-null key besides `known`."""
    for key, item in value.items():
        if item is not None and key not in known:
            raise InvalidRequest(f"{field} has no key {key[:64]!a}; it has {', '.join(known)}.", param=field)
