"""Paged attention in torch against one token at a time in float64, on pages whose unused slots hold NaN."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch comes with requirements-gpu.txt")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  (only once torch is there)

from workers.engines.exllamav2 import attention  # noqa: E402
from workers.engines.exllamav2.attention import PagedAttention  # noqa: E402

PAGE = 256
EDGES = (1, 2, 255, 256, 257, 511, 512, 513, 700)
#: Absolute and relative; values are normal, so that outputs are around 1.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass
class Batch:
    """One call: `ends` are the lengths of the rows with the queries' own tokens."""

    ends: list[int]
    q: Any
    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    table: Any

    @classmethod
    def make(
        cls,
        ends: list[int],
        q_len: int,
        *,
        seed: int = 0,
        kv_heads: int = 2,
        groups: int = 2,
        head_dim: int = 32,
        v_head_dim: int | None = None,
        dtype: Any = torch.float16,
        shared: bool = False,
    ) -> Batch:
        """Pages in random order, all NaN but the tokens of the rows; `shared`: rows begin with the same whole pages,
        as many as none of them writes to. The last `q_len` keys and values of each row are in `k` and `v` only."""
        random = torch.Generator().manual_seed(seed)
        width = max(-(-end // PAGE) for end in ends)
        pages = torch.randperm(len(ends) * width + 1, generator=random)
        table = pages[: len(ends) * width].view(len(ends), width).to(torch.int32)
        common = min(end - q_len for end in ends) // PAGE if shared else 0
        table[:, :common] = table[0, :common].clone()
        for row, end in enumerate(ends):
            table[row, -(-end // PAGE) :] = 0  # what the generator pads with

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=random).to(dtype)

        v_head_dim = v_head_dim or head_dim
        caches = []
        for width_of_head in (head_dim, v_head_dim):
            cache = torch.full((len(pages), PAGE, kv_heads, width_of_head), math.nan, dtype=dtype)
            for row, end in enumerate(ends):
                for page in range(common if row else 0, -(-(end - q_len) // PAGE)):
                    length = min(PAGE, end - q_len - page * PAGE)
                    cache[table[row, page], :length] = normal(length, kv_heads, width_of_head)
            caches.append(cache)
        return cls(
            ends,
            normal(len(ends), q_len, kv_heads * groups, head_dim),
            normal(len(ends), q_len, kv_heads, head_dim),
            normal(len(ends), q_len, kv_heads, v_head_dim),
            *caches,
            table,
        )

    @property
    def q_len(self) -> int:
        return int(self.q.shape[1])

    def slots(self, row: int, first: int, end: int) -> list[tuple[int, int]]:
        return [(int(self.table[row, at // PAGE]), at % PAGE) for at in range(first, end)]

    def write(self) -> None:
        """The new tokens into the pages, one by one, as the reference knows them."""
        for row, end in enumerate(self.ends):
            for at, (page, offset) in enumerate(self.slots(row, end - self.q_len, end)):
                self.k_cache[page, offset] = self.k[row, at]
                self.v_cache[page, offset] = self.v[row, at]

    def expected(self, scale: float | None = None, window: int = -1, softcap: float = 0.0) -> Any:
        """Needs `write` first."""
        rows, q_len, heads, head_dim = self.q.shape
        scale = scale or head_dim**-0.5
        groups = heads // self.k_cache.shape[2]
        out = torch.zeros(rows, q_len, heads, self.v_cache.shape[3], dtype=torch.float64)
        for row, end in enumerate(self.ends):
            pages, offsets = (torch.tensor(part) for part in zip(*self.slots(row, 0, end), strict=True))
            keys, values = self.k_cache[pages, offsets].double(), self.v_cache[pages, offsets].double()
            for query in range(q_len):
                at = end - q_len + query
                first = max(0, at - window) if window >= 0 else 0
                for head in range(heads):
                    scores = keys[first : at + 1, head // groups] @ self.q[row, query, head].double() * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    out[row, query, head] = torch.softmax(scores, 0) @ values[first : at + 1, head // groups]
        return out

    def attend(
        self, attention: PagedAttention | None = None, *, appended: bool = False, device: str = "cpu", **more: Any
    ) -> Any:
        """`appended`: the new tokens are handed over, else they lie in the pages already."""
        lengths = [end - self.q_len if appended else end for end in self.ends]
        with torch.inference_mode():  # as the generator calls it
            return (attention or PagedAttention(plan_once=False))(
                q=self.q.to(device),
                k=self.k.to(device) if appended else None,
                v=self.v.to(device) if appended else None,
                k_cache=self.k_cache.to(device),
                v_cache=self.v_cache.to(device),
                cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
                block_table=self.table.to(device),
                causal=True,
                **more,
            )


def assert_near(got: Any, expected: Any, dtype: Any) -> None:
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=40)
@given(
    ends=st.lists(st.sampled_from(EDGES) | st.integers(1, 700), min_size=1, max_size=4),
    q_len=st.sampled_from((1, 2, 5, 17)),
    kv_heads=st.sampled_from((1, 2)),
    groups=st.sampled_from((1, 2, 3)),
    heads=st.sampled_from(((16, None), (32, None), (64, 32))),
    dtype=st.sampled_from(tuple(TOLERANCE)),
    window=st.sampled_from((-1, 0, 3, 255, 300)),
    softcap=st.sampled_from((0.0, 5.0)),
    shared=st.booleans(),
    appended=st.booleans(),
    tight=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_as_one_token_at_a_time(
    ends: list[int],
    q_len: int,
    kv_heads: int,
    groups: int,
    heads: tuple[int, int | None],
    dtype: Any,
    window: int,
    softcap: float,
    shared: bool,
    appended: bool,
    tight: bool,
    seed: int,
) -> None:
    ends = [max(end, q_len) for end in ends]
    batch = Batch.make(
        ends,
        q_len,
        seed=seed,
        kv_heads=kv_heads,
        groups=groups,
        head_dim=heads[0],
        v_head_dim=heads[1],
        dtype=dtype,
        shared=shared,
    )
    if not appended:
        batch.write()
    with pytest.MonkeyPatch.context() as patch:
        if tight:  # one row and one query at a time
            patch.setattr(attention, "SCORES_BYTES", 1)
            patch.setattr(attention, "GATHERED_BYTES", 1)
        got = batch.attend(appended=appended, window_size=(window, window), softcap=softcap, softmax_scale=0.3)
    batch.write()
    assert_near(got, batch.expected(scale=0.3, window=window, softcap=softcap), dtype)


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("end", [300, 557, 700])
@pytest.mark.parametrize("window", [-1, 100])
def test_prefill_of_one_row(end: int, appended: bool, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch.make([end], 300, groups=4)
    monkeypatch.setattr(attention, "SCORES_BYTES", 3 * 768 * 128)  # three parts
    if not appended:
        batch.write()
    got = batch.attend(appended=appended, window_size=(window, window))
    batch.write()
    assert_near(got, batch.expected(window=window), torch.float16)


def test_new_tokens_are_written_in_place_and_nothing_else_is() -> None:
    batch = Batch.make([255 + 5, 5, 700, 256], 5)
    # every bit is compared: which NaN an unused slot holds, too
    before = [cache.clone() for cache in (batch.k_cache, batch.v_cache)]
    batch.attend(appended=True)
    after = [cache.clone() for cache in (batch.k_cache, batch.v_cache)]
    batch.k_cache, batch.v_cache = before
    batch.write()
    assert torch.equal(after[0].view(torch.int16), batch.k_cache.view(torch.int16))
    assert torch.equal(after[1].view(torch.int16), batch.v_cache.view(torch.int16))


@pytest.mark.parametrize(("ends", "q_len"), [([700], 300), ([261, 9, 512], 5)])
def test_a_later_token_never_changes_an_earlier_output(ends: list[int], q_len: int) -> None:
    batch = Batch.make(ends, q_len)
    batch.write()
    first = batch.attend()
    changed = q_len - 2
    batch.k[:, changed] = 3.0
    batch.v[:, changed] = -3.0
    batch.write()
    second = batch.attend()
    assert torch.equal(first[:, :changed], second[:, :changed])
    assert not torch.equal(first[:, changed:], second[:, changed:])


def test_a_row_alone_and_in_a_batch_of_others() -> None:
    batch = Batch.make([700, 3, 257], 1)
    batch.write()
    together = batch.attend()
    for row, end in enumerate(batch.ends):
        pages = -(-end // PAGE)
        own = (part[row : row + 1] for part in (batch.q, batch.k, batch.v))
        alone = Batch([end], *own, batch.k_cache, batch.v_cache, batch.table[row : row + 1, :pages])
        torch.testing.assert_close(alone.attend(), together[row : row + 1], atol=1e-3, rtol=1e-3)


def test_padding_of_the_block_table_is_never_looked_up() -> None:
    batch = Batch.make([700, 3], 1)
    batch.table[1, 1:] = 2**30  # no such page: reading it would fail
    batch.write()
    assert_near(batch.attend(), batch.expected(), torch.float16)


def test_layers_of_one_pass_share_a_plan_and_passes_do_not() -> None:
    one = PagedAttention(plan_once=True)
    first, second = (Batch.make([300, 41], 1, seed=seed) for seed in (1, 2))
    second.table = first.table
    for page_owner in (first, second):
        page_owner.k_cache.nan_to_num_(0.5)
        page_owner.v_cache.nan_to_num_(0.5)
    lengths = torch.tensor([299, 40], dtype=torch.int32)

    def layer(batch: Batch, lengths: Any, window: int) -> Any:
        return one(
            q=batch.q,
            k=batch.k,
            v=batch.v,
            k_cache=batch.k_cache,
            v_cache=batch.v_cache,
            cache_seqlens=lengths,
            block_table=first.table,
            causal=True,
            window_size=(window, window),
        )

    for batch, window in ((first, -1), (second, 7), (first, 7), (second, -1)):
        got = layer(batch, lengths, window)
        assert_near(got, batch.expected(window=window), torch.float16)
    # the next pass, one token on: other lengths in another tensor, the same table
    first.ends = [301, 42]
    got = layer(first, lengths + 1, -1)
    first.write()
    assert_near(got, first.expected(), torch.float16)


@pytest.mark.parametrize(("q_len", "softcap"), [(1, 0.0), (5, 0.0), (300, 0.0), (5, 30.0)])
def test_nothing_waits_for_the_device(q_len: int, softcap: float) -> None:
    """A meta tensor has no values: whatever asked for one (`.item()`, a boolean index, a copy to the host) fails."""
    batch = Batch.make([700], q_len)
    out = batch.attend(appended=True, device="meta", softcap=softcap, window_size=(99, 99))
    assert out.shape == batch.q.shape


class Largest(TorchDispatchMode):
    """Remembers the most bytes that one operation's new mask or float32 scores had."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 4 and out.dtype in (torch.bool, torch.float32):
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_scores_of_a_long_prefill_are_bounded(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_BYTES", 1 << 18)
    batch = Batch.make([700], 512, head_dim=16)
    batch.write()
    with Largest() as largest:
        batch.attend(softcap=softcap)
    assert 0 < largest.bytes <= 1 << 18


def test_what_cannot_be_served_is_refused() -> None:
    batch = Batch.make([3], 1)
    lengths = torch.tensor([2])
    rest = {"cache_seqlens": lengths, "block_table": batch.table}
    attend = PagedAttention(plan_once=False)
    with pytest.raises(ValueError, match="causal only"):
        attend(batch.q, batch.k_cache, batch.v_cache, causal=False, **rest)
    with pytest.raises(ValueError, match="together"):
        attend(batch.q, batch.k_cache, batch.v_cache, k=batch.k, causal=True, **rest)


def test_installed_where_flash_attn_is_missing() -> None:
    """In a process of its own: importing exllamav2 sets torch's threads for good. Its compiled half is not needed."""
    if importlib.util.find_spec("exllamav2") is None:
        pytest.skip("exllamav2 comes with requirements-gpu.txt")
    code = """
        import sys, types
        sys.modules["exllamav2_ext"] = types.ModuleType("exllamav2_ext")
        from exllamav2 import attn
        try:
            attn.assert_paged_attn()
        except AssertionError:
            pass
        else:
            sys.exit("flash-attn is there")
        from workers.engines.exllamav2.attention import PagedAttention, install
        for _ in range(2):
            assert install() == "torch"
            attn.assert_paged_attn()
            assert isinstance(attn.flash_attn_with_kvcache, PagedAttention)
            assert not attn.has_flash_attn
            assert attn.has_flash_attn_with_window and attn.has_flash_attn_with_softcap
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    if "flash-attn is there" in done.stderr:
        pytest.skip("flash-attn is installed here")
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 5, 300])
@pytest.mark.parametrize(("window", "softcap"), [(-1, 0.0), (100, 0.0), (-1, 30.0)])
def test_on_a_gpu(q_len: int, window: int, softcap: float) -> None:
    """Would prove: CUDA's kernels give the reference's numbers, and nothing in a call waits for the device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    ends = [700] if q_len == 300 else [700, 5, 257, 256]
    batch = Batch.make(ends, q_len, head_dim=64, groups=4)
    batch.write()
    device = {name: getattr(batch, name).to("cuda") for name in ("q", "k_cache", "v_cache")}
    lengths, table = torch.tensor(ends, dtype=torch.int32, device="cuda"), batch.table.to("cuda")
    attend = PagedAttention(plan_once=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attend(
            **device,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            window_size=(window, window),
            softcap=softcap,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_near(got, batch.expected(window=window, softcap=softcap), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 5, 300])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_as_flash_attn(q_len: int, window: int, dtype: Any) -> None:
    """Would prove: the same numbers and the same pages as from the function that ours stands in for."""
    flash = pytest.importorskip("flash_attn", reason="flash-attn has no wheel on PyPI; built by hand only")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    ends = [700] if q_len == 300 else [700, 5, 257, 256]
    results = []
    for function in (PagedAttention(plan_once=False), flash.flash_attn_with_kvcache):
        batch = Batch.make(ends, q_len, head_dim=64, groups=4, dtype=dtype)
        caches = {name: getattr(batch, name).to("cuda") for name in ("k_cache", "v_cache")}
        out = function(
            **{name: getattr(batch, name).to("cuda") for name in ("q", "k", "v")},
            **caches,
            cache_seqlens=torch.tensor([end - q_len for end in ends], dtype=torch.int32, device="cuda"),
            block_table=batch.table.to("cuda"),
            causal=True,
            window_size=(window, window),
        )
        results.append((out.double().cpu(), *(cache.cpu().view(torch.int16) for cache in caches.values())))
    ours, theirs = results
    torch.testing.assert_close(ours[0], theirs[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])
