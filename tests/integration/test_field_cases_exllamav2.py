"""Reports from other servers, kind K8 (memory, failures, what one request does to the next), against ExLlamaV2.

FB-140 and a part of FB-139 are in test_exllamav2_end_to_end.py; FB-136, FB-138 and the rest of FB-139 are about loading
and stand with its tests (tests/exllamav2/test_loading.py).
Everything runs on the CPU (tests/exllamav2): errors of CUDA are made here, and worded as torch words them.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.app import create_app
from shared.sampling import SamplingParams
from shared.settings import Settings
from tests.conftest import Node, Store, Worker, wait_for
from tests.contract.schemas import check_error
from tests.exllamav2 import harness
from tests.exllamav2.worker import fail_once, has_failed
from tests.faults.processes import alive
from tests.stack import Stack, Stream
from workers.engines.base import EngineRequest, Failed, Finished, Token

pytestmark = pytest.mark.skipif(harness.missing() is not None, reason=str(harness.missing()))

#: Of the shared stack: the context is the whole cache, four pages of 256 tokens.
CONTEXT, LANES = 1024, 4
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}
#: Tokens that fill the page of a prompt of 24, and take seconds.
WHOLE_PAGE = 256 - 24
#: Characters of a text that are the same whatever runs beside it.
SURE = 40
#: It serves again this soon after its worker has ended, s: a lease, a start, and room for a slow machine.
AGAIN_S = 60.0
#: Everything is gone this soon after a kill -9 of `up`, s.
GONE_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.exllamav2 import models

    return models.write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=500)


@contextmanager
def stack_of(model: Path, own: Path) -> Iterator[Stack]:
    with Stack(
        own,
        ("exllamav2",),
        options=("--model", str(model)),
        real="tiny",
        module="tests.exllamav2.cli",
        lanes=LANES,
        context_cells=CONTEXT,
        prefill_chunk=256,
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def tiny(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack_of(folder, tmp_path_factory.mktemp("tiny")) as stack:
        yield stack


def prompt(number: int, length: int = 24) -> list[int]:
    """Ids that no other number's prompt begins with."""
    dice = random.Random(number)
    return [dice.randrange(256, 480) for _ in range(length)]


def text(tiny: Stack, ids: list[int], count: int) -> str:
    return tiny.complete(ids, max_tokens=count, **GREEDY).text


def test_fb044_pages_are_rounded_up_before_the_answer_begins(tiny: Stack) -> None:
    """FB-044: at the edges of pages and of the cache there is an answer, or a 400 before any of it."""
    lengths = [1, 255, 256, 257, 511, 512, 513, 767, *range(CONTEXT - 4, CONTEXT + 1)]
    for length in lengths:
        for count in (1, 4):
            ids = prompt(length, length)
            plain = tiny.complete(ids, max_tokens=count, **GREEDY)
            streamed = tiny.stream(ids, max_tokens=count, **GREEDY)
            if length + count > CONTEXT:
                assert streamed.answer is not None, (length, count)
                for answer in (plain, streamed.answer):
                    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), (length, count)
                continue
            assert plain.usage["completion_tokens"] == count
            assert streamed.status == 200 and streamed.error is None and streamed.text == plain.text


def test_fb044_requests_that_fill_the_cache_alone_take_turns(tiny: Stack) -> None:
    """FB-044: each needs every page there is."""
    lengths = [CONTEXT - 1, CONTEXT - 200, 255, 700, CONTEXT - 300]
    alone = [text(tiny, prompt(n, length), min(CONTEXT - length, 300)) for n, length in enumerate(lengths)]
    with ThreadPoolExecutor(len(lengths)) as threads:
        together = threads.map(
            lambda n: text(tiny, prompt(n, lengths[n]), min(CONTEXT - lengths[n], 300)), range(len(lengths))
        )
        assert list(together) == alone


def out_of_memory(tiny: Stack) -> int:
    """How often the one worker's model ran out of memory, as `GET /v1/status` says."""
    [worker] = tiny.status()["workers"]
    count: int = worker["out_of_memory"]
    return count


def _three_streams(tiny: Stack) -> list[Stream]:
    streams = [tiny.open(prompt(n), max_tokens=WHOLE_PAGE, **GREEDY) for n in range(3)]
    for stream in streams:
        stream.goes_on(3)
    return streams


