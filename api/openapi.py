"""The OpenAPI 3.1 document of the API, made from the models that check requests and describe answers.

An endpoint that is added gets a line in `OPERATIONS`; a field gets its words in `api/schemas/words.py`. Knows nothing of
how anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from api import admission
from api.auth import PROBES
from api.headers import MAX_GRACE
from api.limits import RATE_HEADERS
from api.schemas import answers, batch_answers, chat_answers
from api.schemas.answers import Answer
from api.schemas.batches import UPLOAD_SCHEMA, BatchRequest, ReplayRequest
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.generation import GenerationRequest
from api.schemas.strict import StrictRequest
from api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from api.schemas.words import FIELD_WORDS
from shared.settings import Settings

OPENAPI = "3.1.1"
#: Version of the described interface, which is not that of the package.
VERSION = "1"
ABOUT = (
    "Completions of raw prompts and of chats, as the OpenAI API has them, from a queue. Bodies are strict JSON in UTF-8: a number in "
    "quotes is no number, 1.0 is no integer, a key must not come twice. A field that is null is absent. Unknown fields are "
    "ignored and named in `x-sluice-ignored`. Paths may have one trailing slash, and GET also answers HEAD."
)

#: status -> what it means.
STATUS_WORDS = {
    400: "A field is wrong (`param` names it), the body is no JSON, or prompt and `max_tokens` do not fit.",
    401: "No API key, or one that is unknown or revoked.",
    403: "The key lacks the scope; or, where no keys are configured, an unknown Host or foreign Origin.",
    404: "No such model, request, file, batch or path.",
    405: "The path has other methods; `Allow` lists them.",
    409: "The request was cancelled while its client waited, or its Idempotency-Key belongs to another request; or an unfinished "
    "batch needs the file.",
    410: "The stream ended too long ago to be replayed.",
    413: "The body is too large.",
    415: "Content-Type is not application/json.",
    429: "The queue is full, the key's minute is used up, or it has as many requests running as it may; `Retry-After` says when "
    "to come again.",
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
    "WWW-Authenticate": "`Bearer`.",
    "Allow": "The methods of this path.",
    **{
        f"x-ratelimit-{what}-{kind}": f"{words} {kind} a minute. Only for keys that are so limited."
        for kind in ("requests", "tokens")
        for what, words in (
            ("limit", "The key's"),
            ("remaining", "What is left of the key's"),
            ("reset", "How long until nothing is used up (`6m0s`, `120ms`) of the key's"),
        )
    },
}
_ON_ALL = ("x-request-id", "openai-processing-ms")
_ON_COMPLETIONS = ("x-sluice-id", "x-sluice-ignored", "x-sluice-max-tokens", *RATE_HEADERS)


def _event(chunk: type[Answer]) -> dict[str, Any]:
    """One event of a stream."""
    return {
        "type": "object",
        "description": f"With `stream`: server-sent events. `data` is a {chunk.__name__}; that of the last event is `[DONE]`. A "
        "stream that fails has an ErrorAnswer before it and no `finish_reason`. `id` is `attempt-number`, with `.k` from the "
        "second event of one step on; the stream can be resumed behind it. Lines that begin with a colon are comments and "
        "keep the connection alive.",
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
                                {"$ref": f"#/components/schemas/{chunk.__name__}"},
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
    """One method of one path. `answer`: the model of the 200; None: HTML or a free JSON object, as `media` says.
    `others`: (status, what it means, model or None: no body) of further successes. `chunk`: of its stream, if it has one.
    `form`: name of the schema of a body that is a form."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[Answer] | None
    description: str = ""
    request: type[StrictRequest] | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    errors: tuple[int, ...] = ()
    others: tuple[tuple[int, str, type[Answer] | None], ...] = ()
    headers: tuple[str, ...] = ()
    chunk: type[Answer] | None = None
    media: str = "application/json"
    form: str = ""


def _parameter(name: str, where: str, words: str, *, required: bool = False, **schema: Any) -> dict[str, Any]:
    """`schema`: what its text must be, if not any."""
    kind: dict[str, Any] = {"type": "string", **schema}
    if required:
        kind["minLength"] = 1
    return {"name": name, "in": where, "required": required, "description": words, "schema": kind}


