"""What paged attention in plain torch costs per layer, against contiguous attention and against flash-attn.

Run: `python -m scripts.benchmarks.attention --json attention.json`. No model and no server: random keys and values of
the shape of one layer. The kinds take turns, so that what else the machine does falls on all alike. On a machine
without a GPU fewer and shorter rows are measured; those numbers say what the gather costs, not what a GPU does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch.nn import functional

from workers.engines.exllamav2.attention import PagedAttention

PAGE_SIZE = 256
#: Query heads, key heads, head_dim: an 8B Llama's layer.
HEADS = (32, 8, 128)
#: Rows, length of each, queries of each.
ON_GPU = (
    *((rows, length, 1) for rows in (1, 8, 32) for length in (256, 2048, 8192)),
    (8, 2048, 5),
    (1, 2048, 2048),
    (1, 8192, 2048),
)
ON_CPU = (*((rows, length, 1) for rows in (1, 8) for length in (256, 2048)), (32, 256, 1), (8, 256, 5), (1, 512, 512))
#: Ours; torch's own over contiguous keys; the same with the heads that share a key head laid side by side, as ours has
#: them for few queries: the difference to it is what the pages cost; flash-attn over the same pages.
PAGED, PLAIN, GROUPED, FLASH = "paged", "plain", "grouped", "flash-attn"


@dataclass(frozen=True)
class Case:
    """Milliseconds of one call: the median over the rounds, and the range. `ratio`: the median over the rounds of what
    the paged call took by what this one took in the same round."""

    rows: int
    length: int
    queries: int
    kind: str
    median: float
    lowest: float
    highest: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float


def calls(rows: int, length: int, queries: int, device: str, dtype: Any) -> dict[str, Callable[[], object]]:
    """The same attention by each kind: the last `queries` of `length` tokens in each of `rows` rows."""
    heads, kv_heads, head_dim = HEADS
    pages = -(-length // PAGE_SIZE)
    make = {"device": device, "dtype": dtype}
    k_cache, v_cache = (torch.randn(rows * pages, PAGE_SIZE, kv_heads, head_dim, **make) for _ in range(2))
    table = torch.randperm(rows * pages, device=device).view(rows, pages).to(torch.int32)
    q = torch.randn(rows, queries, heads, head_dim, **make)
    k, v = (torch.randn(rows, queries, kv_heads, head_dim, **make) for _ in range(2))
    before = torch.full((rows,), length - queries, dtype=torch.int32, device=device)
    paged: dict[str, Any] = {"cache_seqlens": before, "block_table": table, "causal": True}
    # as in the second and later layers of a pass
    ours = PagedAttention(plan_once=device != "cpu")
    contiguous_k, contiguous_v = (torch.randn(rows, kv_heads, length, head_dim, **make) for _ in range(2))
    contiguous_q = q.transpose(1, 2)
    grouped_q = q.view(rows, queries, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    mask = grouped_mask = None
    if queries > 1:
        mask = torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)
        grouped_mask = mask.repeat_interleave(heads // kv_heads, dim=0)
    found: dict[str, Callable[[], object]] = {
        PAGED: lambda: ours(q, k_cache, v_cache, k, v, **paged),
        PLAIN: lambda: functional.scaled_dot_product_attention(
            contiguous_q, contiguous_k, contiguous_v, mask, enable_gqa=True
        ),
        GROUPED: lambda: functional.scaled_dot_product_attention(grouped_q, contiguous_k, contiguous_v, grouped_mask),
    }
    if device != "cpu":
        try:
            flash_attn: Any = importlib.import_module("flash_attn")
        except ImportError:
            pass  # no wheel on PyPI; the table then has no such line
        else:
            found[FLASH] = lambda: flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **paged)
    return found


def seconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds of one call, over `repeats` of them in a row."""
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def measure(rows: int, length: int, queries: int, rounds: int, device: str, dtype: Any) -> list[Case]:
    with torch.inference_mode():
        kinds = calls(rows, length, queries, device, dtype)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        # not counted: first touch and choice of kernels; long enough for the clock to matter little
        repeats = 1
        for call in kinds.values():
            seconds(call, 1, device)
            repeats = max(repeats, min(200, int(0.02 / seconds(call, 1, device))))
        for number in range(rounds):
            order = list(kinds) if number % 2 else list(reversed(kinds))
            for kind in order:
                times[kind].append(seconds(kinds[kind], repeats, device) * 1e3)
        cases = []
        for kind, mine in times.items():
            ratios = [paged / other for paged, other in zip(times[PAGED], mine, strict=True)]
            spread = (
                statistics.median(mine),
                min(mine),
                max(mine),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            )
            cases.append(Case(rows, length, queries, kind, *spread))
        return cases


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.attention", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind (default 7)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default 1, as exllamav2 sets it)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there as well")
    args = parser.parse_args(argv)
    console = Console()
    on_cpu = args.device == "cpu"
    torch.set_num_threads(args.threads)
    cases: list[Case] = []
    with console.status("Measuring"):
        for rows, length, queries in ON_CPU if on_cpu else ON_GPU:
            cases += measure(rows, length, queries, args.rounds, args.device, getattr(torch, args.dtype))
    titles = ("rows x length, queries", "kind", "ms (range)", "paged : this")
    table = Table(*(Column(title, no_wrap=True) for title in titles))
    for case in cases:
        table.add_row(
            f"{case.rows} x {case.length}, {case.queries}" if case.kind == PAGED else "",
            case.kind,
            f"{case.median:.3g} ({case.lowest:.3g} - {case.highest:.3g})",
            "" if case.kind == PAGED else f"{case.ratio:.2f} ({case.ratio_lowest:.2f} - {case.ratio_highest:.2f})",
            end_section=case.kind == cases[-1].kind,
        )
    console.print(table)
    name = "CPU" if on_cpu else torch.cuda.get_device_name()
    console.print(
        f"{name}, torch {torch.__version__}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}; "
        f"{args.dtype}, heads {HEADS[0]} on {HEADS[1]}, head_dim {HEADS[2]}, {args.rounds} rounds"
    )
    if args.json:
        report = {
            "device": name,
            "torch": torch.__version__,
            "threads": args.threads,
            "dtype": args.dtype,
            "heads": HEADS,
            "rounds": args.rounds,
            "cases": [asdict(case) for case in cases],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