def test_fb137_memory_that_ends_in_one_prefill_ends_one_request(tiny: Stack) -> None:
    """FB-137: three others stream on as if nothing had been; the next request is served. It is counted."""
    before = out_of_memory(tiny)
    alone = [text(tiny, prompt(n), WHOLE_PAGE) for n in range(3)]
    workers, streams = tiny.workers(), _three_streams(tiny)
    fail_once(tiny.folder / "data", "prefill", "memory")
    answer = tiny.complete(prompt(99), max_tokens=8, **GREEDY)
    assert answer.status == 503 and answer.error["code"] == "engine_overloaded", answer
    check_error(answer.json)
    assert has_failed(tiny.folder / "data", "prefill")
    assert tiny.busy("tiny") >= 3, "they are still running"
    for stream, want in zip(streams, alone, strict=True):
        assert stream.read().error is None and stream.text == want and stream.finish == "length"
    assert tiny.complete(prompt(99), max_tokens=8, **GREEDY).status == 200
    assert tiny.workers() == workers
    wait_for(lambda: out_of_memory(tiny) == before + 1)
    assert "out_of_memory" in tiny.log()


def test_fb137_in_a_stream_it_is_an_error_frame(tiny: Stack) -> None:
    """FB-137: before the first token there is no stream yet, so that it is a status too."""
    fail_once(tiny.folder / "data", "prefill", "memory")
    refused = tiny.stream(prompt(98), max_tokens=8, **GREEDY)
    error = refused.answer.error if refused.answer is not None else refused.error
    assert error is not None and error["code"] == "engine_overloaded"
    wait_for(lambda: tiny.idle())


def test_fb046_memory_that_ends_while_all_generate_ends_nobody(tiny: Stack) -> None:
    """FB-046: out of memory is told apart from a broken device; all begin anew, and go on where they were."""
    alone = [text(tiny, prompt(n), WHOLE_PAGE) for n in range(3)]
    before = out_of_memory(tiny)
    workers, streams = tiny.workers(), _three_streams(tiny)
    fail_once(tiny.folder / "data", "decode", "memory")
    wait_for(lambda: has_failed(tiny.folder / "data", "decode"))
    for stream, want in zip(streams, alone, strict=True):
        assert stream.read().error is None and stream.finish == "length"
        assert stream.text[:SURE] == want[:SURE], (
            "behind that, ties of a model that was never trained may break otherwise"
        )
    assert tiny.workers() == workers
    wait_for(lambda: out_of_memory(tiny) == before + 1)


@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_fb046_a_broken_device_ends_the_process_and_no_later_request(tiny: Stack, stage: Any) -> None:
    """FB-046: the process ends with a status of its own, another one goes on with who ran and serves the next."""
    want = text(tiny, prompt(5), 900)
    [worker], [name] = tiny.workers(), [shown["name"] for shown in tiny.status()["workers"]]
    with tiny.open(prompt(5), max_tokens=900, **GREEDY) as stream:
        stream.goes_on(3)
        fail_once(tiny.folder / "data", stage, "cuda")
        waiting = None if stage == "decode" else tiny.ask(prompt(6), max_tokens=4, **GREEDY)
        stream.read(timeout=40)
        assert stream.ended and stream.done == 1
        assert stream.error is None and stream.text == want
        if waiting is not None:
            waiting.leave()
    assert has_failed(tiny.folder / "data", stage)
    assert not alive(worker)
    assert f"pid {worker} ended with exit status 70" in tiny.log()
    assert name not in [shown["name"] for shown in tiny.status()["workers"]]

    def served() -> bool:
        answer = tiny.complete(prompt(7), max_tokens=4, timeout=AGAIN_S, **GREEDY)
        if answer.status != 200:
            assert answer.status == 503, answer
            check_error(answer.json)
        return answer.status == 200

    wait_for(served, AGAIN_S, every=0.2)
    assert worker not in wait_for(tiny.workers)
    wait_for(tiny.idle, AGAIN_S)


