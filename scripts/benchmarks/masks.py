"""What structured output costs the llama.cpp engine: its part of a step at several lanes, and what the steps of running
requests notice of a schema that is compiled beside them.

Run: `python -m scripts.benchmarks.masks`. No Redis, no HTTP. Exit status 1: a mask costs 5 % of a step or more, or a step took
twice the median while schemas were compiled.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.sampling import SamplingParams
from shared.settings import Settings
from shared.structured import Constraint, of_schema
from workers.engines.base import EngineRequest, Token
from workers.engines.llamacpp.carried import find_carried_model
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.options import LlamaCppOptions
from workers.generation.constraint import Grammar, Mask, State
from workers.grammars import grammars_of
from workers.taker import NICENESS

#: What a mask may cost, of a step, and how long a step may take beside a compilation, of the median.
MOST_COST, MOST_STEP = 0.05, 2.0
PROMPT = "The records of all visitors of the museum, as JSON:\n"
_FIELDS: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "email": {"type": "string", "format": "email"},
    "tags": {"type": "array", "items": {"enum": ["new", "guest", "staff", "press"]}, "maxItems": 4},
    "notes": {"type": "string"},
    "visits": {"type": "array", "items": {"type": "string", "format": "date"}, "maxItems": 3},
    "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    "score": {"type": "number"},
}  # fmt: skip


class Timed(State):
    """A state that counts the seconds spent in it, over all of them."""

    seconds = 0.0

    def mask(self) -> Mask:
        with counted():
            return super().mask()

    def takes(self, token: int) -> bool:
        with counted():
            return super().takes(token)

    def accept(self, token: int) -> None:
        with counted():
            super().accept(token)


@contextmanager
def counted() -> Iterator[None]:
    began = time.perf_counter()
    yield
    Timed.seconds += time.perf_counter() - began


def timed(grammar: Grammar) -> Grammar:
    """The grammar, whose states count their seconds."""
    begin = grammar.begin

    def begin_timed(ids: Sequence[int] = ()) -> State:
        state = begin(ids)
        state.__class__ = Timed
        return state

    grammar.begin = begin_timed  # type: ignore[method-assign]
    return grammar


def schemas() -> Iterator[Constraint]:
    """Schemas such as clients send, no two alike, for texts that do not end soon."""
    for number in itertools.count():
        names = list(_FIELDS)[number % 4 :] + [f"field_{number}_{k}" for k in range(number % 3)]
        properties = {name: _FIELDS.get(name, {"type": "string"}) for name in names}
        item = {"type": "object", "properties": properties, "required": names[:3]}
        yield of_schema({"type": "array", "items": item, "minItems": 1000 + number})


def large(number: int) -> Constraint:
    """As large as schemas may be, by their properties."""
    return of_schema({"type": "object", "properties": {f"p{number}_{k}": _FIELDS["email"] for k in range(400)}})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.masks", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the carried model)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lanes", type=int, default=8)
    args = parser.parse_args(argv)
    console = Console()
    settings = Settings()
    model = args.model or find_carried_model(settings.cache_dir)
    if model is None:
        console.print("The carried model is not in the cache; name one with --model.")
        return 2
    engine = LlamaCppEngine(LlamaCppOptions.from_settings(settings, model, "m"))
    card = engine.load(lambda part, what: None)
    grammars = grammars_of(engine, card)
    began = time.perf_counter()
    grammars.prepare()
    console.print(f"vocabulary of {card.vocab_size} tokens: {time.perf_counter() - began:.2f} s, once a worker")
    table = Table("lanes", "step, ms (median)", "masks, ms a step", "of the step")
    worst = 0.0
    for lanes in sorted({1, args.lanes}):
        steps, spent = run(engine, [timed(grammars.of(c)) for c in itertools.islice(schemas(), lanes)], args.steps)
        cost = sum(spent) / sum(steps)
        worst = max(worst, cost)
        table.add_row(
            str(lanes), f"{statistics.median(steps) * 1e3:.1f}", f"{statistics.mean(spent) * 1e3:.2f}", f"{cost:.1%}"
        )
    console.print(table)
    compiled, ratios = beside_compilations(engine, grammars.of, args, console)
    console.print(f"{compiled} schemas compiled beside {args.lanes} lanes")
    return int(worst >= MOST_COST or max(ratios) > MOST_STEP)


def run(engine: LlamaCppEngine, grammars: Sequence[Grammar], count: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of masks in it, with a lane for each grammar and all prompts read."""
    prompt = engine.tokenize(PROMPT)
    for number, grammar in enumerate(grammars):
        engine.add(EngineRequest(f"r{number}", prompt, 1000, number, SamplingParams(temperature=0.8), grammar=grammar))
    begun: set[str] = set()
    while len(begun) < len(grammars):
        begun |= {event.id for event in engine.step() if isinstance(event, Token)}
    steps, spent = [], []
    for _ in range(count):
        Timed.seconds, began = 0.0, time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
        spent.append(Timed.seconds)
    for number in range(len(grammars)):
        engine.cancel(f"r{number}")
    return steps, spent


def beside_compilations(
    engine: LlamaCppEngine, compile: Callable[[Constraint], Grammar], args: argparse.Namespace, console: Console
) -> tuple[int, list[float]]:
    """How many schemas were compiled, and the longest steps beside that, in medians of those without."""
    stop, compiled, took = threading.Event(), itertools.count(), []
    fresh = itertools.islice(schemas(), 1000, None)

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not stop.is_set():
            number = next(compiled)
            began = time.perf_counter()
            compile(large(number) if number % 5 == 4 else next(fresh))
            took.append(time.perf_counter() - began)
            stop.wait(0.05)

    lanes = [compile(c) for c in itertools.islice(schemas(), args.lanes)]
    table = Table("", "step, ms (median)", "90 %", "longest", "longest / median alone")
    alone, _ = run(engine, lanes, args.steps)
    compiling = threading.Thread(target=work, daemon=True)
    compiling.start()
    beside, _ = run(engine, lanes, args.steps)
    stop.set()
    compiling.join()
    again, _ = run(engine, lanes, args.steps)
    median = statistics.median(alone)
    for name, steps in (("alone", alone), ("beside compilations", beside), ("alone again", again)):
        high = statistics.quantiles(steps, n=10)[-1]
        row = [statistics.median(steps), high, max(steps)]
        table.add_row(name, *(f"{value * 1e3:.1f}" for value in row), f"{max(steps) / median:.2f}")
    console.print(table)
    console.print(f"a compilation: {statistics.median(took) * 1e3:.0f} ms (median), {max(took) * 1e3:.0f} ms at most")
    return len(took), [statistics.quantiles(beside, n=100)[-1] / max(statistics.median(beside), median)]


if __name__ == "__main__":
    sys.exit(main())
