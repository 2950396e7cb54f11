"""`POST /v1/completions`: from a parsed body to a job.

Every field of the contract is checked here, also those that are not served yet: a valid value of those is
unsupported_parameter, never silently ignored. Knows nothing of Flask and of the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from api.schemas.output_format import OutputFormatFields
from api.schemas.prompts import PROMPT_SCHEMA, read_prompts
from api.schemas.sampling import SamplingFields
from api.schemas.stream_options import STREAM_OPTIONS_SCHEMA, StreamOptions, read_stream_options
from api.schemas.strict import not_built
from api.schemas.thinking import ThinkingFields
from shared import jobs
from shared.cards import ENGINE_EXTRAS, ModelCard
from shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from shared.jobs import MAX_N, Job, Placement
from shared.settings import Settings

#: Largest best_of that is more than n.
MAX_BEST_OF = 20


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked request. `tokens_as_ids`: logprobs write `token_id:N`.

    `fit_from`: the max_tokens that the client allowed to be cut to what fits; it must be told what became of it.
    `thinking_off`: the field that switched thinking off, None if none did.
    """

    job: Job
    stream: bool
    stream_options: StreamOptions
    tokens_as_ids: bool
    fit_from: int | None
    thinking_off: str | None
    placement: Placement


class CompletionRequest(SamplingFields, OutputFormatFields, ThinkingFields):
    """The fields of a raw completion. Use `read` to make one."""

    engine_extras: ClassVar[tuple[str, ...]] = tuple(name.rstrip("*") for name in ENGINE_EXTRAS)

    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = None
    suffix: str = ""
    max_tokens: int | None = None
    fit_max_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    stream: bool = False
    stream_options: Annotated[dict[str, Any] | None, WithJsonSchema(STREAM_OPTIONS_SCHEMA)] = None
    user: str | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    priority: int = 0
    background: bool = False
    fanout: bool = False
    store: bool = True

    def to_call(self, card: ModelCard, settings: Settings, *, created: int) -> CompletionCall:
        """Raises InvalidRequest, UnsupportedParameter or ContextLengthExceeded, each naming the field."""
        options = read_stream_options(self.stream_options, self.stream)
        prompts = read_prompts(self.prompt, card, settings.max_prompts, empty=bool(self.suffix))
        self._check_choices(len(prompts), settings)
        if self.suffix and self.echo:
            raise InvalidRequest("echo cannot be combined with suffix.", param="echo")
        stops = self.stop_strings(settings)
        params = self.sampling_params(card, settings)
        max_tokens, fit = self._max_tokens(card, settings)
        thinking, switch = self.thinking_switch()
        if thinking is False and self.suffix:
            raise InvalidRequest("Thinking cannot be switched off together with suffix.", param=switch)
        if self.suffix and card.fim is None:
            raise UnsupportedParameter(f"{card.id} has no tokens to fill in the middle with.", param="suffix")
        self.check_output_format()
        if self.background:
            raise not_built("background")
        job = Job(
            id=jobs.new_id("cmpl"),
            model=card.id,
            prompts=prompts,
            n=self.n,
            best_of=self.n if self.best_of is None else self.best_of,
            logprobs=self.logprobs,
            seed=self.sampling_seed(),
            created=created,
            max_tokens=max_tokens,
            fit_max_tokens=fit,
            stop=stops,
            echo=self.echo,
            suffix=self.suffix or None,
            add_special=self.add_special_tokens,
            parse_special=self.parse_special,
            skip_special=self.skip_special_tokens,
            params=params,
        )
        return CompletionCall(
            job,
            self.stream,
            options,
            self.return_tokens_as_token_ids,
            self.max_tokens if fit else None,
            switch if thinking is False else None,
            Placement(
                klass="batch" if self.service_tier == "flex" else "interactive",
                ahead=self.priority < 0,
                fanout=self.fanout,
                keep=self.store,
            ),
        )

    def _check_choices(self, prompts: int, settings: Settings) -> None:
        best_of = self.n if self.best_of is None else self.best_of
        if best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n, which is {self.n}.", param="best_of")
        if best_of > max(self.n, MAX_BEST_OF):
            raise InvalidRequest(f"best_of must be at most {MAX_BEST_OF}, or equal to n.", param="best_of")
        if best_of > self.n and self.stream:
            raise InvalidRequest("best_of above n cannot be streamed.", param="best_of")
        if prompts * best_of > settings.max_choices:
            field = "n" if self.best_of is None else "best_of"
            raise InvalidRequest(
                f"{prompts} prompts with {best_of} candidates each are more than the {settings.max_choices} choices "
                "one request may have.",
                param="prompt" if best_of == 1 else field,
            )
        if self.logprobs is not None and self.logprobs > settings.max_logprobs:
            raise InvalidRequest(f"logprobs must be at most {settings.max_logprobs}.", param="logprobs")

    def _max_tokens(self, card: ModelCard, settings: Settings) -> tuple[int | None, bool]:
        """(limit or None for all remaining context, whether a limit that does not fit is cut)."""
        if self.max_tokens is None:
            return settings.default_max_tokens, settings.default_max_tokens is not None
        if self.max_tokens == 0 and self.echo and self.logprobs is not None:
            return 0, False  # only score the prompt
        if self.max_tokens <= 0:
            return None, False
        fit = settings.fit_max_tokens if self.fit_max_tokens is None else self.fit_max_tokens
        most = card.context - 1  # a prompt has at least one token
        if self.max_tokens > most and not fit:
            raise ContextLengthExceeded(
                f"max_tokens is {self.max_tokens if self.max_tokens < 10**20 else 'too large'}, but the context of "
                f"{card.id} is {card.context} tokens for the prompt and the completion together.",
                param="max_tokens",
            )
        return min(self.max_tokens, most), fit
