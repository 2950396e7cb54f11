"""What our way costs over the package's own generator: tokens per second of three loops around the same model.

Run: `./scripts/bench exllamav2 --model DIR --json exllamav2.json` on a machine with an NVIDIA GPU. No Redis, no HTTP.

- generator: ExLlamaV2DynamicGenerator as its examples use it, sampling with the package's C++;
- engine: requests into our engine, its step loop, events out of it;
- lanes: the same, and every token goes through a lane of the worker (stop strings, UTF-8, frames).

All three use the same weights, cache, attention, prompts and lengths. The loops take turns, so that what else the
machine does falls on all alike; what is reported is the ratio within a round. `--cpu-harness` runs it without a GPU,
on a tiny model, in a checkout (the harness is part of the tests, which are not installed): that measures the cost in
Python and numpy beside a model that costs next to nothing, and says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.cards import ModelCard
from shared.errors import SluiceError
from shared.frames import Name
from shared.jobs import Job
from shared.sampling import SamplingParams
from shared.settings import Settings
from workers.engines.base import EngineRequest, Token
from workers.engines.exllamav2.engine import ExLlamaV2Engine
from workers.engines.exllamav2.extension import VERSION
from workers.engines.exllamav2.options import PAGE, ExLlamaV2Options
from workers.lane import Lane, PromptIds

LANES = (1, 8, 32)
KINDS = GENERATOR, ENGINE, LANE = ("generator", "engine", "lanes")


@dataclass(frozen=True)
class Round:
    """`tokens_per_second`: of all lanes together, prefill included. `cpu_us`: microseconds of this process's CPU time
    for each of them, all threads, which other programs on the machine disturb less than the clock."""

    kind: str
    lanes: int
    tokens_per_second: float
    cpu_us: float


@dataclass(frozen=True)
class Line:
    """One row of the result. `ratio`: the median over the rounds of this loop's speed by the bare generator's.
    `cpu_us`: the median; `cpu_ratio`: the median over the rounds of the bare generator's CPU time by this loop's."""

    kind: str
    lanes: int
    median: float
    lowest: float
    highest: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    cpu_us: float
    cpu_ratio: float


class Loops:
    """The loops around one loaded engine. `tokens`: to generate per lane; `prompt`: ids of each prompt; `greedy`:
    the likeliest token each time, instead of drawing one."""

    def __init__(self, engine: ExLlamaV2Engine, card: ModelCard, *, tokens: int, prompt: int, greedy: bool) -> None:
        from exllamav2 import ExLlamaV2Tokenizer
        from exllamav2.generator import ExLlamaV2DynamicGenerator

        from workers.engines.exllamav2.batch import sampling_threads

        self._engine = engine
        self._card = card
        self._tokens = tokens
        self._prompt = prompt
        self._greedy = greedy
        self._params = SamplingParams(
            temperature=0.0 if greedy else 0.8, top_p=1.0 if greedy else 0.95, ignore_eos=True
        )
        self._random = random.Random(0)
        self._round = 0
        # The engine's own model and cache: on most GPUs there is no room for two.
        loaded = engine._loaded
        self.attention = loaded.attention
        self._tokenizer = ExLlamaV2Tokenizer(loaded.model.config)
        self._generator = ExLlamaV2DynamicGenerator(
            model=loaded.model,
            cache=loaded.cache,
            tokenizer=self._tokenizer,
            max_batch_size=max(LANES),
            max_chunk_size=loaded.chunk,
            max_q_size=loaded.width,
            max_sampling_threads=sampling_threads(card.vocab_size),
        )
        self._loops: dict[str, Callable[[list[list[int]]], int]] = {
            GENERATOR: self._run_generator,
            ENGINE: self._run_engine,
            LANE: self._run_lanes,
        }

    def measure(self, kind: str, lanes: int) -> Round:
        self._round += 1
        # Random ids, never the same twice: no page is reused.
        vocab_size = self._card.vocab_size
        prompts = [[self._random.randrange(vocab_size) for _ in range(self._prompt)] for _ in range(lanes)]
        # The loops share the cache but not the tables of its pages: each begins with an empty one.
        self._generator.reset_page_table()
        self._engine._batch.reset()
        began, cpu_began = time.perf_counter(), time.process_time()
        count = self._loops[kind](prompts)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        return Round(kind, lanes, count / seconds, cpu_seconds / count * 1e6)

    def _run_generator(self, prompts: list[list[int]]) -> int:
        import torch
        from exllamav2.generator import ExLlamaV2DynamicJob, ExLlamaV2Sampler

        generator = self._generator
        for number, prompt in enumerate(prompts):
            settings = ExLlamaV2Sampler.Settings(temperature=0.8, top_k=0, top_p=0.95, token_repetition_penalty=1.0)
            if self._greedy:
                settings = ExLlamaV2Sampler.Settings.greedy(token_repetition_penalty=1.0)
            settings.disallow_tokens(self._tokenizer, list(self._card.end_ids))
            generator.enqueue(
                ExLlamaV2DynamicJob(
                    input_ids=torch.tensor([prompt], dtype=torch.long),
                    max_new_tokens=self._tokens,
                    gen_settings=settings,
                    seed=number,
                )
            )
        count, text = 0, ""
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                text += result.get("text", "")
                if result["eos"]:
                    count += result["new_tokens"]
        return count

    def _run_engine(self, prompts: list[list[int]]) -> int:
        engine = self._engine
        for number, prompt in enumerate(prompts):
            engine.add(EngineRequest(f"{self._round}-{number}", prompt, self._tokens, seed=number, params=self._params))
        count = 0
        while (stats := engine.stats()).running + stats.waiting:
            count += sum(isinstance(event, Token) for event in engine.step())
        return count

    def _run_lanes(self, prompts: list[list[int]]) -> int:
        """As the worker's engine loop does it, without its thread."""
        engine = self._engine
        lanes: dict[str, Lane] = {}
        for number, prompt in enumerate(prompts):
            job = Job(
                id=f"{self._round}-{number}", model="", prompts=[prompt], seed=number, created=0, params=self._params
            )
            lane = Lane(
                job,
                Name(1, 0),
                [PromptIds(prompt, self._tokens, sent_as_text=False)],
                end_ids=self._card.end_ids,
                hidden=self._card.control_ids,
                pieces=engine.pieces,
            )
            lanes[job.id] = lane
            for request in lane.requests():
                engine.add(request)
        count = 0
        while lanes:
            touched: dict[str, Lane] = {}
            for event in engine.step():
                job_id, _, index = event.id.rpartition("/")
                lane = touched[job_id] = lanes[job_id]
                count += isinstance(event, Token)
                if lane.on_event(int(index), event):
                    engine.cancel(event.id)
            for job_id, lane in touched.items():
                lane.flush()
                lane.outbox.clear()  # here the emitter takes the frames
                if lane.over:
                    del lanes[job_id]
        return count


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: it cannot run here, and said why."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.exllamav2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="model folder (with --cpu-harness: a tiny random one)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each loop, at least 5 (default 7)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate per lane (default 128)")
    parser.add_argument("--prompt", type=int, default=64, help="ids of each prompt (default 64)")
    parser.add_argument("--lanes", type=int, nargs="+", default=list(LANES), choices=LANES, help="default: 1 8 32")
    parser.add_argument(
        "--greedy", action="store_true", help="the likeliest token instead of temperature 0.8, top_p 0.95"
    )
    parser.add_argument("--cpu-harness", action="store_true", help="without a GPU, from a checkout with the tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there as well")
    args = parser.parse_args(argv)
    if args.rounds < 5:
        parser.error("--rounds: fewer than 5 say nothing")
    console = Console()
    if args.model is None and not args.cpu_harness:
        console.print("Name a model folder with --model, or measure a tiny one without a GPU with --cpu-harness.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = args.model or tiny_model(Path(folder))
            if args.cpu_harness:
                install_harness()
            engine, card = load(model, args)
        except (SluiceError, OSError, HarnessMissing) as error:
            console.print(f"exllamav2 cannot be measured here: {error}")
            return 2
        if args.cpu_harness:
            # as the package sets it on a machine with a GPU, and as steady as it gets
            importlib.import_module("torch").set_num_threads(1)
        with closing(engine):
            loops = Loops(engine, card, tokens=args.tokens, prompt=args.prompt, greedy=args.greedy)
            rounds = run(loops, args)
    lines = summary(rounds)
    about = machine(args) | {"attention": loops.attention, "model": "tiny" if args.model is None else str(args.model)}
    show(console, lines, about)
    if args.json:
        report = about | {"lines": [asdict(line) for line in lines], "measured": [asdict(entry) for entry in rounds]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def run(loops: Loops, args: argparse.Namespace) -> list[Round]:
    rounds = []
    for lanes in args.lanes:
        for kind in KINDS:  # not counted: first touch of memory, choice of kernels
            loops.measure(kind, lanes)
        for number in range(args.rounds):
            # in turns, and each of them first as often
            first = number % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                rounds.append(loops.measure(kind, lanes))
    return rounds


def load(model: Path, args: argparse.Namespace) -> tuple[ExLlamaV2Engine, ModelCard]:
    """Raises SluiceError and OSError as `Engine.load`."""
    pages = -(-(args.prompt + args.tokens + 1) // PAGE)
    settings = Settings().model_copy(
        update={
            "lanes": max(LANES),
            "context_cells": pages * PAGE * max(LANES),
            "exl2_draft_model": None,
            "exl2_ngram_draft": False,
        }
    )
    engine = ExLlamaV2Engine(ExLlamaV2Options.from_settings(settings, model, "benchmark"))
    return engine, engine.load(lambda part, word: None)


class HarnessMissing(Exception):
    """There is no CPU harness here; the message says why."""


def install_harness() -> None:
    """Raises HarnessMissing."""
    harness = _of_tests("harness")
    if (reason := harness.missing()) is not None:
        raise HarnessMissing(f"{reason}.")
    harness.install()


def tiny_model(folder: Path) -> Path:
    """Raises HarnessMissing."""
    model: Path = _of_tests("models").write_tiny_llama(folder / "tiny")
    return model


def _of_tests(module: str) -> Any:
    try:
        return importlib.import_module(f"tests.exllamav2.{module}")
    except ImportError as error:
        raise HarnessMissing(
            f"the CPU harness lives in tests/, which only a checkout has; run this from one ({error})."
        ) from None


def summary(rounds: Sequence[Round]) -> list[Line]:
    """Medians, ranges, and ratios of each round's pair."""
    lines = []
    for lanes in dict.fromkeys(entry.lanes for entry in rounds):
        of = {kind: [entry for entry in rounds if (entry.kind, entry.lanes) == (kind, lanes)] for kind in KINDS}
        for kind, mine in of.items():
            speeds = [entry.tokens_per_second for entry in mine]
            pairs = list(zip(mine, of[GENERATOR], strict=True))
            ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
            lines.append(
                Line(
                    kind,
                    lanes,
                    statistics.median(speeds),
                    min(speeds),
                    max(speeds),
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                    statistics.median(entry.cpu_us for entry in mine),
                    statistics.median(theirs.cpu_us / ours.cpu_us for ours, theirs in pairs),
                )
            )
    return lines


def machine(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.is_available() and not args.cpu_harness
    return {
        "device": torch.cuda.get_device_name() if gpu else f"CPU harness, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "exllamav2": VERSION,
        "torch": torch.__version__,
        "rounds": args.rounds,
        "tokens": args.tokens,
        "prompt": args.prompt,
        "greedy": args.greedy,
    }


def show(console: Console, lines: Sequence[Line], about: dict[str, Any]) -> None:
    table = Table("lanes", "loop", "tokens/s (median)", "range", "by generator's", "(rounds)", "CPU us a token", "by")
    for line in lines:
        other = line.kind != GENERATOR
        table.add_row(
            str(line.lanes),
            line.kind,
            f"{line.median:.1f}",
            f"{line.lowest:.1f} - {line.highest:.1f}",
            f"{line.ratio:.3f}" if other else "",
            f"{line.ratio_lowest:.3f} - {line.ratio_highest:.3f}" if other else "",
            f"{line.cpu_us:.0f}",
            f"{line.cpu_ratio:.3f}" if other else "",
        )
    console.print(table)
    sampling = "greedy" if about["greedy"] else "temperature 0.8, top_p 0.95"
    console.print(
        f"{about['device']}, {about['cores']} cores, load {about['load']:.1f}; exllamav2 {about['exllamav2']}, "
        f"torch {about['torch']}, attention {about['attention']}; {about['model']}: {about['prompt']} + "
        f"{about['tokens']} tokens a lane, {sampling}, {about['rounds']} rounds"
    )


if __name__ == "__main__":
    sys.exit(main())
