"""The prompt field of raw completions: a string, strings, token ids, or several of those.

Knows no tokenizer: strings stay as sent, ids are only compared with the size of the vocabulary.
"""

from __future__ import annotations

from typing import Any

from shared.cards import ModelCard
from shared.errors import InvalidRequest

_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
#: What `read_prompts` takes, as a JSON schema; the vocabulary and the number of prompts are the server's.
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": ["string", "null"]}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}


def read_prompts(value: Any, card: ModelCard, most: int, *, empty: bool = False) -> list[str | list[int]]:
    """One element a prompt; null and "" are "", meaning "from BOS". `empty`: "" needs no BOS.

    Raises InvalidRequest for other shapes, empty arrays, ids outside the vocabulary, more than `most` prompts, and
    for an empty prompt where the model has no BOS to begin with.
    """
    if value is None or isinstance(value, str):
        prompts: list[str | list[int]] = [value or ""]
    elif not isinstance(value, list):
        raise _wrong("prompt must be a string, an array of strings, or token ids.")
    elif not value:
        raise _wrong("prompt must not be an empty array.")
    elif all(item is None or isinstance(item, str) for item in value):
        prompts = [item or "" for item in value]
    elif any(isinstance(item, list) for item in value):
        prompts = [_token_ids(item, card) for item in value]
    else:
        prompts = [_token_ids(value, card)]
    if len(prompts) > most:
        raise _wrong(f"prompt takes at most {most} prompts, not {len(prompts)}.")
    if card.bos_id is None and "" in prompts and not empty:
        raise _wrong(f"prompt is empty, and {card.id} has no begin-of-text token to start from.")
    return prompts


def _token_ids(value: Any, card: ModelCard) -> list[int]:
    if not isinstance(value, list):
        raise _wrong("prompt mixes token arrays with other values.")
    if not value:
        raise _wrong("A prompt of token ids must not be empty.")
    if not all(type(item) is int for item in value):  # a bool is an int to isinstance
        raise _wrong("A prompt of token ids must hold integers only.")
    if min(value) < 0 or max(value) >= card.vocab_size:
        raise _wrong(f"prompt holds a token id outside the vocabulary of {card.vocab_size}.")
    return value


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="prompt")
