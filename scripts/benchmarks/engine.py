"""Tokens per second of the llama.cpp engine alone, for 1 and for 8 streams: what continuous batching gains.

Run: `python -m scripts.benchmarks.engine --json engine.json`. No Redis, no HTTP. Rounds of 1 and of 8 streams
alternate, so that what else the machine does falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.sampling import SamplingParams
from shared.settings import Settings
from workers.engines.base import EngineRequest, Token
from workers.engines.cores import usable_cores
from workers.engines.llamacpp.carried import find_carried_model
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.options import LlamaCppOptions

STREAMS = (1, 8)
#: One per stream, each at most 64 tokens.
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived a girl who",
    "Three reasons to learn a second language are:",
    "The recipe for a simple tomato soup begins with",
    "In 1969, the first humans landed on the Moon. Since then,",
    "def fibonacci(n):\n    ",
    "Dear hiring team,\n\nI am writing to apply for",
    "The difference between weather and climate is that",
)


@dataclass(frozen=True)
class Round:
    """`tokens_per_second`: of all streams together, from the first request's `add` to the last token, prefill
    included. `decode`: the same once all prompts are in. `first_s`: seconds to the last stream's first token."""

    streams: int
    tokens_per_second: float
    decode: float
    first_s: float


def measure(engine: LlamaCppEngine, streams: int, tokens: int, number: int) -> Round:
    """`streams` sampled texts of `tokens` tokens each, at once."""
    params = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
    began = time.perf_counter()
    for stream in range(streams):
        prompt = engine.tokenize(PROMPTS[stream % len(PROMPTS)])[:64]
        engine.add(EngineRequest(f"{number}-{stream}", prompt, tokens, seed=stream, params=params))
    waiting_for_first = {f"{number}-{stream}" for stream in range(streams)}
    all_in = began
    count = after = 0
    while (stats := engine.stats()).running + stats.waiting:
        heard = [event for event in engine.step() if isinstance(event, Token)]
        count += len(heard)
        if not waiting_for_first:
            after += len(heard)
        elif not (waiting_for_first := waiting_for_first - {event.id for event in heard}):
            all_in = time.perf_counter()
    ended = time.perf_counter()
    return Round(streams, count / (ended - began), after / (ended - all_in), all_in - began)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.engine", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the carried model)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default 5)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per stream (default 64)")
    parser.add_argument("--threads", type=int, help="fixed number of threads (default: adaptive, up to the cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there as well")
    args = parser.parse_args(argv)
    console = Console()
    settings = Settings()
    model = args.model or find_carried_model(settings.cache_dir)
    if model is None:
        console.print("The carried model is not in the cache; name one with --model.")
        return 2
    options = LlamaCppOptions.from_settings(settings.model_copy(update={"threads": args.threads}), model, "benchmark")
    engine = LlamaCppEngine(options)
    with console.status("Loading the model"):
        card = engine.load(lambda part, word: None)
    rounds: list[Round] = []
    for streams in STREAMS:
        measure(engine, streams, 8, -1)  # not counted: first touch of memory, and the choice of threads settles
    for number in range(args.rounds):
        rounds += [measure(engine, streams, args.tokens, number) for streams in STREAMS]
    engine.close()
    report = summary(rounds)
    table = Table("streams", "tokens/s (median)", "range", "decoding only", "last first token")
    for line in report["streams"]:
        table.add_row(
            str(line["streams"]),
            f"{line['median']:.1f}",
            f"{line['lowest']:.1f} - {line['highest']:.1f}",
            f"{line['decode']:.1f}",
            f"{line['first_s'] * 1000:.0f} ms",
        )
    console.print(table)
    ratio = report["ratio"]
    console.print(
        f"8 streams : 1 stream = {ratio['median']:.2f} ({ratio['lowest']:.2f} - {ratio['highest']:.2f} by round); "
        f"{usable_cores()} cores, load {os.getloadavg()[0]:.1f}, {args.tokens} tokens a stream, {args.rounds} rounds"
    )
    if args.json:
        report |= {
            "fingerprint": card.fingerprint,
            "cores": usable_cores(),
            "threads": args.threads,
            "tokens": args.tokens,
            "rounds": [asdict(entry) for entry in rounds],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians and ranges per number of streams, and the ratio of 8 to 1 of each round's pair."""
    lines = []
    for streams in STREAMS:
        mine = [entry for entry in rounds if entry.streams == streams]
        speeds = [entry.tokens_per_second for entry in mine]
        lines.append(
            {
                "streams": streams,
                "median": statistics.median(speeds),
                "lowest": min(speeds),
                "highest": max(speeds),
                "decode": statistics.median(entry.decode for entry in mine),
                "first_s": statistics.median(entry.first_s for entry in mine),
            }
        )
    one, many = ([r.tokens_per_second for r in rounds if r.streams == streams] for streams in STREAMS)
    ratios = [b / a for a, b in zip(one, many, strict=True)]
    ratio = {"median": lines[1]["median"] / lines[0]["median"], "lowest": min(ratios), "highest": max(ratios)}
    return {"streams": lines, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
