"""A GGUF file of a llama model as a folder for transformers, and as a GGUF of plain 32-bit floats: the same numbers.

Runs in the environment with gguf and transformers: `python gguf_to_hf.py MODEL.gguf FOLDER`. The dequantised weights are
kept in 32 bits, so nothing is rounded a second time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

#: Part of a GGUF tensor's name -> of a transformers one.
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: `tokenizer.ggml.token_type` of control tokens.
CONTROL = 3


def convert(source: Path, folder: Path) -> None:
    """Writes config, weights and tokenizer into `folder`, and `f32.gguf` beside them."""
    reader = gguf.GGUFReader(source)
    weights = _folder(reader, folder, torch.float32)
    _as_floats(reader, weights, folder / "f32.gguf")


def convert_to_half(source: Path, folder: Path) -> None:
    """The same folder with 16-bit weights, which is what exllamav2 takes, and the chat template; no GGUF."""
    reader = gguf.GGUFReader(source)
    _folder(reader, folder, torch.float16)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"add_bos_token": False, "chat_template": _field(reader, "tokenizer.chat_template")}
    path.write_text(json.dumps(config), encoding="utf-8")
    eos = {"eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")


def _folder(reader: gguf.GGUFReader, folder: Path, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Writes the folder for transformers; returns the weights as floats, by their GGUF names."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    _config(reader, folder, dtype)
    _weights(reader, weights, folder, dtype)
    _tokenizer(reader, folder)
    return weights


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: gguf.GGUFReader, folder: Path, dtype: torch.dtype) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "hidden_act": "silu",
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _weights(reader: gguf.GGUFReader, weights: dict[str, np.ndarray], folder: Path, dtype: torch.dtype) -> None:
    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    made = {}
    for name, values in weights.items():
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                values = _halves(values, heads[parts[2]])
            made[f"model.layers.{parts[1]}.{PARTS[parts[2]]}.weight"] = values
        else:
            made[f"{WHOLE[parts[0]]}.weight"] = values
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)).to(dtype) for name, values in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the two halves that are rotated against each other; transformers keeps them apart."""
    rows = values.shape[0] // heads // 2
    return values.reshape(heads, rows, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _tokenizer(reader: gguf.GGUFReader, folder: Path) -> None:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _as_floats(reader: gguf.GGUFReader, weights: dict[str, np.ndarray], target: Path) -> None:
    writer = gguf.GGUFWriter(target, _field(reader, "general.architecture"))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer makes these itself
        value = 0 if name == "general.file_type" else field.contents()
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], item)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