def _header(name: str, words: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": words, "schema": schema}


#: What a client may say of how long it waits.
_PATIENCE = (
    _header(
        admission.DEADLINE,
        "Milliseconds after which nobody waits for the answer any more: it is then not begun, or cut off (504).",
        type="integer",
        minimum=1,
        maximum=admission.LONGEST_DEADLINE_MS,
    ),
    _header(
        admission.READ_TIMEOUT,
        "Sent by the official client: its read timeout in seconds, which for a request without `stream` says the same.",
        type="number",
        exclusiveMinimum=0,
    ),
)

_BODY_ERRORS = (400, 413, 415)
_JOB_ID = _parameter(
    "job_id", "path", "The request's id: `id` of the completion and of its chunks, `x-sluice-id`.", required=True
)
_GRACE = _parameter(
    "X-Resume-Grace",
    "header",
    "Seconds for which the request runs on after its client hung up, 0 to 600, so that it can be resumed.",
    type="integer",
    minimum=0,
    maximum=MAX_GRACE,
)
_FILE_ID = _parameter("file_id", "path", "The file's id.", required=True)
_BATCH_ID = _parameter("batch_id", "path", "The batch's id.", required=True)


def _page(most: int) -> tuple[dict[str, Any], ...]:
    return (
        _parameter("after", "query", "The id behind which the page begins."),
        _parameter("limit", "query", "Items of the page.", type="integer", minimum=1, maximum=most),
    )


_EVENT_ID = "[0-9]{1,16}-[0-9]{1,12}(\\.[0-9]{1,9})?"


def _starts(path: str, request: type[GenerationRequest], **own: Any) -> Operation:
    """A request that generates text. `own`: what differs."""
    return Operation(
        "post",
        path,
        request=request,
        parameters=(
            _parameter(
                "Idempotency-Key",
                "header",
                "The same key with the same body is the same request, running or finished: a repetition gets its answer. "
                "1 to 255 characters. A request that failed in a way that may be repeated, or was cancelled, frees its key.",
                pattern="^[!-~]{1,255}$",
            ),
            _GRACE,
            *_PATIENCE,
        ),
        errors=(*_BODY_ERRORS, 404, 409, 410, 429, 502, 503, 504),
        headers=_ON_COMPLETIONS,
        **own,
    )


def _by_id(path: str, what: str, job: type[Answer], chunk: type[Answer]) -> tuple[Operation, ...]:
    """What can be asked about such a request, and done to it; `what` ends the operations' names."""
    return (
        Operation(
            "get",
            f"{path}/{{job_id}}",
            f"get{what}",
            "A request by its id, or its stream",
            job,
            description="Any server process answers for any request. With `stream=true` the events behind the cursor, or "
            "all, and then those to come. An hour after the end the request is forgotten; its stream can be replayed for "
            "five minutes; both times are settings.",
            parameters=(
                _JOB_ID,
                _parameter("stream", "query", "`true`: the stream.", enum=["true", "false"]),
                _parameter(
                    "starting_after",
                    "query",
                    "With stream: the id of the last event seen, or its number alone (then a stream that the store has lost "
                    "and that was run again is not noticed).",
                    pattern=f"^({_EVENT_ID}|[0-9]{{1,12}})$",
                ),
                _parameter(
                    "Last-Event-ID", "header", "With stream: the id of the last event seen; before `starting_after`."
                ),
                _GRACE,
            ),
            errors=(400, 404, 405, 409, 410, 502, 503, 504),
            others=((204, "With `stream`: the last event has been seen.", None),),
            headers=("x-sluice-id",),
            chunk=chunk,
        ),
        Operation(
            "post",
            f"{path}/{{job_id}}/cancel",
            f"cancel{what}",
            "Cancel a request",
            job,
            description="Who waits for it gets an error with code `cancelled`. One that has ended stays as it is. May be "
            "repeated.",
            parameters=(_JOB_ID,),
            errors=(404, 503),
            headers=("x-sluice-id",),
        ),
    )


OPERATIONS = (
    _starts(
        "/v1/completions",
        CompletionRequest,
        name="createCompletion",
        summary="Complete a raw prompt",
        answer=answers.Completion,
        description="The prompt is continued as it stands; no chat template is applied.",
        others=((202, "Accepted, with `background` and without `stream`.", answers.CompletionJob),),
        chunk=answers.CompletionChunk,
    ),
    *_by_id("/v1/completions", "Completion", answers.CompletionJob, answers.CompletionChunk),
    _starts(
        "/v1/chat/completions",
        ChatRequest,
        name="createChatCompletion",
        summary="Answer a chat",
        answer=chat_answers.ChatCompletion,
        description="The model's own chat template makes the prompt of the messages. Control tokens written in system, user "
        "and tool messages are plain text. What a thinking model writes between its think tags is `reasoning_content`.",
        others=((202, "Accepted, with `background` and without `stream`.", chat_answers.ChatJob),),
        chunk=chat_answers.ChatCompletionChunk,
    ),
    *_by_id("/v1/chat/completions", "ChatCompletion", chat_answers.ChatJob, chat_answers.ChatCompletionChunk),
    Operation(
        "post",
        "/v1/files",
        "createFile",
        "Upload the requests of a batch",
        batch_answers.FileObject,
        description="What is in the file is checked when a batch is made of it.",
        form="UploadForm",
        errors=(*_BODY_ERRORS, 503),
        headers=("x-sluice-ignored",),
    ),
    Operation(
        "get",
        "/v1/files",
        "listFiles",
        "Files, newest first",
        batch_answers.FileList,
        parameters=(
            _parameter("purpose", "query", "Only files for this.", enum=["batch", "batch_output"]),
            *_page(10_000),
            _parameter("order", "query", "`asc`: oldest first.", enum=["asc", "desc"]),
        ),
        errors=(400, 503),
    ),
    Operation(
        "get",
        "/v1/files/{file_id}",
        "getFile",
        "A file",
        batch_answers.FileObject,
        parameters=(_FILE_ID,),
        errors=(404, 503),
    ),
    Operation(
        "delete",
        "/v1/files/{file_id}",
        "deleteFile",
        "Delete a file",
        batch_answers.FileDeleted,
        description="409 for one that an unfinished batch needs.",
        parameters=(_FILE_ID,),
        errors=(404, 409, 503),
    ),
    Operation(
        "get",
        "/v1/files/{file_id}/content",
        "getFileContent",
        "The bytes of a file",
        None,
        description="Of a running batch's results: what there is of them.",
        parameters=(_FILE_ID,),
        errors=(404, 503),
        media="application/octet-stream",
    ),
    Operation(
        "post",
        "/v1/batches",
        "createBatch",
        "Run the requests of a file",
        batch_answers.Batch,
        description="Lines that are no requests end the batch as `failed`, with their numbers in `errors`; a request that fails is "
        "a row of the error file.",
        request=BatchRequest,
        errors=(*_BODY_ERRORS, 404, 429, 503),
        headers=("x-sluice-ignored",),
    ),
    Operation(
        "get",
        "/v1/batches",
        "listBatches",
        "Batches, newest first",
        batch_answers.BatchList,
        parameters=_page(100),
        errors=(400, 503),
    ),
    Operation(
        "get",
        "/v1/batches/{batch_id}",
        "getBatch",
        "A batch",
        batch_answers.Batch,
        parameters=(_BATCH_ID,),
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/v1/batches/{batch_id}/cancel",
        "cancelBatch",
        "Cancel a batch",
        batch_answers.Batch,
        description="What was completed is in the output file, all else in the error file. One that has ended stays as it is.",
        parameters=(_BATCH_ID,),
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/v1/batches/{batch_id}/replay",
        "replayBatch",
        "Run again what was not completed",
        batch_answers.Batch,
        description="A new batch of those requests of an ended one that are not in its output file. Without a body: with "
        "a window of 24 hours.",
        request=ReplayRequest,
        parameters=(_BATCH_ID,),
        errors=(*_BODY_ERRORS, 404, 429, 503),
        headers=("x-sluice-ignored",),
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
    Operation(
        "get",
        "/",
        "playground",
        "The playground, a page to try models on",
        None,
        description="Needs no key: it asks for one.",
        media="text/html",
    ),
    Operation(
        "get",
        "/metrics",
        "metrics",
        "Metrics of the whole system, for Prometheus",
        None,
        description="Needs the scope `monitor`.",
        media="text/plain",
    ),
    Operation(
        "get",
        "/monitor",
        "monitor",
        "The monitor, a page that shows the system live",
        None,
        description="Needs no key: it asks for one.",
        media="text/html",
    ),
    Operation(
        "get",
        "/monitor/state",
        "monitorState",
        "What the monitor shows",
        None,
        description="The status, with latencies, totals and running requests, which are those of the key's tenant unless it has "
        "the scope `admin`. Needs the scope `monitor`.",
        errors=(503,),
    ),
    Operation(
        "get",
        "/monitor/events",
        "monitorEvents",
        "The same each second, as server-sent events",
        None,
        description="Each event is a state. Of the last requests it has those that no earlier event had.",
        media="text/event-stream",
        errors=(503,),
    ),
    Operation("get", "/openapi.json", "openapi", "This document", None),
    Operation("get", "/docs", "docs", "This document, to be read", None, media="text/html"),
)


def document(settings: Settings) -> dict[str, Any]:
    """The whole document, as a JSON object. Limits that are settings appear with the values of `settings`."""
    _, defined = models_json_schema(
        [(model, "serialization") for model in (*answers.ANSWERS, *chat_answers.ANSWERS, *batch_answers.ANSWERS)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {name: _untitled(schema) for name, schema in defined["$defs"].items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.request is not None:
            schemas[operation.request.__name__] = _request_schema(operation.request, settings)
        if operation.form:
            schemas[operation.form] = _described(UPLOAD_SCHEMA)
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
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where keys are configured."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": _schema_of(operation)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    answered = {"description": operation.summary + ".", "headers": _headers(operation.headers), "content": content}
    failed = sorted({*ALWAYS, *operation.errors})
    made: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "responses": {
            "200": answered,
            **{str(status): _other(operation, words, model) for status, words, model in operation.others},
            **{str(status): {"$ref": f"#/components/responses/{_error_name(status)}"} for status in failed},
        },
    }
    if operation.path in PROBES:
        made["security"] = []
    if operation.description:
        made["description"] = operation.description
    if operation.request is not None:
        schema = {"$ref": f"#/components/schemas/{operation.request.__name__}"}
        required = operation.request is not ReplayRequest
        made["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    if operation.form:
        schema = {"$ref": f"#/components/schemas/{operation.form}"}
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return made


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """A form's schema with the words of its fields."""
    fields = {name: {"description": FIELD_WORDS[name], **field} for name, field in schema["properties"].items()}
    return {**schema, "properties": fields}


def _other(operation: Operation, words: str, model: type[Answer] | None) -> dict[str, Any]:
    made: dict[str, Any] = {"description": words, "headers": _headers(operation.headers)}
    if model is not None:
        made["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return made


def _schema_of(operation: Operation) -> dict[str, Any]:
    if operation.answer is not None:
        return {"$ref": f"#/components/schemas/{operation.answer.__name__}"}
    return {"type": "object"} if operation.media == "application/json" else {"type": "string"}


def _error_name(status: int) -> str:
    return f"Error{status}"


def _error_answer(status: int) -> dict[str, Any]:
    own: tuple[str, ...] = ()
    if status == 401:
        own = ("WWW-Authenticate",)
    elif status == 429:
        own = ("x-should-retry", "Retry-After", "retry-after-ms", *RATE_HEADERS)
    elif status in _RETRIED:
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
        words = FIELD_WORDS.get(f"{model.__name__}.{name}") or FIELD_WORDS.get(name, "")
        properties[name] = {"description": words, **_limited(model, name, own, settings)}
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


def _limited(model: type[StrictRequest], name: str, schema: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """With the limits that are settings."""
    if not issubclass(model, GenerationRequest):
        return schema
    if name == ("logprobs" if model is CompletionRequest else "top_logprobs"):
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
