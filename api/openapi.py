"""The OpenAPI 3.1 document of the API, made from the models that check requests and describe answers.

An endpoint that is added gets a line in `OPERATIONS`; a field gets its words in `api/schemas/words.py`. Knows nothing of
how anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from api.schemas import answers
from api.schemas.answers import ANSWERS, Answer
from api.schemas.completions import CompletionRequest
from api.schemas.strict import StrictRequest
from api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from api.schemas.words import FIELD_WORDS
from shared.settings import Settings

OPENAPI = "3.1.1"
#: Version of the described interface, which is not that of the package.
VERSION = "1"
ABOUT = (
    "Completions of raw prompts, as the OpenAI API has them, from a queue. Bodies are strict JSON in UTF-8: a number in "
    "quotes is no number, 1.0 is no integer, a key must not come twice. A field that is null is absent. Unknown fields are "
    "ignored and named in `x-sluice-ignored`. Paths may have one trailing slash, and GET also answers HEAD."
)

#: status -> what it means.
STATUS_WORDS = {
    400: "A field is wrong (`param` names it), the body is no JSON, or prompt and `max_tokens` do not fit.",
    401: "No key, or an unknown one.",
    403: "Not allowed, or an unknown Host or foreign Origin where no keys are configured.",
    404: "No such model or path.",
    405: "The path has other methods; `Allow` lists them.",
    409: "The request was cancelled while its client waited.",
    413: "The body is too large.",
    415: "Content-Type is not application/json.",
    429: "Too many requests; `Retry-After` says when to come again.",
    500: "Internal error.",
    502: "The text does not have the demanded form.",
    503: "Not now: no worker, the worker was lost, the store does not answer, or the server stops. May be repeated.",
    504: "The request's deadline passed.",
}
#: Any request may meet these.
ALWAYS = (401, 403, 500)
_RETRIED = (429, 503)
_NOT_RETRIED = (409, 502, 504)

HEADER_WORDS = {
    "x-request-id": "The request's `X-Request-Id` or `X-Client-Request-Id`, if printable ASCII of at most 128 characters; "
    "else made by the server.",
    "openai-processing-ms": "Milliseconds until the headers were sent.",
    "x-sluice-id": "The request's id, also of one that failed.",
    "x-sluice-ignored": "Fields of the request that nobody looked at, ten at most, then how many more.",
    "x-sluice-max-tokens": "What became of a `max_tokens` that did not fit.",
    "x-should-retry": "Whether repeating the request can help.",
    "Retry-After": "Seconds to wait before a repetition.",
    "retry-after-ms": "The same in milliseconds.",
    "Allow": "The methods of this path.",
}
_ON_ALL = ("x-request-id", "openai-processing-ms")
_ON_COMPLETIONS = ("x-sluice-id", "x-sluice-ignored", "x-sluice-max-tokens")

#: One event of a stream.
_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "With `stream`: server-sent events. `data` is a CompletionChunk; that of the last event is `[DONE]`. A "
    "stream that fails has an ErrorAnswer before it and no `finish_reason`. `id` is `attempt-number`. Lines that begin "
    "with a colon are comments and keep the connection alive.",
    "required": ["data"],
    "properties": {
        "id": {"type": "string"},
        "data": {
            "type": "string",
            "anyOf": [
                {"const": "[DONE]"},
                {
                    "contentMediaType": "application/json",
                    "contentSchema": {
                        "anyOf": [
                            {"$ref": "#/components/schemas/CompletionChunk"},
                            {"$ref": "#/components/schemas/ErrorAnswer"},
                        ]
                    },
                },
            ],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answer`: the model of the 200; None: HTML or a free JSON object, as `media` says."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[Answer] | None
    description: str = ""
    request: type[StrictRequest] | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    errors: tuple[int, ...] = ()
    headers: tuple[str, ...] = ()
    streams: bool = False
    media: str = "application/json"


def _parameter(name: str, where: str, words: str, *, required: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if required:
        schema["minLength"] = 1
    return {"name": name, "in": where, "required": required, "description": words, "schema": schema}


_BODY_ERRORS = (400, 413, 415)

OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "createCompletion",
        "Complete a raw prompt",
        answers.Completion,
        description="The prompt is continued as it stands; no chat template is applied.",
        request=CompletionRequest,
        errors=(*_BODY_ERRORS, 404, 409, 429, 502, 503, 504),
        headers=_ON_COMPLETIONS,
        streams=True,
    ),
    Operation("get", "/v1/models", "listModels", "Models that can be asked for", answers.ModelList, errors=(503,)),
    Operation(
        "get",
        "/v1/models/{model}",
        "getModel",
        "One model",
        answers.Model,
        parameters=(_parameter("model", "path", "Id, which may hold slashes, or alias.", required=True),),
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/tokenize",
        "tokenize",
        "Token ids of a text or chat",
        answers.Tokenized,
        description="Special tokens in the text are read as such. Also under /v1. Answers without a worker.",
        request=TokenizeRequest,
        errors=(*_BODY_ERRORS, 404, 503),
    ),
    Operation(
        "post",
        "/detokenize",
        "detokenize",
        "Text of token ids",
        answers.Detokenized,
        description="Special tokens are shown. Also under /v1. Answers without a worker.",
        request=DetokenizeRequest,
        errors=(*_BODY_ERRORS, 404, 503),
    ),
    Operation(
        "get",
        "/tokenizer_info",
        "tokenizerInfo",
        "The model's tokenizer and chat template",
        answers.TokenizerInfo,
        description="Also under /v1. Answers without a worker. 503 if the model has no tokenizer here.",
        parameters=(_parameter("model", "query", FIELD_WORDS["model"]),),
        errors=(400, 404, 503),
    ),
    Operation("get", "/v1/status", "status", "Models, workers, queues and nodes", answers.Status, errors=(503,)),
    Operation("get", "/health", "health", "Whether the process is alive", answers.Health, description="Needs no key."),
    Operation(
        "get",
        "/ready",
        "ready",
        "Whether the process should be sent requests",
        answers.Readiness,
        description="503 while it stops, and while the store does not answer. Needs no key.",
        errors=(503,),
    ),
    Operation("get", "/openapi.json", "openapi", "This document", None),
    Operation("get", "/docs", "docs", "This document, to be read", None, media="text/html"),
)


def document(settings: Settings) -> dict[str, Any]:
    """The whole document, as a JSON object. Limits that are settings appear with the values of `settings`."""
    _, defined = models_json_schema(
        [(model, "serialization") for model in ANSWERS], ref_template="#/components/schemas/{model}"
    )
    schemas = {name: _untitled(schema) for name, schema in defined["$defs"].items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.request is not None:
            schemas[operation.request.__name__] = _request_schema(operation.request, settings)
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    used = sorted({status for operation in OPERATIONS for status in (*ALWAYS, *operation.errors)})
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "Sluice",
            "version": VERSION,
            "description": ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {_error_name(status): _error_answer(status) for status in used},
            "headers": {
                name: {"description": words, "schema": {"type": "string"}} for name, words in HEADER_WORDS.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": _schema_of(operation)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    answered = {"description": operation.summary + ".", "headers": _headers(operation.headers), "content": content}
    failed = sorted({*ALWAYS, *operation.errors})
    made: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "responses": {
            "200": answered,
            **{str(status): {"$ref": f"#/components/responses/{_error_name(status)}"} for status in failed},
        },
    }
    if operation.description:
        made["description"] = operation.description
    if operation.request is not None:
        schema = {"$ref": f"#/components/schemas/{operation.request.__name__}"}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return made


def _schema_of(operation: Operation) -> dict[str, Any]:
    if operation.answer is not None:
        return {"$ref": f"#/components/schemas/{operation.answer.__name__}"}
    return {"type": "object"} if operation.media == "application/json" else {"type": "string"}


def _error_name(status: int) -> str:
    return f"Error{status}"


def _error_answer(status: int) -> dict[str, Any]:
    own: tuple[str, ...] = ()
    if status in _RETRIED:
        own = ("x-should-retry", "Retry-After", "retry-after-ms")
    elif status in _NOT_RETRIED:
        own = ("x-should-retry",)
    return {
        "description": STATUS_WORDS[status],
        "headers": _headers(own),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
    }


def _headers(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*_ON_ALL, *names)}


def _request_schema(model: type[StrictRequest], settings: Settings) -> dict[str, Any]:
    made = _untitled(model.model_json_schema(ref_template="#/components/schemas/{model}"))
    required = made.get("required", [])
    properties: dict[str, Any] = {}
    for name in sorted(made["properties"], key=_reading_order):
        schema = made["properties"][name]
        if schema.get("default") is None:
            schema.pop("default", None)
        own = schema if name in required else _nullable(schema)
        properties[name] = {"description": FIELD_WORDS.get(name, ""), **_limited(model, name, own, settings)}
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


def _limited(model: type[StrictRequest], name: str, schema: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """With the limits that are settings."""
    if model is not CompletionRequest:
        return schema
    if name == "logprobs":
        return {**schema, "maximum": settings.max_logprobs}
    if name == "logit_bias":
        return {**schema, "maxProperties": settings.max_logit_bias}
    most = {"stop": settings.max_stops, "prompt": settings.max_prompts}.get(name)
    if most is None:
        return schema
    # Token ids are one prompt, however many they are.
    shapes = [
        {**shape, "maxItems": most} if "items" in shape and shape["items"].get("type") != "integer" else shape
        for shape in schema["anyOf"]
    ]
    return {**schema, "anyOf": shapes}


def _reading_order(field: str) -> int:
    """The order of the words is the one to read in."""
    known = list(FIELD_WORDS)
    return known.index(field) if field in known else len(known)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or null: null means absent everywhere."""
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        if len(kinds) == 1:
            return _nullable({**rest, **kinds[0]})
        return {**rest, "anyOf": [*kinds, {"type": "null"}]}
    if "oneOf" in schema or "const" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    made = dict(schema)
    if "type" in made:
        made["type"] = [made["type"], "null"]
    if "enum" in made:
        made["enum"] = [*made["enum"], None]
    return made


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the titles that pydantic makes of names."""
    properties = {
        name: {key: value for key, value in item.items() if key != "title"}
        for name, item in schema.get("properties", {}).items()
    }
    return {**{key: value for key, value in schema.items() if key != "title"}, "properties": properties}
