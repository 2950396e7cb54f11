"""Llama in plain torch and 32-bit floats, read from a folder of Hugging Face's layout: what the engine is held to.

One whole sequence at a time, no cache, no batches, nothing of the package or of the product. Semantics are those of
`transformers` (rotation by halves, grouped keys, RMS norm in 32 bits).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear, silu


class Reference:
    """The model in `folder`. `logits(tokens)` is [n, vocab]: row p tells of token p + 1."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
        self.heads = self.config["num_attention_heads"]
        self.groups = self.config.get("num_key_value_heads") or self.heads
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        head = "lm_head.weight"
        self.head = self.weights[head if head in self.weights else "model.embed_tokens.weight"]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        states = embedding(torch.tensor(list(tokens)), self.weights["model.embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            states = states + self._attention(name, self._norm(states, f"{name}input_layernorm"))
            states = states + self._feed_forward(name, self._norm(states, f"{name}post_attention_layernorm"))
        return linear(self._norm(states, "model.norm"), self.head)

    def _norm(self, states: Tensor, name: str) -> Tensor:
        variance = states.pow(2).mean(-1, keepdim=True)
        return states * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def _attention(self, name: str, states: Tensor) -> Tensor:
        n = len(states)
        query, key, value = (
            linear(states, self.weights[f"{name}self_attn.{part}_proj.weight"])
            .view(n, -1, self.head_dim)
            .transpose(0, 1)
            for part in "qkv"
        )
        query, key = self._rotated(query), self._rotated(key)
        key, value = (part.repeat_interleave(self.heads // self.groups, 0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(n, -1)
        return linear(mixed, self.weights[f"{name}self_attn.o_proj.weight"])

    def _rotated(self, states: Tensor) -> Tensor:
        """[heads, n, head_dim], rotated by position."""
        half = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(states.shape[1])[:, None] / self.config.get("rope_theta", 10000.0) ** half
        cosine, sine = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        left, right = states.chunk(2, -1)
        return states * cosine + torch.cat((-right, left), -1) * sine

    def _feed_forward(self, name: str, states: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return linear(silu(linear(states, gate)) * linear(states, up), down)
