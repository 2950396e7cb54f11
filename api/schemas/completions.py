"""`POST /v1/completions`: from a parsed body to a job.

Every field of the contract is checked here, also those that are not served yet: a valid value of those is
unsupported_parameter, never silently ignored. Knows nothing of Flask and of the store.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from api.schemas.generation import Call, GenerationRequest, check_logprobs
from api.schemas.prompts import PROMPT_SCHEMA, read_prompts
from api.schemas.stream_options import read_stream_options
from shared import jobs
from shared.cards import ModelCard
from shared.errors import InvalidRequest, UnsupportedParameter
from shared.jobs import MAX_N
from shared.settings import Settings

#: Largest best_of that is more than n.
MAX_BEST_OF = 20


class CompletionRequest(GenerationRequest):
    """The fields of a raw completion. Use `read` to make one."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = None
    suffix: str = ""
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True

    def to_call(self, card: ModelCard, settings: Settings, *, created: int) -> Call:
        options = read_stream_options(self.stream_options, self.stream)
        prompts = read_prompts(self.prompt, card, settings.max_prompts, empty=bool(self.suffix))
        self._check_choices(len(prompts), settings)
        if self.suffix and self.echo:
            raise InvalidRequest("echo cannot be combined with suffix.", param="echo")
        max_tokens, fit = self._max_tokens(card, settings)
        thinking, switch = self.thinking_switch()
        if thinking is False and self.suffix:
            raise InvalidRequest("Thinking cannot be switched off together with suffix.", param=switch)
        if self.suffix and card.fim is None:
            raise UnsupportedParameter(f"{card.id} has no tokens to fill in the middle with.", param="suffix")
        job = self.job(
            card,
            settings,
            id=jobs.new_id("cmpl"),
            created=created,
            prompts=prompts,
            best_of=self.n if self.best_of is None else self.best_of,
            logprobs=self.logprobs,
            max_tokens=max_tokens,
            fit_max_tokens=fit,
            echo=self.echo,
            suffix=self.suffix or None,
            add_special=self.add_special_tokens,
            parse_special=self.parse_special,
        )
        return Call(
            job,
            self.stream,
            options,
            self.return_tokens_as_token_ids,
            self.max_tokens if fit else None,
            self.placement(settings),
            demand=self.demand(),
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
        check_logprobs(self.logprobs, "logprobs", settings)

    def _max_tokens(self, card: ModelCard, settings: Settings) -> tuple[int | None, bool]:
        """As `token_limit`."""
        if self.max_tokens == 0 and self.echo and self.logprobs is not None:
            return 0, False  # only score the prompt
        return self.token_limit(self.max_tokens, "max_tokens", card, settings)
