"""The sampling fields, the same on every endpoint that generates text.

Bounds come from `shared.sampling`, so that the worker's second look cannot disagree. Knows no endpoint.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from api.schemas.strict import StrictRequest, not_built
from shared.cards import ModelCard
from shared.errors import InvalidRequest, UnsupportedParameter
from shared.jobs import new_seed
from shared.sampling import BIAS_RANGE, RANGES, SamplingParams
from shared.settings import Settings

#: Longest stop string, characters.
MAX_STOP_LENGTH = 1000
#: Entries of one stop_token_ids.
MAX_STOP_IDS = 1024

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

_STOP: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
#: What `stop_strings` takes, as a JSON schema; how many is a setting.
STOP_SCHEMA: dict[str, Any] = {"anyOf": [_STOP, {"type": "array", "items": _STOP}]}
STOP_TOKEN_IDS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "maxItems": MAX_STOP_IDS,
    "items": {"type": "integer", "minimum": 0},
}
LOGIT_BIAS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
    "additionalProperties": {"type": "number", "minimum": BIAS_RANGE[0], "maximum": BIAS_RANGE[1]},
}


def _number(name: str) -> Any:
    return Field(ge=RANGES[name][0], le=RANGES[name][1], allow_inf_nan=False)


def _integer(name: str) -> Any:
    return Field(ge=int(RANGES[name][0]), le=int(RANGES[name][1]))


class SamplingFields(StrictRequest):
    """`seed` -1 = none; `top_k` 0 or -1 = all; `temperature` 0 and `top_p` 0 = greedy."""

    temperature: Annotated[float, _number("temperature")] = 1.0
    top_p: Annotated[float, _number("top_p")] = 1.0
    top_k: Annotated[int, _integer("top_k")] = 0
    min_p: Annotated[float, _number("min_p")] = 0.0
    typical_p: Annotated[float, _number("typical_p")] = 1.0
    presence_penalty: Annotated[float, _number("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _number("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, _number("repetition_penalty")] = 1.0
    min_tokens: Annotated[int, _integer("min_tokens")] = 0
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: Annotated[dict[str, Any], WithJsonSchema(LOGIT_BIAS_SCHEMA)] = Field(default_factory=dict)
    stop: Annotated[Any, WithJsonSchema(STOP_SCHEMA)] = None
    stop_token_ids: Annotated[list[int], WithJsonSchema(STOP_TOKEN_IDS_SCHEMA)] = Field(default_factory=list)

    def sampling_params(self, card: ModelCard, settings: Settings) -> SamplingParams:
        """Raises InvalidRequest for token ids the model does not have, UnsupportedParameter for fields its engine
        refuses."""
        self._check_engine(card)
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logit_bias=self._logit_bias(card.vocab_size, settings.max_logit_bias),
            stop_token_ids=tuple(self.stop_token_ids),
        )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_IDS} ids.", param="stop_token_ids")
        params.check(card.vocab_size)
        return params

    def sampling_seed(self) -> int:
        """The request's seed, or a fresh one."""
        return new_seed() if self.seed is None or self.seed == -1 else self.seed

    def stop_strings(self, settings: Settings) -> list[str]:
        """The stop strings; none for an absent or empty list."""
        if self.stop is None:
            return []
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
            raise InvalidRequest("stop must be a string or an array of strings.", param="stop")
        if len(stops) > settings.max_stops:
            raise InvalidRequest(f"stop takes at most {settings.max_stops} strings, not {len(stops)}.", param="stop")
        for item in stops:
            if not item:
                raise InvalidRequest("A stop string must not be empty.", param="stop")
            if len(item) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"A stop string has at most {MAX_STOP_LENGTH} characters.", param="stop")
        return list(dict.fromkeys(stops))

    def _logit_bias(self, vocab_size: int, most: int) -> dict[int, float]:
        if len(self.logit_bias) > most:
            raise InvalidRequest(f"logit_bias takes at most {most} entries.", param="logit_bias")
        biases: dict[int, float] = {}
        for key, bias in self.logit_bias.items():
            if not _TOKEN_ID.fullmatch(key):
                raise InvalidRequest(
                    f"logit_bias keys are token ids as decimal strings, not {key[:64]!a}.", param="logit_bias"
                )
            if int(key) >= vocab_size:
                raise InvalidRequest(
                    f"logit_bias: token id {key} is outside the vocabulary of {vocab_size}.", param="logit_bias"
                )
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise InvalidRequest("logit_bias values must be numbers.", param="logit_bias")
            if not BIAS_RANGE[0] <= bias <= BIAS_RANGE[1]:
                raise InvalidRequest("logit_bias values must be from -100 to 100.", param="logit_bias")
            biases[int(key)] = float(bias)
        return biases

    def _check_engine(self, card: ModelCard) -> None:
        for name, field in type(self).model_fields.items():
            if getattr(self, name) != field.default and card.refuses(name):
                raise UnsupportedParameter(f"The engine of {card.id} does not support {name}.", param=name)
        for name in self._extras:
            if card.refuses(name):
                raise UnsupportedParameter(f"The engine of {card.id} does not support {name[:64]!a}.", param=name[:64])
            raise not_built(name[:64])
