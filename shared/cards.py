"""Model cards: what the API knows of a model without having it.

A worker writes its card at load; it stays after the last worker is gone. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Literal

import msgspec

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
    that the tokenizer names. `control_ids`: ids that steer the model and are not shown in texts. `fim`: None if it
    cannot fill in the middle. `tokenizer_sha`: sha256 of the tokenizer.json in the store (`keys.tokenizer`), only if it
    was proven equal to the engine's tokenizer.
    `fingerprint`: changes with the weights, the engine or anything else that changes the numbers.
    `constraints`: the engine obeys token masks. `unsupported`: extension fields that this engine refuses; a name that
    ends in `*` stands for all that begin so.
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
    fim: Fim | None = None
    chat_template: str | None = None
    constraints: bool = False
    unsupported: tuple[str, ...] = ()

    def refuses(self, field: str) -> bool:
        """Whether the engine lacks this extension field."""
        return any(field.startswith(name[:-1]) if name.endswith("*") else field == name for name in self.unsupported)


def encode(card: ModelCard) -> bytes:
    return msgspec.json.encode(card)


def decode(raw: bytes) -> ModelCard:
    """Raises msgspec.ValidationError if the card is none; unknown fields are ignored."""
    return msgspec.json.decode(raw, type=ModelCard)
