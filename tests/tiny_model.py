"""A llama model of a few thousand random weights, written as GGUF in a moment: for what needs an engine, not a text.

Its tokens are the 256 bytes and a few special ones. It is the same file each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Special tokens behind the bytes, and whether they are control tokens. `<think>` is text to llama.cpp.
SPECIALS = {
    "<|begin|>": True,
    "<|end|>": True,
    "<|fim_prefix|>": True,
    "<|fim_suffix|>": True,
    "<|fim_middle|>": True,
    "<|mark|>": True,
    "<think>": False,
}
ID = {text: 256 + number for number, text in enumerate(SPECIALS)}
CONTEXT = 4096
_WIDTH, _LAYERS, _HEADS, _INNER = 64, 2, 2, 128
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def byte_symbols() -> list[str]:
    """The characters that byte-level BPE writes bytes as, byte 0 first."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write_tiny_model(
    path: Path,
    *,
    fim: bool = True,
    add_bos: bool = True,
    metadata: Mapping[str, int] | None = None,
    chat_template: str | None = None,
    quantised: bool = False,
) -> Path:
    """Without `fim`, the tokens of fill-in-the-middle have names that nobody knows. `metadata`: more of it.
    `quantised`: matrices as Q8_0, else in 32 bits."""
    import gguf

    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_file_type(0)
    symbols = byte_symbols()
    specials = [text if fim else text.replace("fim_", "no_") for text in SPECIALS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*symbols, *specials])
    writer.add_token_types([_NORMAL] * 256 + [_CONTROL if control else _USER_DEFINED for control in SPECIALS.values()])
    writer.add_token_merges([f"{symbols[0]} {symbols[0]}"])
    writer.add_bos_token_id(ID["<|begin|>"])
    writer.add_eos_token_id(ID["<|end|>"])
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    random = np.random.default_rng(5)

    def add(name: str, *shape: int) -> None:
        values = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        if quantised:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, values)

    vocab = 256 + len(SPECIALS)
    writer.add_tensor("token_embd.weight", random.standard_normal((vocab, _WIDTH)).astype(np.float32))
    add("output.weight", vocab, _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", _WIDTH, _WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", _INNER, _WIDTH)
        add(f"blk.{layer}.ffn_up.weight", _INNER, _WIDTH)
        add(f"blk.{layer}.ffn_down.weight", _WIDTH, _INNER)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(_WIDTH, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(_WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
