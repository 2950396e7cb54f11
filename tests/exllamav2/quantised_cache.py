"""Torch stand-ins for the two kernels of the Q4, Q6 and Q8 caches, after the arithmetic of `cuda/cache_q.cuh`.

A block is 512 halves. In each 64 of them the even and the odd ones go through a Hadamard transform of 32; then 32
neighbours share one scale. Layout and rounding follow the source, but no GPU has confirmed them bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 512
GROUP = 32

#: The name of a cache (its `wbits`) -> bits of a key, bits of a value. Q6 is 8 and 4.
BITS = {4: (4, 4), 6: (8, 4), 8: (8, 8)}


def fp16_to_q_kv(
    k_in: Tensor,
    k_out: Tensor,
    k_scales: Tensor,
    v_in: Tensor,
    v_out: Tensor,
    v_scales: Tensor,
    batch_size: int,
    offset: int,
    width: int,
    page_size: int,
    cache_seqlens: Tensor,
    block_table: Tensor,
    wbits: int,
) -> None:
    """Stores `width` tokens a sequence: behind cache_seqlens in the pages of block_table, or from `offset` without pages.

    Tokens beside them are stored again where a block holds several tokens, as the kernel does.
    """
    dim = k_in.shape[2] * k_in.shape[3]
    if page_size:
        ranges = _pages_to_store(cache_seqlens, block_table, page_size, width, dim)
    else:
        ranges = _rows(batch_size, offset, width, k_in.shape[1], dim)
    key_bits, value_bits = BITS[wbits]
    for first, last in ranges:
        _store(k_in, k_out, k_scales, first, last, key_bits)
        _store(v_in, v_out, v_scales, first, last, value_bits)


def q_to_fp16_kv(
    k_in: Tensor,
    k_out: Tensor,
    k_scales: Tensor,
    v_in: Tensor,
    v_out: Tensor,
    v_scales: Tensor,
    batch_size: int,
    offset: int,
    width: int,
    page_size: int,
    cache_seqlens: Tensor,
    block_table: Tensor,
    wbits: int,
) -> None:
    """Reads each sequence's cache_seqlens tokens from its pages, or `width` tokens from `offset` without pages."""
    dim = k_out.shape[2] * k_out.shape[3]
    if page_size:
        ranges = _pages_to_read(cache_seqlens, block_table, page_size, dim)
    else:
        ranges = _rows(batch_size, offset, width, k_out.shape[1], dim)
    key_bits, value_bits = BITS[wbits]
    for first, last in ranges:
        _read(k_in, k_scales, k_out, first, last, key_bits)
        _read(v_in, v_scales, v_out, first, last, value_bits)


def _rows(batch_size: int, offset: int, width: int, tokens: int, dim: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements, in the flat tensor, of the same tokens in each row of the batch."""
    first, last = _whole_blocks(offset, offset + width, dim)
    for row in range(batch_size):
        yield (row * tokens + first) * dim, (row * tokens + last) * dim


def _pages_to_store(seqlens: Tensor, table: Tensor, page_size: int, width: int, dim: int) -> Iterator[tuple[int, int]]:
    for length, pages in zip(seqlens.tolist(), table.tolist(), strict=True):
        for number, page in enumerate(pages):
            first, last = _whole_blocks(length - number * page_size, length - number * page_size + width, dim)
            first, last = max(first, 0), min(last, page_size)
            yield (page * page_size + first) * dim, (page * page_size + last) * dim


def _pages_to_read(seqlens: Tensor, table: Tensor, page_size: int, dim: int) -> Iterator[tuple[int, int]]:
    for length, pages in zip(seqlens.tolist(), table.tolist(), strict=True):
        for number, page in enumerate(pages):
            last = _whole_blocks(0, min(page_size, length - number * page_size), dim)[1]
            if last > 0:
                yield page * page_size * dim, (page * page_size + last) * dim


def _whole_blocks(first: int, last: int, dim: int) -> tuple[int, int]:
    """The tokens from first to last, widened until both ends are ends of blocks."""
    while first * dim % BLOCK:
        first -= 1
    while last * dim % BLOCK:
        last += 1
    return first, last


def _store(values: Tensor, stored: Tensor, scales: Tensor, first: int, last: int, bits: int) -> None:
    if first >= last:
        return
    levels = 1 << (bits - 1)
    groups = hadamard(values.view(-1)[first:last]).view(-1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    # 0 / 0 becomes the code 0 on CUDA, and its scale is 0 as well.
    codes = (groups / largest).nan_to_num(-1.0).float().mul(levels).add(levels).half().float()
    codes = codes.round().clamp(0, 2 * levels - 1).to(torch.uint8).view(-1)
    if bits == 4:
        codes = codes[::2] | codes[1::2] << 4
    stored.view(-1)[first * bits // 8 : last * bits // 8] = codes
    scales.view(-1)[first // GROUP : last // GROUP] = (largest / levels).view(-1)


def _read(stored: Tensor, scales: Tensor, values: Tensor, first: int, last: int, bits: int) -> None:
    codes = stored.view(-1)[first * bits // 8 : last * bits // 8]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1)
    centred = codes.view(-1, GROUP).half() - (1 << (bits - 1))
    scaled = centred * scales.view(-1)[first // GROUP : last // GROUP, None]
    values.view(-1)[first:last] = hadamard(scaled.view(-1)) * (1 / GROUP)


def hadamard(values: Tensor) -> Tensor:
    """Of each 64 halves the 32 even and the 32 odd ones, by butterflies in half precision as on CUDA. Not scaled."""
    pairs = values.view(-1, GROUP, 2).transpose(1, 2)
    step = 1
    while step < GROUP:
        halves = pairs.reshape(-1, 2, GROUP // (2 * step), 2, step)
        left, right = halves[..., 0, :], halves[..., 1, :]
        pairs = torch.stack((left + right, left - right), -2).view(-1, 2, GROUP)
        step *= 2
    return pairs.transpose(1, 2).reshape(-1)


STAND_INS = (fp16_to_q_kv, q_to_fp16_kv)
