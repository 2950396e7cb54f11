"""The bodies of `/tokenize` and `/detokenize`. Knows no tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from api.schemas.strict import StrictRequest


class TokenizeRequest(StrictRequest):
    """One of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(StrictRequest):
    """Ids of the model's vocabulary."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