def test_fb143_a_reference_is_the_same_after_odd_requests(tiny: Stack) -> None:
    """FB-143: control bytes, halves of characters, one token, given up in the prefill, and beginnings in common."""
    reference = prompt(0, 600)
    before = text(tiny, reference, 40), text(tiny, reference[:300], 40)
    dice = random.Random(143)
    for number in range(50):
        odd: Any = [
            "".join(chr(dice.randrange(1, 32)) for _ in range(40)),
            "é🌍漢\x00"[: 1 + number % 4] * 9,
            [dice.randrange(500)],
            [dice.randrange(500) for _ in range(300)],
            [*reference[: 1 + 11 * number], dice.randrange(500)],
            reference[: 256 * (1 + number % 2)],
        ][number % 6]
        if number % 3:
            fields = {"max_tokens": 1 + number % 7, "n": 1 + number % 2, "temperature": 1.5, "seed": number}
            assert tiny.complete(odd, **{**GREEDY, **fields}).status == 200
        else:
            with tiny.ask([*reference[:200], *prompt(number, 700)], max_tokens=50, **GREEDY) as left:
                wait_for(lambda: tiny.busy("tiny") > 0 or tiny.idle())
                left.leave("reset")
    wait_for(tiny.idle, 30)
    assert (text(tiny, reference, 40), text(tiny, reference[:300], 40)) == before


def test_fb144_the_worker_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    """FB-144: also while it computes; its memory is free before anybody starts another."""
    with stack_of(folder, tmp_path) as stack, stack.open(prompt(1), max_tokens=900, **GREEDY) as stream:
        stream.goes_on(3)
        [worker] = stack.workers()
        os.kill(stack.process.pid, signal.SIGKILL)
        wait_for(lambda: not alive(worker), GONE_S)
        stack.process.wait(10)
        wait_for(lambda: not stack.processes(), GONE_S)


