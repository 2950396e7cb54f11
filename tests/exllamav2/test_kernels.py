"""Each stand-in against its formula, written here another way: 64-bit loops, complex numbers, whole matrices."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (requirements-harness.txt)")

from tests.exllamav2 import kernels, quantised_cache

NONE = torch.empty((1, 1), device="meta")


def halves(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def test_rms_norm() -> None:
    x, w = halves(3, 64) * 5, halves(64, seed=1)
    y = torch.empty(3, 64)
    kernels.rms_norm(x, w, y, 1e-5)
    for row in range(3):
        values = [float(value) for value in x[row]]
        root = math.sqrt(sum(value * value for value in values) / 64 + 1e-5)
        wanted = [value / root * float(weight) for value, weight in zip(values, w, strict=True)]
        assert y[row].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    kernels.rms_norm_(x, w, 1e-5)
    assert torch.equal(x, y.half())


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool) -> None:
    x, w, b = halves(3, 64) + 2, halves(64, seed=1), halves(64, seed=2)
    y = torch.empty_like(x)
    kernels.layer_norm(x, w, b if bias else NONE, y, 1e-5)
    numbers = x.double().numpy()
    wanted = (numbers - numbers.mean(1, keepdims=True)) / np.sqrt(numbers.var(1, keepdims=True) + 1e-5)
    wanted = wanted * w.double().numpy() + (b.double().numpy() if bias else 0)
    assert y.double().numpy() == pytest.approx(wanted, rel=2e-3, abs=2e-3)


def test_head_norm_is_a_norm_of_each_head() -> None:
    x, w = halves(2, 5, 4, 32), halves(4, 32, seed=1)
    y = torch.empty_like(x)
    kernels.head_norm(x, w, NONE, y, 1e-5, True)
    for head in range(4):
        one = torch.empty(10, 32)
        kernels.rms_norm(x[:, :, head].reshape(10, 32), w[head], one, 1e-5)
        assert torch.equal(y[:, :, head].reshape(10, 32), one.half())


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("past", "offsets", "begins"),
    [(3, None, [3, 3]), (-1, [4, 0], [4, 0]), (2, [1, -1], [3, 1]), (-1, [-7, 9], [0, 9])],
)
def test_rope_turns_pairs_as_complex_numbers(
    neox: bool, past: int, offsets: list[int] | None, begins: list[int]
) -> None:
    """Row b begins at position begins[b]. neox pairs i with i + d/2, gptj 2i with 2i + 1; heads are turned alike."""
    heads, dim, tokens = 3, 32, 4
    angles = torch.arange(20.0)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
    table = torch.cat((angles, angles), -1) if neox else angles.repeat_interleave(2, -1)
    x = halves(2, tokens, heads * dim)
    before = x.view(2, tokens, heads, dim).double()
    given = NONE if offsets is None else torch.tensor(offsets, dtype=torch.int)[:, None]
    kernels.rope_(x, table.sin().half()[None, None], table.cos().half()[None, None], past, heads, dim, given, neox)
    after = x.view(2, tokens, heads, dim).double()

    def numbers(values: torch.Tensor) -> torch.Tensor:
        parts = values.chunk(2, -1) if neox else (values[..., ::2], values[..., 1::2])
        return torch.complex(*parts)

    for row, begin in enumerate(begins):
        turn = torch.polar(torch.ones(tokens, dim // 2).double(), angles[begin : begin + tokens].double())
        torch.testing.assert_close(numbers(after[row]), numbers(before[row]) * turn[:, None], atol=5e-3, rtol=0)


def test_rope_past_the_table_is_an_error() -> None:
    table = torch.zeros(1, 1, 8, 32).half()
    with pytest.raises(IndexError):
        kernels.rope_(halves(1, 2, 32), table, table, 7, 1, 32, NONE, True)


def test_softcap() -> None:
    x = torch.linspace(-100, 100, 11)
    wanted = [30 * math.tanh(value / 30) for value in x.tolist()]
    kernels.softcap_(x, 30.0)
    assert x.tolist() == pytest.approx(wanted, rel=1e-5)


def test_stloader_reads_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = bytes(random.Random(0).randbytes(400))
    file.write_bytes(content)
    target = torch.zeros(8, 6, dtype=torch.half)
    kernels.stloader_read(str(file), 101, 96, target)
    assert target.view(torch.uint8).numpy().tobytes() == content[101:197]
    with pytest.raises(RuntimeError, match="I/O error"):
        kernels.stloader_read(str(file), 305, 96, target)


def test_count_match() -> None:
    source = random.Random(0)
    for _ in range(200):
        a = [source.randrange(2) for _ in range(source.randrange(1, 7))]
        b = [source.randrange(2) for _ in range(source.randrange(1, 7))]
        most = source.randrange(len(a) + 1)
        wanted = 0
        while wanted < min(most, len(b)) and a[wanted] == b[wanted]:
            wanted += 1
        assert kernels.count_match(torch.tensor([a]), torch.tensor([b]), most) == wanted


@pytest.mark.parametrize("dtype", [torch.half, torch.uint8])
def test_cache_rotate_moves_pages_round(dtype: torch.dtype) -> None:
    cache = torch.arange(6)[:, None].expand(6, 10).to(dtype).contiguous()
    kernels.cache_rotate(cache, torch.tensor([4, 1, 5], dtype=torch.int), torch.empty(1, 2, 5, dtype=dtype))
    assert cache[:, 0].tolist() == [0, 5, 2, 3, 1, 4]
    assert (cache == cache[:, :1]).all()


# --- the quantised caches

PAGE, PAGES, KV_HEADS, HEAD_DIM = 256, 3, 2, 32
DIM = KV_HEADS * HEAD_DIM
#: wbits -> the largest error of keys and of values, relative to their root mean square.
BOUNDS = {4: (0.13, 0.13), 6: (0.009, 0.13), 8: (0.009, 0.009)}


class Cache:
    """The tensors of one layer as ExLlamaV2Cache_Q has them, with random halves to store."""

    def __init__(self, wbits: int) -> None:
        self.wbits = wbits
        shape = (1, PAGE * PAGES, KV_HEADS)
        bits = quantised_cache.BITS[wbits]
        self.key, self.value = halves(*shape, HEAD_DIM), halves(*shape, HEAD_DIM, seed=1) * 3
        self.key_codes, self.value_codes = (torch.zeros(*shape, HEAD_DIM * x // 8, dtype=torch.uint8) for x in bits)
        self.key_scales, self.value_scales = (torch.zeros(*shape, HEAD_DIM // 32).half() for _ in bits)

    def store(self, offset: int, width: int, lengths: torch.Tensor = NONE, table: torch.Tensor = NONE) -> None:
        quantised_cache.fp16_to_q_kv(
            *(self.key, self.key_codes, self.key_scales, self.value, self.value_codes, self.value_scales),
            *(1, offset, width, 0 if table.is_meta else PAGE, lengths, table, self.wbits),
        )

    def read(
        self, offset: int, width: int, lengths: torch.Tensor = NONE, table: torch.Tensor = NONE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is not read is NaN."""
        key, value = torch.full_like(self.key, torch.nan), torch.full_like(self.value, torch.nan)
        quantised_cache.q_to_fp16_kv(
            *(self.key_codes, key, self.key_scales, self.value_codes, value, self.value_scales),
            *(1, offset, width, 0 if table.is_meta else PAGE, lengths, table, self.wbits),
        )
        return key, value


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = found.double() - wanted.double()
    return float(difference.square().mean().sqrt() / wanted.double().square().mean().sqrt())


