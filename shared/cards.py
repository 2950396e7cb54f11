"""Model cards: what the API knows of a model without having it.

A worker writes its card at load; it stays after the last worker is gone. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from shared import tool_calls
from shared.think_tags import is_tag

#: Request fields that need more of an engine than the others: names, or beginnings of names that end in `*`.
ENGINE_EXTRAS = (
    "dry_*",
    "xtc_*",
    "mirostat*",
    "temperature_last",
    "smoothing_factor",
    "banned_strings",
    "token_healing",
)


class Fim(msgspec.Struct, frozen=True, omit_defaults=True):
    """The token ids of fill-in-the-middle. `mode`: the prefix comes first (psm) or the suffix (spm)."""

    prefix: int
    suffix: int
    middle: int | None = None
    mode: Literal["psm", "spm"] = "psm"


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """One served model.

    `context`: tokens of prompt and completion together. `vocab_size`: ids a client may name (the head may be
    wider). `add_bos`: the tokenizer puts `bos_id` before a string. `end_ids`: ids that end a text, `eos_id` the one
    that the tokenizer names. `control_ids`: ids that steer the model and are not shown in texts; no tags of thinking and
    of calls are among them, whatever the vocabulary says. `special`: how these, `bos_id`, `end_ids`, `eos_id` and `pad_id` are written.
    `fim`: None if it cannot fill in the middle. `tokenizer_sha`: sha256 of the tokenizer.json in the store
    (`keys.tokenizer`), only if it was proven equal to the engine's tokenizer.
    `fingerprint`: changes with the weights, the engine or anything else that changes the numbers.
    `constraints`: the engine obeys token masks. `unsupported`: extension fields that this engine refuses; a name that
    ends in `*` stands for all that begin so. `loras`: names of the adapters laid over the weights.
    """

    id: str
    engine: str
    context: int
    vocab_size: int
    lanes: int
    fingerprint: str
    aliases: tuple[str, ...] = ()
    created: int = 0
    add_bos: bool = False
    bos_id: int | None = None
    end_ids: tuple[int, ...] = ()
    eos_id: int | None = None
    pad_id: int | None = None
    tokenizer_sha: str | None = None
    control_ids: tuple[int, ...] = ()
    special: dict[int, str] = {}
    fim: Fim | None = None
    chat_template: str | None = None
    constraints: bool = False
    unsupported: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()

    def refuses(self, field: str) -> bool:
        """Whether the engine lacks this extension field."""
        return any(field.startswith(name[:-1]) if name.endswith("*") else field == name for name in self.unsupported)

    def with_special(self, pieces: Callable[[int], bytes]) -> ModelCard:
        """The card with its special tokens written out; `pieces` gives the raw bytes of an id. An id whose bytes are no
        text has none."""
        named = (token for token in (self.bos_id, self.eos_id, self.pad_id) if token is not None)
        ids = {*self.control_ids, *self.end_ids, *named}
        written = {token: pieces(token).decode(errors="ignore") for token in sorted(ids)}
        control = tuple(
            token for token in self.control_ids if not is_tag(written[token]) and written[token] not in tool_calls.TAGS
        )
        special = {token: text for token, text in written.items() if text}
        return msgspec.structs.replace(self, control_ids=control, special=special)

    @property
    def control_texts(self) -> tuple[str, ...]:
        """The texts that are read as control tokens where special tokens are parsed."""
        return tuple(text for text in self.special.values() if len(text.strip()) > 1 and not is_tag(text))


def encode(card: ModelCard) -> bytes:
    return msgspec.json.encode(card)


def decode(raw: bytes) -> ModelCard:
    """Raises msgspec.ValidationError if the card is none; unknown fields are ignored."""
    return msgspec.json.decode(raw, type=ModelCard)
