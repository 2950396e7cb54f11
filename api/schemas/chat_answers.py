"""What `/v1/chat/completions` answers, as models; see `answers.py`. Built in `api/relay/chat_builder.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.answers import Answer, Count, Error, Logprob, Timings, Usage


class ChatTopLogprob(Answer):
    """One of the likeliest tokens at its place."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatTokenLogprob(ChatTopLogprob):
    """A sampled token. `logprob` is the raw log-softmax of the model's logits; -9999.0 for minus infinity."""

    token: str
    """Its text; `bytes:\\xf0\\x9f` where that is not UTF-8."""
    top_logprobs: list[ChatTopLogprob]
    """So many as `top_logprobs` asked for, best first."""


class ChatLogprobs(Answer):
    """One entry per sampled token: those of the reasoning and its tags too, and the end token."""

    content: list[ChatTokenLogprob]
    refusal: None


class CompletionTokensDetails(Answer):
    """What the completion was made of."""

    reasoning_tokens: Count
    """Tokens of the reasoning and its tags."""


class ChatUsage(Usage):
    """Tokens of the whole request; the same streamed and not."""

    completion_tokens_details: CompletionTokensDetails


class CalledFunction(Answer):
    """What is called. `arguments` is JSON as the model wrote it: look before you use it."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of one of the tools."""

    id: Annotated[str, Field(pattern="^call_[0-9a-f]+$")]
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    """null: there are calls, and nothing else."""
    refusal: None
    reasoning_content: str | None = None
    """What a thinking model wrote between its think tags; absent for others. A setting calls it `reasoning`, or both."""
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    """Absent without any."""


class ChatChoice(Answer):
    """One answer."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`stop`: end token or stop string; `tool_calls`: so too, with calls; `length`: the limit or the end of the context."""
    stop_reason: str | int | None
    """The stop string or the id of `stop_token_ids` that ended the text."""


ChatId = Annotated[str, Field(pattern="^chatcmpl-[0-9A-Za-z]+$")]


class ChatCompletion(Answer):
    """A finished answer to a chat."""

    id: ChatId
    object: Literal["chat.completion"]
    created: Count
    """Seconds since 1970."""
    model: Annotated[str, Field(min_length=1)]
    system_fingerprint: str
    """Changes with the weights, the engine or anything else that changes the numbers."""
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: ChatUsage


class ChatJobChoice(ChatChoice):
    """One answer, as far as it got."""

    finish_reason: Literal["stop", "length", "tool_calls"] | None  # type: ignore[assignment]
    """null: the request ended before this choice was finished."""


class ChatJob(Answer):
    """A chat completion with how its request stands."""

    id: ChatId
    object: Literal["chat.completion"]
    created: Count
    model: Annotated[str, Field(min_length=1)]
    system_fingerprint: str
    choices: list[ChatJobChoice]
    """Empty until the end. After a failure or a cancellation: the text so far."""
    usage: ChatUsage | None
    """null until the end. After a failure or a cancellation: what was sampled."""
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    queue_position: Annotated[int, Field(ge=1)] | None
    """Place among your own waiting requests, 1 = next."""
    error: Error | None
    """Why it failed or was cancelled."""
    timings: Timings


class FunctionDelta(Answer):
    """More of a function's arguments; its name with the first piece."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """More of call number `index`; `id`, `type` and the function's name with its first piece."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Answer):
    """What comes to the message: first the role, at last nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    """The next piece of one choice. The piece with a `finish_reason` has an empty delta."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None


class ChatCompletionChunk(Answer):
    """The `data` of one event of a chat's stream."""

    id: ChatId
    object: Literal["chat.completion.chunk"]
    created: Count
    model: Annotated[str, Field(min_length=1)]
    system_fingerprint: str
    choices: Annotated[list[ChatChunkChoice], Field(max_length=1)]
    """Empty in the extra event that `stream_options.include_usage` asks for."""
    usage: ChatUsage | None = None
    """Absent, null or the usage, as `stream_options` say."""


#: As in `answers.py`.
ANSWERS: tuple[type[Answer], ...] = (ChatCompletion, ChatJob, ChatCompletionChunk)
