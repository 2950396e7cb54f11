"""tokenizer.json of the scripted engine: one token a UTF-8 byte, and `<|256|>` to `<|511|>`.

The ids of pieces, from 512 on, are in the vocabulary for decoding; no text becomes one.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from workers.engines.script import FIRST_PIECE, FIRST_SPECIAL, VOCAB_SIZE


def tokenizer_json() -> str:
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    specials = [f"<|{number}|>" for number in range(FIRST_SPECIAL, FIRST_PIECE)]
    vocabulary |= {special: number for number, special in enumerate(specials, FIRST_SPECIAL)}
    vocabulary |= {f"<{number}>": number for number in range(FIRST_PIECE, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    return str(tokenizer.to_str())


def _characters() -> list[str]:
    """The character that byte-level BPE writes for each byte (GPT-2's bytes_to_unicode)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(0x100)]
