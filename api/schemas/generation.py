"""What every endpoint that generates text takes, and what comes of a checked request.

Knows no endpoint, nothing of Flask and of the store.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from api.schemas.output_format import Demand, OutputFormatFields
from api.schemas.sampling import SamplingFields
from api.schemas.stream_options import STREAM_OPTIONS_SCHEMA, StreamOptions
from api.schemas.thinking import ThinkingFields
from api.webhooks import targets
from shared.cards import ENGINE_EXTRAS, ModelCard
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.jobs import MAX_N, Job, LimitField, Placement
from shared.settings import Settings

#: More than any context, and still a number that a job can carry; JSON numbers have no end.
MAX_MAX_TOKENS = 2**53


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request. `tokens_as_ids`: logprobs write `token_id:N`.

    `fit_from`: the max_tokens that the client allowed to be cut to what fits; it must be told what became of it.
    `demand`: what the text must be.
    """

    job: Job
    stream: bool
    stream_options: StreamOptions
    tokens_as_ids: bool
    fit_from: int | None
    placement: Placement
    demand: Demand | None = None

    def with_job(self, job: Job) -> Call:
        return replace(self, job=job)


class GenerationRequest(SamplingFields, OutputFormatFields, ThinkingFields):
    """The fields that the endpoints share."""

    engine_extras: ClassVar[tuple[str, ...]] = tuple(name.rstrip("*") for name in ENGINE_EXTRAS)

    model: str | None = None
    max_tokens: int | None = None
    fit_max_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream: bool = False
    stream_options: Annotated[dict[str, Any] | None, WithJsonSchema(STREAM_OPTIONS_SCHEMA)] = None
    user: str | None = None
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    priority: int = 0
    background: bool = False
    webhook_url: str | None = None
    fanout: bool = False
    store: bool = True

    @abstractmethod
    def to_call(self, card: ModelCard, settings: Settings, *, created: int) -> Call:
        """Raises InvalidRequest, UnsupportedParameter or ContextLengthExceeded, each naming the field. Whether a
        max_tokens fits is checked by those who can count the prompts: their length belongs into the error."""

    def job(self, card: ModelCard, settings: Settings, **own: Any) -> Job:
        """The job of the request: what all kinds have in common, and the kind's `own` fields."""
        return Job(
            model=card.id,
            n=self.n,
            seed=self.sampling_seed(),
            stop=self.stop_strings(settings),
            skip_special=self.skip_special_tokens,
            params=self.sampling_params(card, settings),
            **own,
        )

    def placement(self, settings: Settings) -> Placement:
        """Raises InvalidRequest or UnsupportedParameter."""
        if self.webhook_url is not None:
            targets.check(self.webhook_url, settings.webhook_targets)
            if not self.background:
                raise InvalidRequest("webhook_url needs background.", param="webhook_url")
        return Placement(
            klass="batch" if self.service_tier == "flex" else "interactive",
            ahead=self.priority < 0,
            fanout=self.fanout,
            keep=self.store,
            background=self.background,
            webhook=self.webhook_url or "",
        )

    def token_limit(
        self, asked: int | None, field: LimitField, card: ModelCard, settings: Settings
    ) -> tuple[int | None, bool]:
        """(limit or None for all remaining context, whether a limit that does not fit is cut); `asked` in `field`."""
        if asked is None:
            return settings.default_max_tokens, settings.default_max_tokens is not None
        if asked <= 0:
            return None, False
        if settings.fit_max_tokens if self.fit_max_tokens is None else self.fit_max_tokens:
            return min(asked, card.context - 1), True  # a prompt has at least one token
        if asked > MAX_MAX_TOKENS:
            raise ContextLengthExceeded(
                f"{field} is far more than the {card.context} tokens of the context.", param=field
            )
        return asked, False


def check_logprobs(wanted: int | None, field: str, settings: Settings) -> None:
    """Raises InvalidRequest for more alternatives than the server gives."""
    if wanted is not None and wanted > settings.max_logprobs:
        raise InvalidRequest(f"{field} must be at most {settings.max_logprobs}.", param=field)
