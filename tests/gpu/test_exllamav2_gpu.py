"""The ExLlamaV2 engine on a real GPU: its contract, its numbers, its memory, and how it fails.

What it would prove is in docs/exllamav2.md. The extension must have been built before (deploy/gpu_check.sh does), or the
first test waits for it. `EXL2_TEST_MODEL` names a folder with the tiny model quantised to EXL2, which is then tested too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.contract.engine")

from shared.cards import ModelCard  # noqa: E402
from shared.errors import EngineOverloaded  # noqa: E402
from shared.sampling import SamplingParams  # noqa: E402
from shared.settings import Settings  # noqa: E402
from tests.contract.engine import (  # noqa: E402
    GREEDY,
    EngineContract,
    EngineUnderTest,
    finished,
    loaded,
    over,
    tokens,
)
from workers.engines.base import Engine, EngineRequest, Event, Failed, PromptLogprobs  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 500
#: Texts to begin with; the first that the model goes on with for long enough is taken.
STORIES = (
    "Once upon a time there was a model that knew nothing.",
    "The queue holds the request until a worker takes it.",
    "Numbers such as 1, 12, 123 follow each other.",
    "def answer(question: str) -> str:",
    "It read every word it was given and answered with noise.",
    "The worker streams the tokens, and the client reads them.",
)


@pytest.fixture(scope="module")
def tiny(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.exllamav2 import models

    return models.write_tiny_llama(tmp_path_factory.mktemp("gpu") / "tiny", vocab=VOCAB)


Load = Callable[..., tuple[Any, ModelCard]]


def load(folder: Path, **settings: Any) -> tuple[Any, ModelCard]:
    from workers.engines.exllamav2.engine import ExLlamaV2Engine
    from workers.engines.exllamav2.options import ExLlamaV2Options

    engine = ExLlamaV2Engine(ExLlamaV2Options.from_settings(Settings(**settings), folder, "tiny"))
    return engine, engine.load(lambda part, what: None)


@pytest.fixture
def start(device: str) -> Iterator[Load]:
    """Loads an engine that is closed after the test."""
    engines: list[Engine] = []

    def start(folder: Path, **settings: Any) -> tuple[Any, ModelCard]:
        engine, card = load(folder, **settings)
        engines.append(engine)
        return engine, card

    yield start
    for engine in engines:
        engine.close()


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[Event]]:
    for request in requests:
        engine.add(request)
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    while not all(over(of) for of in events.values()):
        for event in engine.step():
            events[event.id].append(event)
    return events


def prompt(length: int, seed: int = 0) -> list[int]:
    import random

    return [random.Random(f"{seed}-{at}").randrange(VOCAB - 6) for at in range(length)]


def scored(engine: Engine, ids: list[int]) -> Any:
    """All logprobs [len(ids) - 1, vocab] behind each token but the last, as the engine tells them."""
    import torch

    events = run(engine, EngineRequest("scored", ids, 0, seed=1, prompt_logprobs=VOCAB))["scored"]
    entries = [entry for event in events if isinstance(event, PromptLogprobs) for entry in event.logprobs]
    rows = torch.empty(len(ids) - 1, VOCAB, dtype=torch.float64)
    for row, entry in zip(rows, entries[1:], strict=True):
        assert entry is not None
        for token, value in entry[1]:
            row[token] = value
    return rows


def divergence(expected: Any, found: Any) -> float:
    """Mean Kullback-Leibler divergence over the rows, nats."""
    return float((expected.exp() * (expected - found)).sum(-1).mean())


# The contract


@pytest.fixture(scope="module", params=["fp16", "exl2"])
def engine_under_test(request: pytest.FixtureRequest, device: str, tiny: Path) -> Iterator[EngineUnderTest]:
    folder = tiny
    if request.param == "exl2":
        named = os.environ.get("EXL2_TEST_MODEL")
        if not named:
            pytest.skip("EXL2_TEST_MODEL names no folder with an EXL2 model (deploy/gpu_check.sh makes one)")
        folder = Path(named)

    def make() -> tuple[Engine, ModelCard]:
        return load(folder, lanes=8, context_cells=2048, prefill_chunk=256)

    under_test = EngineUnderTest(
        make=make, prompt="", ending_prompt="", obedient_prompt="", special="<|im_start|>", repeats=False
    )
    with loaded(under_test):
        story = next(text for text in STORIES if runs_on(under_test.engine, text))
        under_test.prompt = under_test.ending_prompt = under_test.obedient_prompt = story
        yield under_test


def runs_on(engine: Engine, text: str) -> bool:
    events = run(engine, EngineRequest("story", engine.tokenize(text), 72, seed=1, params=GREEDY))["story"]
    return finished(events)[0] == "length"


class TestExLlamaV2OnGpu(EngineContract):
    pass


# Numbers


def test_logprobs_are_those_of_the_weights(tiny: Path, start: Load) -> None:
    """A prompt of many chunks, against float64: causal mask, positions, pages and kernels are right, or they are not."""
    from tests.gpu import llama

    engine, _ = start(tiny, lanes=2, prefill_chunk=256)
    ids = prompt(1900)
    expected = llama.logprobs(tiny, ids, VOCAB)[:-1]
    found = scored(engine, ids)
    assert float((found - expected).abs().max()) < 0.15
    assert divergence(expected, found) < 3e-4
    assert float((found.argmax(-1) == expected.argmax(-1)).double().mean()) > 0.98


@pytest.mark.parametrize(("mode", "most"), [("Q8", 0.001), ("Q6", 0.01), ("Q4", 0.05)])
def test_a_quantised_cache_stays_close(tiny: Path, start: Load, mode: str, most: float) -> None:
    from tests.gpu import llama

    engine, _ = start(tiny, lanes=2, prefill_chunk=256, exl2_cache_mode=mode)
    ids = prompt(1000)
    assert divergence(llama.logprobs(tiny, ids, VOCAB)[:-1], scored(engine, ids)) < most


@pytest.mark.parametrize(
    ("q_len", "window", "softcap"), [(1, -1, 0.0), (4, -1, 0.0), (300, -1, 0.0), (1, 100, 0.0), (4, -1, 30.0)]
)
def test_paged_attention_against_float64(device: str, q_len: int, window: int, softcap: float) -> None:
    import torch

    from tests.unit.test_paged_attention import TOLERANCE, Batch
    from workers.engines.exllamav2.attention import PagedAttention

    batch = Batch.make([q_len + more for more in (0, 1, 255, 256, 700)], q_len, seed=q_len, shared=False)
    there = [part.to(device) for part in (batch.q, batch.k_cache, batch.v_cache, batch.k, batch.v)]
    before = torch.tensor([end - q_len for end in batch.ends], dtype=torch.int32, device=device)
    attend = PagedAttention(plan_once=device == "cuda")
    options = {"cache_seqlens": before, "block_table": batch.table.to(device), "causal": True}
    options |= {"window_size": (window, window), "softcap": softcap}
    with torch.inference_mode():
        first = attend(*there, **options).cpu()
        again = attend(*there, **options).cpu()  # with the plan of the first call, as in the second layer
    batch.write()
    expected = batch.expected(window=window, softcap=softcap)
    for found in (first, again):
        torch.testing.assert_close(
            found.double(), expected, atol=TOLERANCE[torch.float16], rtol=TOLERANCE[torch.float16]
        )


# Many at once


def test_32_lanes_generate_what_each_would_alone(tiny: Path, start: Load) -> None:
    """Lanes of other lengths in one batch. Rounding may differ with the batch, so the numbers are compared, not the
    text: the logprobs of the first token, and that every lane gives all its tokens."""
    engine, card = start(tiny, lanes=32, context_cells=32 * 512)
    params = SamplingParams(temperature=0.0, ignore_eos=True)

    def request(n: int) -> EngineRequest:
        return EngineRequest(f"r{n}", prompt(5 + 9 * n, seed=n), 40, seed=n, params=params, logprobs=20)

    together = run(engine, *(request(n) for n in range(32)))
    assert card.lanes == 32
    for n in range(32):
        assert len(tokens(together[f"r{n}"])) == 40
        assert finished(together[f"r{n}"])[0] == "length"
    for n in (0, 13, 31):
        alone = tokens(run(engine, request(n))[f"r{n}"])[0].logprob
        beside = tokens(together[f"r{n}"])[0].logprob
        assert alone is not None
        assert beside is not None
        there = dict(beside[1])
        for token, value in alone[1][:5]:
            assert there[token] == pytest.approx(value, abs=0.1)


# Failures


def failing_prefill(monkeypatch: pytest.MonkeyPatch, name: str, fail: Callable[[], object]) -> None:
    """Calls `fail` in the prefill of the request `name`."""
    from exllamav2.generator import ExLlamaV2DynamicJob

    original = ExLlamaV2DynamicJob.prefill

    def prefill(self: Any, results: list[Any]) -> None:
        if self.lane.id == name and not self.is_prefill_done():
            fail()
        original(self, results)

    monkeypatch.setattr(ExLlamaV2DynamicJob, "prefill", prefill)


def test_who_runs_out_of_memory_fails_alone(
    tiny: Path, start: Load, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    import torch

    engine, _ = start(tiny, lanes=4, context_cells=4096)

    def fill_memory() -> None:
        if device == "cpu":
            raise torch.OutOfMemoryError("as if CUDA were out of memory")
        # not the whole GPU, which others may use: this process may have 2 GiB more than it has
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / total)
        held = []
        while True:
            held.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))

    failing_prefill(monkeypatch, "greedy", fill_memory)
    params = SamplingParams(ignore_eos=True)

    def request(name: str, seed: int) -> EngineRequest:
        return EngineRequest(name, prompt(300, seed), 20, seed=1, params=params)

    try:
        events = run(engine, request("a", 0), request("greedy", 1), request("b", 2))
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    last = events["greedy"][-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, EngineOverloaded)
    for name in ("a", "b"):
        assert len(tokens(events[name])) == 20
    assert len(tokens(run(engine, request("later", 3))["later"])) == 20


#: Runs in a process of its own: after a CUDA error nothing can be computed in it any more.
POISONED = """
    import sys
    from pathlib import Path
    import torch
    from tests.gpu.test_exllamav2_gpu import EngineRequest, load, prompt
    from workers.engines.base import EngineDied

    engine, card = load(Path(sys.argv[1]), lanes=2)
    from exllamav2.generator import ExLlamaV2DynamicJob

    def prefill(self, results):
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].cpu()

    ExLlamaV2DynamicJob.prefill = prefill
    engine.add(EngineRequest("r", prompt(20), 5, seed=1))
    try:
        engine.step()
    except EngineDied as error:
        print("died:", error)
        sys.exit(42)
"""


def test_a_cuda_error_is_the_end_of_the_process(tiny: Path, gpu: None) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(POISONED), str(tiny)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 42, ended.stderr[-2000:]
    assert "died: " in ended.stdout


# Memory


def test_unloading_gives_the_memory_back(tiny: Path, gpu: None) -> None:
    """Within 2 % of what was loaded: of torch's own count, and of what the driver says from the second time on (the
    first leaves behind what CUDA itself needs)."""
    import torch

    free: list[int] = []
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        engine, _ = load(tiny, lanes=4, context_cells=1 << 20)
        run(engine, EngineRequest("r", prompt(300), 8, seed=1))
        taken = torch.cuda.memory_allocated() - before
        assert taken > 256 << 20
        engine.close()
        del engine
        assert torch.cuda.memory_allocated() - before <= 0.02 * taken
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[2] <= 0.02 * taken
