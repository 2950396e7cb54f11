"""`POST /tokenize` and `/detokenize`. Knows nothing of tokenizers."""

from __future__ import annotations

from typing import Any

from api.schemas.strict import StrictRequest
from api.schemas.thinking import ThinkingFields
from shared.cards import ModelCard
from shared.errors import InvalidRequest


class TokenizeRequest(ThinkingFields):
    """Of `prompt` and `messages` exactly one is there. The switches of thinking count for messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @classmethod
    def read(cls, body: dict[str, Any]) -> TokenizeRequest:
        request = super().read(body)
        if (request.prompt is None) is (request.messages is None):
            raise InvalidRequest(
                "Give either prompt or messages.", param="prompt" if request.prompt is None else "messages"
            )
        request.thinking_switch()
        return request

    @property
    def adds_special(self) -> bool:
        """A template writes its own BOS: with messages only who asks for another one gets it."""
        return self.add_special_tokens and (self.messages is None or "add_special_tokens" in self.model_fields_set)


class DetokenizeRequest(StrictRequest):
    model: str | None = None
    tokens: list[int]

    def check(self, card: ModelCard) -> None:
        """Raises InvalidRequest for ids outside the vocabulary."""
        if self.tokens and (min(self.tokens) < 0 or max(self.tokens) >= card.vocab_size):
            raise InvalidRequest(f"tokens holds an id outside the vocabulary of {card.vocab_size}.", param="tokens")
