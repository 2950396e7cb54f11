"""Torch stand-ins for the CUDA kernels that unquantised weights and a 16-bit cache need.

Same names and parameters as in the package's `exllamav2_ext/ext_*.h`, since Python passes them by position. Results agree
with the kernels up to the rounding of the last half-precision digit. Attention is not here: it is the product's own.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

#: The largest finite half. The kernels clamp what they read, so that an overflowed state gives numbers, not NaN.
HALF_MAX = 65504.0


def rms_norm(x: Tensor, w: Tensor, y: Tensor, epsilon: float) -> None:
    """`y = x / rms(x) * w` over the last dimension of `[rows, dim]`; x and y may be half or float."""
    values = x.float().clamp(-HALF_MAX, HALF_MAX)
    y.copy_(values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon) * w.float())


def rms_norm_(x: Tensor, w: Tensor, epsilon: float) -> None:
    rms_norm(x, w, x, epsilon)


def layer_norm(x: Tensor, w: Tensor, b: Tensor, y: Tensor, epsilon: float) -> None:
    """`b` on the meta device means: no bias."""
    values = x.float().clamp(-HALF_MAX, HALF_MAX)
    values = values - values.mean(-1, keepdim=True)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon) * w.float()
    y.copy_(normed if b.is_meta else normed + b.float())


def layer_norm_(x: Tensor, w: Tensor, b: Tensor, epsilon: float) -> None:
    layer_norm(x, w, b, x, epsilon)


def head_norm(x: Tensor, w: Tensor, b: Tensor, y: Tensor, epsilon: float, rms: bool) -> None:
    """Each head of `[..., heads, head_dim]` by itself, with weights `[heads, head_dim]` or `[head_dim]`."""
    if not rms:
        layer_norm(x, w, b, y, epsilon)
        return
    rms_norm(x, w, y, epsilon)
    if not b.is_meta:
        y.add_(b)


def head_norm_(x: Tensor, w: Tensor, b: Tensor, epsilon: float, rms: bool) -> None:
    head_norm(x, w, b, x, epsilon, rms)


def rope_(
    x: Tensor,
    sin: Tensor,
    cos: Tensor,
    past_len: int,
    num_heads: int,
    head_dim: int,
    offsets: Tensor,
    neox_style: bool,
) -> None:
    """Rotates x `[batch, tokens, heads * head_dim]` in place; sin and cos are half tables `[1, 1, positions, rotated]`.

    Row b begins at `past_len + offsets[b]`, at `offsets[b]` where past_len is -1, at past_len where offsets is meta.
    Raises IndexError past the table's end, where CUDA reads what lies behind it.
    """
    rows = x.view(x.shape[0], -1, num_heads, head_dim)
    begin = torch.full((x.shape[0],), past_len)
    if not offsets.is_meta:
        begin = offsets.reshape(-1).long().clamp(min=0) if past_len == -1 else past_len + offsets.reshape(-1).long()
    positions = (begin[:, None] + torch.arange(rows.shape[1])).clamp(min=0)
    rotated = sin.shape[-1]
    sines = sin.view(-1, rotated)[positions][:, :, None].float()
    cosines = cos.view(-1, rotated)[positions][:, :, None].float()
    values = rows[..., :rotated].float()
    if neox_style:
        left, right = values.chunk(2, -1)
        turned = torch.cat((-right, left), -1)
    else:
        turned = torch.stack((-values[..., 1::2], values[..., ::2]), -1).flatten(-2)
    rows[..., :rotated] = (values * cosines + turned * sines).to(x.dtype)


def softcap_(x: Tensor, scale: float) -> None:
    x.copy_(torch.tanh(x.float() / scale) * scale)


def stloader_read(filename: str, offset: int, size: int, target: Tensor) -> None:
    """`size` bytes of a file from byte `offset` into a contiguous tensor. Raises RuntimeError where they are not there."""
    with Path(filename).open("rb") as file:
        file.seek(offset)
        read = bytearray(file.read(size))
    if len(read) != size:
        raise RuntimeError(f"I/O error reading tensor: {len(read)} of {size} bytes in {filename}")
    if size:
        target.view(-1).view(torch.uint8).copy_(torch.frombuffer(read, dtype=torch.uint8))


def count_match(a: Tensor, b: Tensor, max_a: int) -> int:
    """How many tokens at the front of two `[1, n]` sequences are the same, at most `max_a`."""
    length = min(max_a, b.shape[1])
    differ = (a[0, :length] != b[0, :length]).nonzero()
    return int(differ[0]) if len(differ) else max(length, 0)


def cache_rotate(cache: Tensor, order: Tensor, temp: Tensor) -> None:
    """Moves pages of `[pages, ...]` in a ring: page order[0] becomes order[1], ..., the last becomes the old order[0].

    `temp` holds one page. The generator's defragmentation calls it for each tensor of the cache.
    """
    ring = order.tolist()
    kept = temp.view(-1)
    kept.copy_(cache[ring[0]].view(-1))
    for target, source in pairwise(ring):
        cache[target].copy_(cache[source])
    cache[ring[-1]].view(-1).copy_(kept)


STAND_INS = (
    rms_norm,
    rms_norm_,
    layer_norm,
    layer_norm_,
    head_norm,
    head_norm_,
    rope_,
    softcap_,
    stloader_read,
    count_match,
    cache_rotate,
)
