"""What prefix reuse of the llama.cpp engine saves: seconds to the first token of a prompt that was seen before, and of
eight choices of one prompt.

Run: `python -m scripts.benchmarks.prefixes`. No Redis, no HTTP. Engines with and without reuse take turns, so that what
else the machine does falls on both alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared.sampling import SamplingParams
from shared.settings import Settings
from workers.engines.base import EngineRequest, Token
from workers.engines.llamacpp.carried import find_carried_model
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.options import LlamaCppOptions

CHOICES = 8
TEXT = "The museum opens at nine, and the guide tells of every room what it was built for and who lived there. "


def first_tokens(engine: LlamaCppEngine, prompt: list[int], choices: int) -> float:
    """Seconds until each of `choices` choices has its first token."""
    params = SamplingParams(ignore_eos=True)
    began = time.perf_counter()
    missing = {f"{choice}" for choice in range(choices)}
    for choice in range(choices):
        engine.add(EngineRequest(f"{choice}", prompt, 1, 1, params, choice=choice))
    while missing:
        missing -= {event.id for event in engine.step() if isinstance(event, Token)}
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.prefixes", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the carried model)")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of the prompt (default 500)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="fixed number of threads (default: adaptive, up to the cores)")
    args = parser.parse_args(argv)
    console = Console()
    settings = Settings()
    model = args.model or find_carried_model(settings.cache_dir)
    if model is None:
        console.print("The carried model is not in the cache; name one with --model.")
        return 2
    times: dict[tuple[str, bool], list[float]] = {}
    engines = {}
    for reuse in (False, True):
        chosen = {"threads": args.threads} | ({} if reuse else {"prefix_cache": 0})
        engines[reuse] = LlamaCppEngine(
            LlamaCppOptions.from_settings(settings.model_copy(update=chosen), model, "benchmark")
        )
        engines[reuse].load(lambda part, word: None)
    for number in range(args.rounds):
        for reuse, engine in engines.items():
            text = f"Round {number}. " + TEXT * (args.tokens // 10)
            prompt = engine.tokenize(text)[: args.tokens]
            several = [prompt[-1 - number], *prompt[1:]]  # another beginning: nothing of it was seen before
            times.setdefault(("a new prompt", reuse), []).append(first_tokens(engine, prompt, 1))
            times.setdefault(("the same prompt again", reuse), []).append(first_tokens(engine, prompt, 1))
            times.setdefault((f"{CHOICES} choices of a new one", reuse), []).append(
                first_tokens(engine, several, CHOICES)
            )
    table = Table(f"first token of {args.tokens} tokens", "without reuse", "with reuse")
    for kind in dict.fromkeys(kind for kind, _ in times):
        table.add_row(kind, *(f"{statistics.median(times[kind, reuse]) * 1e3:.0f} ms" for reuse in (False, True)))
    console.print(table)
    for engine in engines.values():
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
