"""Attention over a paged cache in plain torch, so that batching does not depend on flash-attn.

PyPI has no wheel of flash-attn, and without it the generator of exllamav2 serves one sequence at a time. `install` puts
`PagedAttention` in flash-attn's place where flash-attn is missing. This file knows tensors only: nothing of jobs, of
who owns a page, or of how the cache stores its values.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Upper bound of one mask (as a boolean and in the values' type) or of one float32 score buffer, in bytes. Longer
#: prefills are cut along the queries.
SCORES_BYTES = 64 << 20
#: Upper bound of the keys and values gathered at a time, in bytes; one row is always taken. More rows go in turns.
GATHERED_BYTES = 256 << 20
#: Up to so many queries the query heads that share a key head are laid side by side as queries: each key is then read
#: once. With more, the mask would grow by their number for nothing.
FEW_QUERIES = 16


@dataclass
class Plan:
    """Where a batch's tokens lie, the same for all layers of a forward pass. All on the device, nothing read back.

    `slots`: `[rows, key_len]`, for each position the slot (page * page_size + offset) to read. Positions past the end
    of a row read the row's last token again: never an unused slot, where a NaN would pass any mask (0 * NaN is NaN),
    and never the pages that only pad the block table. `queries` and `written`: `[rows, q_len]`, the position of each
    query in its row, and the slot of its own key. `key_positions`: `[key_len]`.
    """

    slots: Tensor
    queries: Tensor
    written: Tensor
    key_positions: Tensor
    #: Masks for all queries of some rows at once, which the next layer can take again: by rows, window and repeats.
    masks: dict[tuple[int, int, int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, ends: Tensor, block_table: Tensor, q_len: int, page_size: int) -> Plan:
        """`ends`: `[rows]`, the lengths with the queries' own tokens. `key_len` is all of the block table, which the
        generator has cut to what its longest row needs: to know less would take a wait for the device."""
        last = ends.long().unsqueeze(1) - 1
        keys = torch.arange(block_table.shape[1] * page_size, device=block_table.device)
        queries = last + torch.arange(1 - q_len, 1, device=block_table.device)
        slots = _slots(block_table, torch.minimum(keys, last), page_size)
        return cls(slots, queries, _slots(block_table, queries, page_size), keys)

    def gather(self, cache: Tensor, rows: slice) -> Tensor:
        """`cache`: `[slots, kv_heads, head_dim]`. Returns `[rows, kv_heads, key_len, head_dim]`."""
        slots = self.slots[rows]
        return cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:]).transpose(1, 2)

    def mask(self, rows: slice, queries: slice, window: int, repeats: int) -> Tensor:
        """`[rows, 1, queries * repeats, key_len]`, true where a query sees a key: its own position and what came
        before, at most `window` positions back (negative: all)."""
        key = (rows.start, rows.stop, window, repeats)
        whole = queries.stop - queries.start == self.queries.shape[1]
        if whole and key in self.masks:
            return self.masks[key]
        positions = self.queries[rows, queries].repeat_interleave(repeats, dim=1)[:, None, :, None]
        visible = self.key_positions <= positions
        if window >= 0:
            visible &= self.key_positions >= positions - window
        if whole:
            self.masks[key] = visible
        return visible


def _slots(block_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    pages = torch.div(positions, page_size, rounding_mode="floor")
    return block_table.gather(1, pages) * page_size + torch.remainder(positions, page_size)


class PagedAttention:
    """Stands in for `flash_attn.flash_attn_with_kvcache`, as far as exllamav2 0.3.2 calls it (`forward_paged`).

    `plan_once`: the same `cache_seqlens` and `block_table` objects mean the same plan, so that a forward pass makes it
    for its first layer only. True for tensors on a GPU, which exllamav2 makes anew for every pass; not for those on the
    CPU, to which its draft loop adds in place.
    """

    def __init__(self, plan_once: bool) -> None:
        self._plan_once = plan_once
        self._asked: tuple[Tensor, Tensor, int, bool, int] | None = None
        self._plan: Plan | None = None

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        causal: bool,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        """Attends `q` `[rows, q_len, heads, head_dim]` to the pages `k_cache` and `v_cache`
        `[pages, page_size, kv_heads, head_dim]` named by `block_table` `[rows, pages_of_a_row]`, and returns
        `[rows, q_len, heads, v_head_dim]`.

        With `k` and `v` `[rows, q_len, kv_heads, head_dim]` these are first written into the pages, in place, after the
        `cache_seqlens` `[rows]` tokens already there. Without them the caller has written them, and `cache_seqlens`
        counts them. The queries are the last `q_len` positions of their row. `window_size`: a query sees itself and
        so many positions to its left (-1: all); nothing to its right, as the attention is causal. `softcap`: scores
        become `softcap * tanh(score / softcap)`.

        Raises `ValueError` if asked for attention that is not causal, or given keys without values.
        """
        if not causal:
            raise ValueError("paged attention without flash-attn is causal only")
        if (k is None) != (v is None):
            raise ValueError("keys and values are appended together")
        rows, q_len, heads, head_dim = q.shape
        page_size, kv_heads = k_cache.shape[1:3]
        plan = self._plan_for(cache_seqlens, block_table, q_len, k is not None, page_size)
        keys, values = k_cache.view(-1, kv_heads, head_dim), v_cache.view(-1, kv_heads, v_cache.shape[3])
        if k is not None and v is not None:
            keys[plan.written] = k
            values[plan.written] = v
        scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        v_head_dim = values.shape[2]
        row_bytes = plan.slots.shape[1] * kv_heads * (head_dim + v_head_dim) * (4 if softcap else keys.element_size())
        step = max(1, GATHERED_BYTES // row_bytes)
        # query heads by the key head they share
        grouped = q.view(rows, q_len, kv_heads, heads // kv_heads, head_dim)
        out = q.new_empty(rows, q_len, kv_heads, heads // kv_heads, v_head_dim)
        for first in range(0, rows, step):
            some = slice(first, first + step)
            k_rows, v_rows = plan.gather(keys, some), plan.gather(values, some)
            if softcap:
                k_rows, v_rows = k_rows.float(), v_rows.float()
            _attend(grouped[some], k_rows, v_rows, plan, some, scale, window_size[0], softcap, out[some])
        return out.view(rows, q_len, heads, v_head_dim)

    def _plan_for(self, cache_seqlens: Tensor, block_table: Tensor, q_len: int, appended: bool, page_size: int) -> Plan:
        asked = (cache_seqlens, block_table, q_len, appended, page_size)
        if self._plan is not None and self._asked is not None:
            seqlens, table, *sizes = self._asked
            if seqlens is cache_seqlens and table is block_table and sizes == [q_len, appended, page_size]:
                return self._plan
        plan = Plan.of(cache_seqlens + q_len if appended else cache_seqlens, block_table, q_len, page_size)
        if self._plan_once:
            # the tensors are kept with it: while they live no other can be taken for them
            self._asked, self._plan = asked, plan
        return plan


def _attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, rows: slice, scale: float, window: int, softcap: float, out: Tensor
) -> None:
    """`q`: `[rows, q_len, kv_heads, groups, head_dim]`, `k` and `v`: `[rows, kv_heads, key_len, head_dim]`, `out` like
    `q`. Cut along the queries so that mask and scores stay within `SCORES_BYTES`."""
    count, q_len, kv_heads, groups, _ = q.shape
    side_by_side = bool(softcap) or q_len <= FEW_QUERIES
    repeats = groups if side_by_side else 1
    if softcap:
        query_bytes = count * kv_heads * groups * k.shape[2] * 4
    else:  # one mask for all heads: a boolean, and torch makes one of the values' type of it
        copies = groups if side_by_side else 1 if count == 1 else kv_heads
        query_bytes = count * copies * k.shape[2] * (1 + q.element_size())
    step = max(1, SCORES_BYTES // query_bytes)
    if not side_by_side:
        # [rows * kv_heads, groups, key_len, head_dim]: the groups share a key head without a copy
        k = k.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
        v = v.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    for first in range(0, q_len, step):
        some = slice(first, min(first + step, q_len))
        length = some.stop - first
        mask = plan.mask(rows, some, window, repeats)
        if side_by_side:
            # [rows, kv_heads, queries * groups, head_dim]
            part = q[:, some].transpose(1, 2).flatten(2, 3)
            if softcap:
                seen = _soft_capped(part.float(), k, v, mask, scale, softcap)
            else:
                seen = functional.scaled_dot_product_attention(part, k, v, mask, scale=scale)
            out[:, some] = seen.view(count, kv_heads, length, groups, -1).transpose(1, 2)
        else:
            if count > 1:
                mask = mask.repeat_interleave(kv_heads, dim=0)
            # [rows * kv_heads, groups, queries, head_dim]
            part = q[:, some].permute(0, 2, 3, 1, 4).flatten(0, 1)
            seen = functional.scaled_dot_product_attention(part, k, v, mask, scale=scale)
            out[:, some] = seen.view(count, kv_heads, groups, length, -1).permute(0, 3, 1, 2, 4)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """In float32, as `scaled_dot_product_attention` has no place for the cap, and half scores round by percents."""
    scores = torch.matmul(q * (scale / softcap), k.transpose(2, 3)).tanh_().mul_(softcap)
    return torch.matmul(scores.masked_fill_(~mask, -math.inf).softmax(-1), v)


def install() -> str:
    """Gives exllamav2 its paged attention and returns which one: "flash-attn <version>" or "torch".

    To be called once the package is imported and before a generator is made. flash-attn is taken where the package
    found it (2.5.7 or newer) and every GPU can run it (compute capability 8.0 or newer; the package only warns).

    With ours `has_flash_attn` is false, as it stands for the functions over contiguous keys too, which we do not
    replace. There the package has a bug of its own: without flash-attn and xformers its SDPA prefill drops the causal
    mask (`_attn_torch`, 0.2.9 to 0.3.2), which gives wrong text and no error. The loader therefore sets
    `config.no_sdpa`, so that what is not paged takes the matmul branch, which is right.

    Tensor parallelism is not served by ours: its C++ (`tp_attn_forward_paged_`) imports `flash_attn_2_cuda` itself.
    """
    # by name: the package is not there on most machines, and its module globals are not exports
    attn: Any = importlib.import_module("exllamav2.attn")
    devices = range(torch.cuda.device_count())
    able = bool(devices) and all(torch.cuda.get_device_capability(index) >= (8, 0) for index in devices)
    if attn.has_flash_attn and attn.has_flash_attn_with_paged and able:
        return f"flash-attn {attn.flash_attn.__version__}"
    attn.flash_attn_with_kvcache = PagedAttention(plan_once=bool(devices))
    attn.has_flash_attn = False
    attn.has_flash_attn_with_paged = True
    attn.has_flash_attn_with_window = True
    attn.has_flash_attn_with_softcap = True
    return "torch"
