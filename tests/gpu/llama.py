"""A Llama in float64 on the CPU, written from its definition: what the kernels of a GPU are held against.

Knows the folders of tests/exllamav2/models.py; no cache, no batches, no paging.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional


def logprobs(folder: Path, tokens: Sequence[int], vocab_size: int) -> Any:
    """Log-softmax [len(tokens), vocab_size] of the model in `folder` behind each of `tokens`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    length = len(tokens)
    frequencies = config["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight

    def rotate(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    def split(x: Any, count: int) -> Any:
        return x.view(length, count, dim).transpose(0, 1)

    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(config["num_hidden_layers"]):
        of = {
            name.removeprefix(p): tensor
            for name, tensor in weights.items()
            if name.startswith(p := f"model.layers.{layer}.")
        }
        h = norm(x, of["input_layernorm.weight"])
        q = rotate(split(h @ of["self_attn.q_proj.weight"].T, heads))
        k = rotate(split(h @ of["self_attn.k_proj.weight"].T, kv_heads)).repeat_interleave(heads // kv_heads, dim=0)
        v = split(h @ of["self_attn.v_proj.weight"].T, kv_heads).repeat_interleave(heads // kv_heads, dim=0)
        scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(future, -torch.inf)
        seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + seen @ of["self_attn.o_proj.weight"].T
        h = norm(x, of["post_attention_layernorm.weight"])
        gated = functional.silu(h @ of["mlp.gate_proj.weight"].T) * (h @ of["mlp.up_proj.weight"].T)
        x = x + gated @ of["mlp.down_proj.weight"].T
    logits = norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return logits[:, :vocab_size].log_softmax(-1)
