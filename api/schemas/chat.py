"""`POST /v1/chat/completions`: from a parsed body to a job, whose prompt the model's template has still to write.

Every field of the contract is checked here. Knows nothing of Flask, of templates and of the store.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from api.schemas.generation import Call, GenerationRequest, check_logprobs
from api.schemas.messages import MESSAGES_SCHEMA, read_messages
from api.schemas.stream_options import read_stream_options
from api.schemas.tools import ToolFields
from shared import jobs
from shared.cards import ModelCard
from shared.errors import InvalidRequest, UnsupportedParameter
from shared.jobs import LimitField
from shared.settings import Settings

#: What OpenAI's API had before tools.
_FORMER = ("functions", "function_call")
_MODALITIES: dict[str, Any] = {"type": "array", "items": {"const": "text"}}


class ChatRequest(GenerationRequest, ToolFields):
    """The fields of a chat. Use `read` to make one."""

    messages: Annotated[list[Any], WithJsonSchema(MESSAGES_SCHEMA)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    #: Known only to be refused.
    functions: Any = None
    function_call: Any = None
    #: Accepted, without effect.
    metadata: dict[str, Any] | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    modalities: Annotated[list[Any] | None, WithJsonSchema(_MODALITIES)] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def read_messages(self) -> list[dict[str, Any]]:
        """Raises InvalidRequest."""
        return read_messages(self.messages)

    def to_call(self, card: ModelCard, settings: Settings, *, created: int) -> Call:
        options = read_stream_options(self.stream_options, self.stream)
        for former in _FORMER:
            if getattr(self, former) is not None:
                raise UnsupportedParameter(f"{former} is not supported; tools took its place.", param=former)
        if any(modality != "text" for modality in self.modalities or ()):
            raise InvalidRequest('modalities must be ["text"]; this server writes text alone.', param="modalities")
        if self.n > settings.max_choices:
            raise InvalidRequest(f"n must be at most {settings.max_choices}.", param="n")
        self.callable_tools()
        demand = self.demand()
        if demand is not None and self.tools:
            form = demand.param.partition(".")[0]
            raise InvalidRequest(f"tools and {form} exclude each other.", param=form)
        self.thinking_switch()
        limit: LimitField = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(self, limit)
        max_tokens, fit = self.token_limit(asked, limit, card, settings)
        job = self.job(
            card,
            settings,
            id=jobs.new_id("chatcmpl"),
            kind="chat",
            created=created,
            prompts=[""],
            best_of=self.n,
            logprobs=self._logprobs(settings),
            max_tokens=max_tokens,
            fit_max_tokens=fit,
            limit_field=limit,
            add_special=False,
        )
        return Call(
            job,
            self.stream,
            options,
            self.return_tokens_as_token_ids,
            asked if fit else None,
            self.placement(settings),
            demand=demand,
        )

    def _logprobs(self, settings: Settings) -> int | None:
        """As of a job."""
        check_logprobs(self.top_logprobs, "top_logprobs", settings)
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs is only allowed with logprobs: true.", param="top_logprobs")
            return None
        return self.top_logprobs or 0
