"""The sampling fields of a request, as they travel with the job to every engine.

Ranges are those of the OpenAI completions API; the extensions' are those of the engines. The same bounds
serve the API's request model and the worker's second look (`check`). Knows nothing of logits.
"""

from __future__ import annotations

import math

import msgspec

from shared.errors import InvalidRequest

#: field -> (lowest, highest), both allowed.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1_000_000),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "min_tokens": (0, 2**31 - 1),
}
#: Bounds of one logit_bias value.
BIAS_RANGE = (-100.0, 100.0)
#: At or below this temperature, sampling is greedy.
GREEDY_BELOW = 1e-4


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Neutral defaults: temperature 1 and no filter, bias or penalty.

    `top_k` 0 or -1 means all; `top_p` 0 means greedy. `logit_bias` maps token id to an additive bias.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW or self.top_p <= 0.0 or self.top_k == 1

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field out of range or token id out of the vocabulary."""
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise InvalidRequest(f"{name} must be from {low:g} to {high:g}.", param=name)
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit_bias: token id {token} is outside the vocabulary of {vocab_size}.", param="logit_bias"
                )
            if not math.isfinite(bias) or not BIAS_RANGE[0] <= bias <= BIAS_RANGE[1]:
                raise InvalidRequest("logit_bias values must be from -100 to 100.", param="logit_bias")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}.", param="stop_token_ids"
                )