def test_fb135_a_model_is_changed_while_others_generate(
    store: Store, node: Node, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """FB-135: one model is one process, so a change is a drain beside a start: all streams of the old model end in
    order, two starts at once do not disturb each other, and the new model serves."""
    from tests.exllamav2 import models

    def start(model: str, seed: int) -> Worker:
        path = models.write_tiny_llama(tmp_path / model, vocab=500, seed=seed)
        options = {"lanes": 10, "context_cells": 4096, "drain_s": 60}
        return start_worker("--engine", "exllamav2", "--model", str(path), module="tests.exllamav2.worker", **options)

    old = start("a", 0)
    wait_for(lambda: [card.id for card in node.gateway.cards()] == ["a"])
    client = create_app(Settings(), gateway=node.gateway, hub=node.hub)

    def ask(number: int, model: str, **fields: Any) -> Any:
        body = {**GREEDY, "model": model, "prompt": prompt(number), **fields}
        answer = client.test_client().post("/v1/completions", json=body)
        return answer.status_code, answer.text

    assert ask(0, "b")[0] == 404
    with ThreadPoolExecutor(12) as threads:
        streams = [threads.submit(ask, number, "a", max_tokens=300, stream=True) for number in range(10)]
        wait_for(lambda: node.busy() == 10)
        starts = [threads.submit(start, model, seed) for model, seed in (("b", 1), ("c", 2))]
        old.process.terminate()
        for stream in streams:
            status, text = stream.result(60)
            assert status == 200 and text.endswith("data: [DONE]\n\n"), text[-300:]
            assert '"error"' not in text and text.count('"finish_reason":"length"') == 1
        assert old.process.wait(30) == 0
        for begun in starts:
            begun.result(60)
    wait_for(lambda: {card.id for card in node.gateway.cards()} >= {"b", "c"})
    assert [ask(number, model, max_tokens=8)[0] for number in range(3) for model in "bc"] == [200] * 6


# -- in this process, where the generator can be looked into


def started(folder: Path) -> Any:
    from workers.engines.exllamav2.engine import ExLlamaV2Engine
    from workers.engines.exllamav2.options import ExLlamaV2Options

    settings = Settings(lanes=6, context_cells=4096, context_length=1024, prefill_chunk=256)
    engine = ExLlamaV2Engine(ExLlamaV2Options.from_settings(settings, folder, "tiny"))
    engine.load(lambda part, what: None)
    return engine


@pytest.fixture
def engine(folder: Path) -> Iterator[Any]:
    harness.install_or_skip()
    engine = started(folder)
    yield engine
    engine.close()


def passes_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """The passes of its model from now on: whether one is of a prefill, and how many tokens it computes."""
    model, passes = engine._loaded.model, []
    plain = model.forward_chunk

    def forward_chunk(input_ids: Any, *arguments: Any, **named: Any) -> Any:
        passes.append((bool(named.get("preprocess_only")), input_ids.numel()))
        return plain(input_ids, *arguments, **named)

    monkeypatch.setattr(model, "forward_chunk", forward_chunk)
    return passes


def to_the_end(engine: Any) -> int:
    """Steps until nobody is left."""
    steps = 0
    while engine.stats().running + engine.stats().waiting:
        engine.step()
        steps += 1
    return steps


def storm(engine: Any) -> None:
    """500 requests, four at a time; a third is given up, before, in and after the prefill."""
    dice = random.Random(142)
    params = SamplingParams(temperature=0, ignore_eos=True)
    given_up = finished = 0
    for number in range(0, 500, 4):
        patience = {}
        for k in range(4):
            request_id = f"{number + k}"
            length = dice.choice([1, 20, 60, 256, 300])
            engine.add(EngineRequest(request_id, prompt(number + k, length), dice.randrange(3, 9), 1, params))
            patience[request_id] = dice.randrange(0, 4) if dice.random() < 0.3 else 10**6
        for step in range(10**6):
            for request_id in [name for name, steps in patience.items() if steps == step]:
                engine.cancel(request_id)
                given_up += patience.pop(request_id) is not None
            stats = engine.stats()
            if not stats.running + stats.waiting:
                break
            for event in engine.step():
                if isinstance(event, Finished | Failed):
                    assert isinstance(event, Finished)
                    finished += 1
                    patience.pop(event.id)
        generator = engine._batch._generator
        assert (generator.active_jobs, generator.pending_jobs) == ([], [])
        assert not generator.referenced_pages and len(generator.unreferenced_pages) == 16
        assert all(page.ref_count == 0 for page in generator.all_pages)
    assert given_up + finished == 500 and given_up > 100


def some_requests(engine: Any, number: int) -> None:
    """Four side by side, with prompts that only this number has."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    for k, length in enumerate((1, 40, 256, 500)):
        engine.add(EngineRequest(f"r{k}", prompt(1000 + 4 * number + k, length), 24, 1, params))


def test_fb142_after_500_requests_one_is_as_much_work_as_before(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FB-142: what is left over in the generator would be stepped for ever, or searched, or hold pages."""
    passes = passes_of(engine, monkeypatch)
    some_requests(engine, 0)
    steps, first = to_the_end(engine), list(passes)
    storm(engine)
    passes.clear()
    some_requests(engine, 1)
    assert (to_the_end(engine), passes) == (steps, first)
    assert sum(count for prefill, count in first if not prefill) == 4 * 24


@pytest.mark.slow
def test_fb142_after_500_requests_one_takes_as_long_as_before(engine: Any, folder: Path) -> None:
    """FB-142: within 10 % of a new engine's, by the CPU time of this process; both take turns, so that what else the
    machine does falls on both alike."""
    storm(engine)
    new = started(folder)
    ratios = []
    for number in range(31):
        seconds = {}
        for one in (engine, new) if number % 2 else (new, engine):
            some_requests(one, number)
            began = time.process_time()
            to_the_end(one)
            seconds[one] = time.process_time() - began
        ratios.append(seconds[engine] / seconds[new])
    new.close()
    assert statistics.median(ratios) <= 1.1, ratios


def test_choices_of_one_prompt_compute_it_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin in one step, where none has computed a page yet that the others could take."""
    passes = passes_of(engine, monkeypatch)
    params, ids = SamplingParams(temperature=1.0, ignore_eos=True), prompt(1, 700)
    for choice in range(4):
        engine.add(EngineRequest(f"r/{choice}", ids, 8, 1, params, choice=choice))
    tokens: dict[str, list[int]] = {f"r/{choice}": [] for choice in range(4)}
    while engine.stats().running + engine.stats().waiting:
        for event in engine.step():
            if isinstance(event, Token):
                tokens[event.id].append(event.token)
    assert len({tuple(found) for found in tokens.values()}) == 4
    assert sum(count for prefill, count in passes if prefill) < 700 + 256
    assert sum(count for prefill, count in passes if not prefill) == 4 * 8