@pytest.mark.parametrize("wbits", BOUNDS)
def test_a_quantised_cache_gives_back_what_was_stored_nearly(wbits: int) -> None:
    cache = Cache(wbits)
    cache.store(0, PAGE * PAGES)
    for found, wanted, bound in zip(cache.read(0, PAGE * PAGES), (cache.key, cache.value), BOUNDS[wbits], strict=True):
        assert bound / 4 < relative_error(found, wanted) < bound


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_scales_are_those_of_a_hadamard_matrix(bits: int) -> None:
    """`cuda/cache_q.cuh` by matrix: the even and the odd of 64 halves, then 32 neighbours a scale, codes around 2^(bits-1)."""
    cache = Cache(bits)
    cache.store(0, PAGE * PAGES)
    matrix = np.ones((1, 1))
    while len(matrix) < 32:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    spread = np.einsum("gip,ij->gjp", cache.key.double().numpy().reshape(-1, 32, 2), matrix).reshape(-1, 32)
    scales = np.abs(spread).max(1) / 2 ** (bits - 1)
    assert cache.key_scales.double().numpy().reshape(-1) == pytest.approx(scales, rel=3e-3)
    codes = cache.key_codes.numpy().reshape(-1)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1)
    wanted = np.clip(np.rint(spread / scales[:, None] + 2 ** (bits - 1)), 0, 2**bits - 1)
    away = np.abs(codes.reshape(-1, 32) - wanted)
    assert away.max() <= 1 and (away != 0).mean() < (0.01 if bits == 4 else 0.1)


def test_zeros_stay_zeros() -> None:
    cache = Cache(4)
    cache.key.zero_()
    cache.store(0, PAGE)
    assert not cache.read(0, PAGE)[0][:, :PAGE].any()
    assert not cache.key_codes.any() and not cache.key_scales.any()


def test_pages_are_stored_and_read_where_the_table_says() -> None:
    """250 tokens, then 20 more over the page's end; the pages are 2 and 0. Page 1 belongs to nobody."""
    paged, flat = Cache(8), Cache(8)
    table = torch.tensor([[2, 0]], dtype=torch.int)
    paged.store(0, 250, torch.tensor([0], dtype=torch.int), table)
    paged.store(0, 20, torch.tensor([250], dtype=torch.int), table)
    flat.store(0, PAGE * PAGES)
    found, wanted = (
        paged.read(0, 270, torch.tensor([270], dtype=torch.int), table)[0][0],
        flat.read(0, PAGE * PAGES)[0][0],
    )
    assert torch.equal(found[2 * PAGE :], wanted[2 * PAGE :])
    assert torch.equal(found[:14], wanted[:14])
    assert found[PAGE : 2 * PAGE].isnan().all()
    assert not paged.key_codes[0, PAGE : 2 * PAGE].any()
    # 8 tokens of 64 numbers are a block: what is behind the last of them is neither read nor written
    assert found[16:PAGE].isnan().all()
    assert not paged.key_codes[0, 16:PAGE].any()
