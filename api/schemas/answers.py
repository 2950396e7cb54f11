"""What the endpoints answer, as models: the OpenAPI document is made from them, and tests hold real answers against them.

Nothing is sent through them: answers are built where they arise (`api/relay/completion_builder.py` for completions).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]


class Answer(BaseModel):
    """No key but these, and all of them always."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class Error(Answer):
    """What went wrong."""

    message: Annotated[str, Field(min_length=1)]
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
        "structured_output_failed",
    ]
    param: str | None
    """The field at fault."""
    code: str | None
    """For programs, for example `context_length_exceeded` or `model_not_found`."""


class ErrorAnswer(Answer):
    """The body of every answer from 400 on, and the last event but `[DONE]` of a stream that failed."""

    error: Error


class Logprobs(Answer):
    """One entry per sampled token, the end token included; with `echo` the prompt's tokens come first."""

    tokens: list[str]
    """Texts of the tokens; `bytes:\\xf0\\x9f` where they are not UTF-8."""
    token_logprobs: list[Logprob | None]
    """Raw log-softmax of the model's logits; null for the first token of all; -9999.0 for minus infinity."""
    top_logprobs: list[dict[str, Logprob] | None]
    """The likeliest tokens and the sampled one."""
    text_offset: list[Count]
    """Where the token begins in prompt + completion, in code points."""


class PromptTokensDetails(Answer):
    """What the prompt cost."""

    cached_tokens: Count
    """Prompt tokens that were not computed again."""


class Usage(Answer):
    """Tokens of the whole request; the same streamed and not."""

    prompt_tokens: Count
    """Each prompt once, a begin-of-text token that was added included."""
    completion_tokens: Count
    """Sampled tokens of all candidates, end tokens included."""
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class Choice(Answer):
    """One completion of one prompt."""

    text: str
    index: Count
    """Prompt number x `n` + number of the choice."""
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]
    """`stop`: end token or stop string; `length`: `max_tokens` or the end of the context."""
    stop_reason: str | int | None
    """The stop string or the id of `stop_token_ids` that ended the text."""


CompletionId = Annotated[str, Field(pattern="^cmpl-[0-9A-Za-z]+$")]


class Completion(Answer):
    """A finished completion."""

    id: CompletionId
    object: Literal["text_completion"]
    created: Count
    """Seconds since 1970."""
    model: Annotated[str, Field(min_length=1)]
    system_fingerprint: str
    """Changes with the weights, the engine or anything else that changes the numbers."""
    choices: Annotated[list[Choice], Field(min_length=1)]
    usage: Usage


class JobChoice(Choice):
    """One completion of one prompt, as far as it got."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]
    """null: the request ended before this choice was finished."""


class Timings(Answer):
    """Milliseconds; null where it did not come to that, or is not known any more."""

    queued_ms: Annotated[float, Field(ge=0)] | None
    """From submission until a worker took the request."""
    first_token_ms: Annotated[float, Field(ge=0)] | None
    """From there to the first token."""
    total_ms: Annotated[float, Field(ge=0)] | None
    """From there to the end."""


class CompletionJob(Answer):
    """A completion with how its request stands."""

    id: CompletionId
    object: Literal["text_completion"]
    created: Count
    model: Annotated[str, Field(min_length=1)]
    system_fingerprint: str
    choices: list[JobChoice]
    """Empty until the end. After a failure or a cancellation: the text so far."""
    usage: Usage | None
    """null until the end. After a failure or a cancellation: what was sampled."""
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    queue_position: Annotated[int, Field(ge=1)] | None
    """Place among your own waiting requests, 1 = next."""
    error: Error | None
    """Why it failed or was cancelled."""
    timings: Timings


class ChunkChoice(Answer):
    """The next piece of one choice. The piece with a `finish_reason` has no text."""

    text: str
    index: Count
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class CompletionChunk(Answer):
    """The `data` of one event of a stream."""

    id: CompletionId
    object: Literal["text_completion"]
    created: Count
    model: Annotated[str, Field(min_length=1)]
    system_fingerprint: str
    choices: Annotated[list[ChunkChoice], Field(max_length=1)]
    """Empty in the extra event that `stream_options.include_usage` asks for."""
    usage: Usage | None = None
    """Absent, null or the usage, as `stream_options` say."""


class Model(Answer):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count
    """Tokens of prompt and completion together."""
    aliases: list[str]


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(Answer):
    """The process should be sent requests."""

    status: Literal["ready"]


class ModelState(Answer):
    """Who serves a model."""

    id: str
    ready: bool
    workers: Count


class WorkerState(Answer):
    """One worker."""

    name: str
    model: str
    lanes: Count
    """Requests it can run at once."""
    busy: Count
    """Requests it runs now."""
    tokens_per_second: Annotated[float, Field(ge=0)]
    draining: bool
    free: Count
    """Lanes that a request could have at once; a request of several choices takes several."""
    out_of_memory: Count
    """How often its model found no memory to compute with, since it started."""


class QueueState(Answer):
    """Requests of one model and class."""

    model: str
    klass: Annotated[str, Field(alias="class")]
    waiting: Count
    running: Count


class NodeState(Answer):
    """One API process."""

    name: str
    streams: Count


class Status(Answer):
    """The whole system, at most 0.3 s old."""

    models: list[ModelState]
    workers: list[WorkerState]
    queues: list[QueueState]
    nodes: list[NodeState]


class Tokenized(Answer):
    """The ids of a text."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The text of ids."""

    prompt: str


class TokenizerInfo(Answer):
    """What a client needs to know to count and cut as the model does."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    add_bos_token: bool
    model_max_length: Count


#: Models whose schema stands in the document by its own name.
ANSWERS: tuple[type[Answer], ...] = (
    Completion,
    CompletionJob,
    CompletionChunk,
    ErrorAnswer,
    Model,
    ModelList,
    Health,
    Readiness,
    Status,
    Tokenized,
    Detokenized,
    TokenizerInfo,
)
