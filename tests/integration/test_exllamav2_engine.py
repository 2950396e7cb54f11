"""The ExLlamaV2 engine on the genuine generator without a GPU: drafts, memory, failures, and whose they are.

Greedy text is compared with text alone only where the batch has the same shape, or where the margin is seen to be wide.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ContextLengthExceeded, EngineOverloaded, InternalError, SluiceError
from shared.sampling import SamplingParams
from tests.exllamav2 import harness
from workers.engines.base import EngineDied, EngineRequest, Event, Failed, Finished, PromptLogprobs, Started, Token

GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
PAGE = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    harness.install_or_skip()
    from tests.exllamav2.models import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def started(folder: Path, **options: Any) -> Iterator[Any]:
    from workers.engines.exllamav2.engine import ExLlamaV2Engine
    from workers.engines.exllamav2.options import ExLlamaV2Options

    options = {"lanes": 8, "cache_tokens": 4096, "chunk": 256, **options}
    engine = ExLlamaV2Engine(ExLlamaV2Options(model=folder, model_id="tiny", cache_dir=folder.parent, **options))
    card = engine.load(lambda part, word: None)
    engine.card = card  # type: ignore[attr-defined]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    with started(folder) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        left = request.getfixturevalue("engine")
        assert (left.stats().running, left.stats().waiting, left.stats().cells_used) == (0, 0, 0)
        assert not left._batch._generator.active_jobs and not left._batch._generator.pending_jobs


def run(engine: Any, *requests: EngineRequest) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(5000):
        for event in engine.step():
            events[event.id].append(event)
        if all(of and isinstance(of[-1], Finished | Failed) for of in events.values()):
            return events
    raise AssertionError(f"no end: {events}")


def request(name: str, prompt: Sequence[int], max_new: int = 12, **fields: Any) -> EngineRequest:
    return EngineRequest(name, prompt, max_new, **{"seed": 1, "params": ENDLESS, **fields})


def ids(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def error_of(events: list[Event]) -> SluiceError:
    last = events[-1]
    assert isinstance(last, Failed), last
    return last.error


def words(engine: Any, count: int, start: str = "Once upon a time ") -> list[int]:
    """`count` ids of text, of which the first ones are those of `start`."""
    found: list[int] = engine.tokenize((start + "the queue holds the request until a worker takes it; ") * count)[
        :count
    ]
    return found


# Drafts: exllamav2 0.3.2 ends `num_draft_tokens` early (asked for 20, gave 16), reads past its position table near the
# context's end, and looks for n-grams before a short sequence's beginning (IndexError).


@pytest.mark.parametrize("kind", ["ngram", "model", "good model"])
def test_drafts_change_nothing_of_greedy_text(folder: Path, engine: Any, kind: str, tmp_path: Path) -> None:
    from tests.exllamav2.models import write_draft_model, write_tiny_llama

    if kind == "ngram":
        options: dict[str, Any] = {"ngram_draft": True}
    elif kind == "model":
        options = {"draft_model": write_draft_model(tmp_path / "draft")}
    else:  # the model itself: all it proposes is right
        options = {"draft_model": write_tiny_llama(tmp_path / "draft")}
    prompts = {"long": words(engine, 300), "short": words(engine, 5), "single": words(engine, 1)}
    with started(folder, **options) as drafting:
        assert drafting.card.context == engine.card.context - 4
        for max_new in (1, 3, 20):
            for name, prompt in prompts.items():
                plain = run(engine, request(name, prompt, max_new))[name]
                drafted = run(drafting, request(name, prompt, max_new))[name]
                assert ids(drafted) == ids(plain)
                assert len(ids(drafted)) == max_new
        together = [request(name, prompt, 40) for name, prompt in prompts.items()]
        assert [len(ids(of)) for of in run(drafting, *together).values()] == [40, 40, 40]
        if kind != "model":  # which says other things
            # A random model's greedy text goes in circles soon.
            steps, count = 0, 40 if kind == "good model" else 300
            drafting.add(request("r", prompts["long"], count))
            while not any(isinstance(event, Finished) for event in drafting.step()):
                steps += 1
            assert steps < count / 2, "no draft was ever right"


def test_drafting_stays_inside_the_context(folder: Path) -> None:
    with started(folder, cache_tokens=2048, ngram_draft=True) as engine:
        room = engine.card.context - 300
        prompt = words(engine, 300)
        assert len(ids(run(engine, request("r", prompt, room))["r"])) == room
        with pytest.raises(ContextLengthExceeded):
            engine.add(request("r", prompt, room + 1))


def test_a_pool_larger_than_the_model_is_no_longer_context(tmp_path: Path) -> None:
    """exllamav2 0.3.2 accepts prompt + max_new beyond the model's positions, and reads past their table."""
    harness.install_or_skip()
    from tests.exllamav2.models import write_tiny_llama

    with started(write_tiny_llama(tmp_path / "short", max_positions=512), cache_tokens=2048) as engine:
        assert engine.card.context == 512
        prompt = words(engine, 500)
        assert len(ids(run(engine, request("r", prompt, 12))["r"])) == 12
        with pytest.raises(ContextLengthExceeded):
            engine.add(request("r", prompt, 13))


# Logprobs and random numbers


def test_logprobs_are_those_of_the_model_itself(engine: Any) -> None:
    """exllamav2 0.3.2 gives logits after penalties and bias, and probabilities 1, 0, 0 at temperature 0."""
    prompt = words(engine, 40)
    plain = run(engine, request("r", prompt, 1, logprobs=20))["r"][1]
    assert isinstance(plain, Token) and plain.logprob is not None
    best = plain.logprob[1]
    second = best[1][0]
    changed = SamplingParams(
        temperature=0.5, top_k=1, repetition_penalty=1.7, logit_bias={best[0][0]: -100.0, second: 9.0}
    )
    other = run(engine, request("r", prompt, 1, logprobs=20, params=changed))["r"][1]
    assert isinstance(other, Token) and other.logprob is not None
    assert other.token == second
    assert dict(other.logprob[1]) == pytest.approx(dict(best), abs=1e-3)


def test_random_numbers_belong_to_seed_choice_and_position(engine: Any) -> None:
    prompt, params = words(engine, 40), SamplingParams(ignore_eos=True)

    def sampled(seed: int, choice: int, generated: Sequence[int] = ()) -> list[int]:
        events = run(engine, request("r", prompt, 16, params=params, seed=seed, choice=choice, generated=generated))
        return ids(events["r"])

    first = sampled(1, 0)
    assert sampled(1, 0) == first
    assert sampled(1, 0, first[:7]) == first[7:]
    assert sampled(1, 1) != first
    assert sampled(2, 0) != first


def test_prompt_logprobs_are_the_same_whatever_is_in_the_cache(engine: Any) -> None:
    prompt = words(engine, 700)

    def scored() -> list[tuple[float, float]]:
        events = run(engine, request("r", prompt, 0, prompt_logprobs=0))["r"]
        entries = [entry for event in events if isinstance(event, PromptLogprobs) for entry in event.logprobs]
        assert events[0] == Started("r", 0)
        assert len(entries) == len(prompt) and entries[0] is None
        return [entry for entry in entries if entry is not None]

    before = scored()
    run(engine, request("fill", prompt, 2))
    assert [own for own, _ in scored()] == pytest.approx([own for own, _ in before], abs=2e-2)


def test_prefill_is_causal(engine: Any) -> None:
    """By the paged attention; that of the package itself is tested where it is loaded."""
    prompt = words(engine, 400)
    whole = run(engine, request("r", prompt, 0, prompt_logprobs=0))["r"]
    for cut in (2, 200, 399):
        part = run(engine, request("r", [*prompt[:cut], 7], 0, prompt_logprobs=0))["r"]
        seen, full = (
            [entry[0] for event in of if isinstance(event, PromptLogprobs) for entry in event.logprobs if entry]
            for of in (part, whole)
        )
        assert seen[: cut - 1] == pytest.approx(full[: cut - 1], abs=2e-2)


# Pages


def test_a_prompt_seen_before_is_not_computed_again(engine: Any) -> None:
    prompt = words(engine, 700, start="Reuse of a prompt. ")
    assert run(engine, request("a", prompt))["a"][0] == Started("a", 0)
    (first, *_) = run(engine, request("b", prompt))["b"]
    assert isinstance(first, Started) and first.cached == len(prompt) - 1
    (first, *_) = run(engine, request("c", [*prompt[:600], 9, 9, 9]))["c"]
    assert isinstance(first, Started) and 512 <= first.cached <= 600


def test_choices_of_one_request_share_their_prompt(engine: Any) -> None:
    prompt = words(engine, 700, start="Four at once. ")
    before = engine.stats().computed
    events = run(engine, *[request(f"r/{j}", prompt, 4, choice=j) for j in range(4)])
    cached = [of[0].cached for of in events.values() if isinstance(of[0], Started)]
    assert cached[0] == 0 and min(cached[1:]) >= 512
    assert engine.stats().computed - before < 2 * len(prompt)


def test_who_is_set_aside_says_what_it_would_have_said(folder: Path, engine: Any) -> None:
    with started(folder, cache_tokens=1024) as small:
        requests = [request(f"r{n}", words(engine, 200, start=f"Number {n}. "), 150) for n in range(4)]
        alone = {r.id: ids(run(engine, r)[r.id]) for r in requests}
        waited = 0
        events: dict[str, list[Event]] = {r.id: [] for r in requests}
        for r in requests:
            small.add(r)
        while not all(of and isinstance(of[-1], Finished) for of in events.values()):
            for event in small.step():
                events[event.id].append(event)
            begun = [of for of in events.values() if of]
            waited += len(begun) == 4 and small.stats().waiting > 0
        assert waited, "nobody was set aside"
        # Batches of other shapes round otherwise: what matters is that a set-aside lane does not lose its place.
        alike = [sum(a == b for a, b in zip(ids(events[name]), alone[name], strict=True)) for name in alone]
        assert all(len(ids(of)) == 150 for of in events.values())
        assert sum(alike) > 0.9 * 600, alike


def test_who_waits_for_pages_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt at the head of the queue costs those who generate nothing."""
    from exllamav2.generator import dynamic

    with started(folder, cache_tokens=1024) as small:
        small.add(request("old", words(small, 700), 20))
        while not any(isinstance(event, Token) for event in small.step()):
            pass
        hashed: list[int] = []
        plain = dynamic._tensor_hash_checksum

        def counted(page: Any, before: Any) -> Any:
            hashed.append(page.numel())
            return plain(page, before)

        monkeypatch.setattr(dynamic, "_tensor_hash_checksum", counted)
        small.add(request("new", words(small, 800, start="Another one. "), 4))
        for _ in range(10):
            small.step()
        assert small.stats().waiting == 1 and hashed.count(PAGE) == 3
        events: list[Event] = []
        while small.stats().running + small.stats().waiting:
            events += [event for event in small.step() if event.id == "new"]
        assert (len(ids(events)), hashed.count(PAGE)) == (4, 3)


def test_long_prompts_do_not_stop_those_who_generate(engine: Any) -> None:
    """At most a chunk of prompts a step, and a token for everybody else in each."""
    engine.add(request("old", words(engine, 20), 30))
    while not any(isinstance(event, Token) for event in engine.step()):
        pass
    for n in range(3):
        engine.add(request(f"new{n}", words(engine, 700, start=f"Long prompt {n}. "), 2))
    steps, old = 0, 0
    while engine.stats().running + engine.stats().waiting > 1:
        before = engine.stats().computed
        events = engine.step()
        steps += 1
        got = sum(event.id == "old" and isinstance(event, Token) for event in events)
        assert got == 1
        old += got
        assert engine.stats().computed - before <= 256 + 8
    assert steps >= 8
    engine.cancel("old")


# Failures: the tests put faults into the model's forward pass.


def fail_on(engine: Any, monkeypatch: pytest.MonkeyPatch, marker: int, fault: Callable[[], Exception | None]) -> None:
    """Whenever a batch holds the id `marker`, `fault` is raised (None: its logits are no numbers)."""
    model = engine._loaded.model
    forward = model.forward_chunk

    def faulty(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows = (input_ids == marker).any(dim=1).nonzero().flatten().tolist()
        if rows and (error := fault()) is not None:
            raise error
        result = forward(input_ids, *args, **kwargs)
        if rows and "logits" in result:
            result["logits"][rows] = float("nan")
        return result

    monkeypatch.setattr(model, "forward_chunk", faulty, raising=False)


MARKER = 77
#: Never samples the marker.
HARMLESS = SamplingParams(temperature=0, ignore_eos=True, logit_bias={MARKER: -100.0})
_numbers = itertools.count(1)


def marked(engine: Any, *, in_prefill: bool) -> list[int]:
    """A new prompt with the marker among what is prefilled, or as its last id, which is what a step of all computes."""
    text = words(engine, 20, start=f"{next(_numbers)} and ")
    return [*text[:10], MARKER, *text[10:]] if in_prefill else [*text, MARKER]


def out_of_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def a_bug() -> Exception:
    return ValueError("no such thing")


@pytest.mark.parametrize(("fault", "answer"), [(out_of_memory, EngineOverloaded), (a_bug, InternalError)])
@pytest.mark.parametrize("in_prefill", [True, False])
def test_only_the_guilty_fails(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[], Exception],
    answer: type[SluiceError],
    in_prefill: bool,
) -> None:
    """FB-137. exllamav2 0.3.2: any exception inside iterate() hits all jobs, and leaves their pages in disorder."""
    good = [request(f"good{n}", words(engine, 30, start=f"Number {n}. "), 20, params=HARMLESS) for n in range(3)]
    alone, before = run(engine, *good), engine.stats().out_of_memory
    fail_on(engine, monkeypatch, MARKER, fault)
    bad = request("bad", marked(engine, in_prefill=in_prefill), params=HARMLESS)
    events = run(engine, *good, bad)
    assert isinstance(error_of(events["bad"]), answer)
    # In a step of all it is begun anew before it is known who it was.
    assert engine.stats().out_of_memory - before == ((1 if in_prefill else 2) if answer is EngineOverloaded else 0)
    for r in good:
        assert len(ids(events[r.id])) == 20
        assert [type(event) for event in events[r.id]].count(Started) == 1
        assert ids(events[r.id])[:3] == ids(alone[r.id])[:3]
    monkeypatch.undo()
    assert len(ids(run(engine, bad)["bad"])) == 12, "the engine is as good as before"


def test_one_who_fails_among_many_is_found(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is to be blamed at first; each is then tried beside those that were seen to do no harm."""
    for n in range(5):
        engine.add(request(f"good{n}", words(engine, 30, start=f"Number {n}. "), 40, params=HARMLESS))
    engine.add(
        request(
            "late",
            words(engine, 30, start="It comes late. "),
            40,
            params=SamplingParams(temperature=0, logit_bias={MARKER: 100.0}),
        )
    )
    events: dict[str, list[Event]] = {name: [] for name in ("late", *(f"good{n}" for n in range(5)))}
    for event in engine.step():
        events[event.id].append(event)
    fail_on(engine, monkeypatch, MARKER, a_bug)
    while not all(of and isinstance(of[-1], Finished | Failed) for of in events.values()):
        for event in engine.step():
            events[event.id].append(event)
    assert isinstance(error_of(events["late"]), InternalError)
    assert [len(ids(events[f"good{n}"])) for n in range(5)] == [40] * 5


def test_who_comes_while_one_is_suspected_is_not_its_neighbour(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that crashes the generator would put the blame on the suspect beside it."""
    fail_on(engine, monkeypatch, MARKER, a_bug)
    names = ["good", "bad", "newcomer"]
    events: dict[str, list[Event]] = {name: [] for name in names}
    engine.add(request("good", words(engine, 30), 30, params=HARMLESS))
    engine.add(request("bad", marked(engine, in_prefill=False), params=HARMLESS))
    for event in engine.step():  # it fails: both are suspects now
        events[event.id].append(event)
    engine.add(request("newcomer", marked(engine, in_prefill=False), params=HARMLESS))
    while not all(of and isinstance(of[-1], Finished | Failed) for of in events.values()):
        for event in engine.step():
            events[event.id].append(event)
    assert len(ids(events["good"])) == 30
    assert isinstance(error_of(events["bad"]), InternalError) and isinstance(
        error_of(events["newcomer"]), InternalError
    )


def test_who_cannot_be_begun_fails_alone(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-begun jobs would stay in the generator, and the next step would fail with it, and all others with that."""
    from workers.engines.exllamav2.job import Job

    good = [request(f"good{n}", words(engine, 30, start=f"Number {n}. "), 20, params=HARMLESS) for n in range(2)]
    allocate = Job.allocate_pages

    def faulty(job: Any) -> None:
        allocate(job)
        if MARKER in job.lane.tokens:
            raise AssertionError("no such page")

    monkeypatch.setattr(Job, "allocate_pages", faulty)
    for r in good:
        engine.add(r)
    events: dict[str, list[Event]] = {name: [] for name in ("good0", "good1", "bad", "later")}
    for event in engine.step():
        events[event.id].append(event)
    engine.add(request("bad", marked(engine, in_prefill=True)))
    engine.add(request("later", words(engine, 30, start="Later. "), params=HARMLESS))
    while not all(of and isinstance(of[-1], Finished | Failed) for of in events.values()):
        for event in engine.step():
            events[event.id].append(event)
    assert isinstance(error_of(events["bad"]), InternalError) and len(events["bad"]) == 1
    assert [len(ids(events[name])) for name in ("good0", "good1", "later")] == [20, 20, 12]


def test_logits_that_are_no_numbers_fail_their_lane(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(engine, monkeypatch, MARKER, lambda: None)
    events = run(
        engine, request("good", words(engine, 30), params=HARMLESS), request("bad", marked(engine, in_prefill=False))
    )
    assert isinstance(error_of(events["bad"]), InternalError)
    assert len(ids(events["good"])) == 12


@pytest.mark.parametrize("in_prefill", [True, False])
def test_an_error_of_cuda_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, in_prefill: bool) -> None:
    """FB-046: the context is lost, so the process must go."""
    with started(folder) as engine:
        fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        fail_on(engine, monkeypatch, MARKER, lambda: fault)
        engine.add(request("bad", marked(engine, in_prefill=in_prefill)))
        with pytest.raises(EngineDied):
            for _ in range(3):
                engine.step()


def test_pages_that_a_failed_prefill_wrote_over_are_not_taken_for_what_they_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FB-143. exllamav2 0.3.2 gives a page back as what it was before, if no prefill of it came to its end."""
    with started(folder, cache_tokens=768) as small:
        prompt = words(small, 700)  # all pages of the cache
        text = ids(run(small, request("before", prompt))["before"])
        forward = small._loaded.model.forward_chunk

        def written_and_then_lost(*arguments: Any, **options: Any) -> Any:
            forward(*arguments, **options)
            raise out_of_memory()

        monkeypatch.setattr(small._loaded.model, "forward_chunk", written_and_then_lost, raising=False)
        bad = request("bad", words(small, 600, start="Another one. "), 0, prompt_logprobs=0)
        assert isinstance(error_of(run(small, bad)["bad"]), EngineOverloaded)
        monkeypatch.undo()
        assert ids(run(small, request("after", prompt))["after"]) == text


def test_an_error_of_cuda_that_is_told_late_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FB-046: the generator moves pages when its last job is taken out, and may be told there of what failed before."""

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with started(folder) as engine:
        fail_on(engine, monkeypatch, MARKER, a_bug)
        monkeypatch.setattr(engine._batch._generator, "defrag_cache", broken)
        engine.add(request("r", marked(engine, in_prefill=True)))
        with pytest.raises(EngineDied, match="illegal memory access"):
            engine.step()
        monkeypatch.undo()


def test_nobody_samples_any_more_when_all_begin_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator leaves its sampling threads alone when a step ends with an exception."""
    harness.install_or_skip()
    from workers.engines.exllamav2 import batch
    from workers.engines.exllamav2.job import Job

    monkeypatch.setattr(batch, "THREADED_VOCABULARY", 1)
    raised, anew = threading.Event(), threading.Event()
    sampled: list[str] = []
    at_restart: list[list[str]] = []
    receive_logits, receive_sample = Job.receive_logits, Job.receive_sample

    def slow(job: Any, logits: Any) -> Any:
        if job.lane.id != "r0" and not raised.is_set():
            raised.wait(10)
            anew.wait(0.5)  # longer, if nobody waits for this thread
        result = receive_logits(job, logits)
        sampled.append(job.lane.id)
        return result

    def fails_once(job: Any, *arguments: Any) -> Any:
        if not raised.is_set():
            raised.set()
            raise a_bug()
        return receive_sample(job, *arguments)

    monkeypatch.setattr(Job, "receive_logits", slow)
    monkeypatch.setattr(Job, "receive_sample", fails_once)
    with started(folder) as engine:
        begin_anew = engine._begin_anew

        def watched(*arguments: Any) -> None:
            at_restart.append(sorted(sampled))
            anew.set()
            begin_anew(*arguments)

        monkeypatch.setattr(engine, "_begin_anew", watched)
        requests = [request(f"r{n}", words(engine, 20, start=f"Number {n}. "), 6) for n in range(4)]
        events = run(engine, *requests)
        assert at_restart == [["r0", "r1", "r2", "r3"]]
        assert [len(ids(of)) for of in events.values()] == [6] * 4


def test_which_errors_are_fatal(folder: Path) -> None:
    import torch

    from workers.engines.exllamav2.faults import as_answer, is_fatal

    assert is_fatal(torch.AcceleratorError("device lost"))
    assert is_fatal(RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"))
    for no_memory in (
        torch.OutOfMemoryError("CUDA out of memory. CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:130] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
        ),
        MemoryError(),
    ):
        assert not is_fatal(no_memory) and isinstance(as_answer(no_memory), EngineOverloaded)
    assert not is_fatal(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_fatal(ValueError("CUDA error"))


# Adapters


def test_an_adapter_changes_text_and_its_absence_does_not_break(folder: Path, engine: Any, tmp_path: Path) -> None:
    """exllamav2 0.3.2: after set_loras([]) or set_loras(None), every step raises IndexError."""
    from tests.exllamav2.models import write_lora
    from workers.engines.exllamav2.options import LoraOption

    prompt = words(engine, 40)
    plain = ids(run(engine, request("r", prompt))["r"])
    with started(folder, loras=(LoraOption(write_lora(tmp_path / "lora")),)) as adapted:
        assert ids(run(adapted, request("r", prompt))["r"]) != plain
        assert adapted.card.fingerprint != engine.card.fingerprint
    moved = shutil.copytree(tmp_path / "lora", tmp_path / "elsewhere" / "lora")
    with started(folder, loras=(LoraOption(moved),)) as again:
        assert again.card.fingerprint == adapted.card.fingerprint
    write_lora(moved, seed=9)
    with started(folder, loras=(LoraOption(moved),)) as other:
        assert other.card.fingerprint != adapted.card.fingerprint
    with started(folder, rope_scale=2.0) as stretched:
        assert stretched.card.fingerprint != engine.card.fingerprint
        assert adapted.card.loras == ("lora",) and engine.card.loras == ()


# What looks like the beginning of a text: exllamav2 0.3.2 copies keys from any page that is said to have none before it.


def scores_of_a_beginning(engine: Any, beginning: Sequence[int]) -> list[tuple[float, float]]:
    """Logprobs of what follows `beginning`: as it is with whatever is in the cache, and with nothing in it."""
    found = []
    for empty in (False, True):
        if empty:
            engine._batch.reset()
        last = run(engine, request("r", [*beginning, 5], 3, logprobs=0))["r"]
        found.append([event.logprob[0] for event in last if isinstance(event, Token) and event.logprob])
    return list(zip(*found, strict=True))


def test_a_page_behind_a_cached_prompt_is_no_beginning(engine: Any) -> None:
    """A prompt of whole pages and one token, seen before: its next page was left without a predecessor."""
    prompt = words(engine, 2 * PAGE + 1, start="Whole pages. ")
    run(engine, request("a", prompt, 8))
    said = ids(run(engine, request("b", prompt, 8))["b"])
    for warm, cold in scores_of_a_beginning(engine, [prompt[-1], *said[:-1]]):
        assert warm == pytest.approx(cold, abs=2e-2)


def test_a_page_of_drafts_is_no_beginning(folder: Path, tmp_path: Path) -> None:
    """What was drafted behind the end of a text stays in its pages, and beyond a page's edge it had no predecessor."""
    from tests.exllamav2.models import write_tiny_llama

    with started(folder, draft_model=write_tiny_llama(tmp_path / "draft"), draft_tokens=20) as engine:
        prompt = words(engine, PAGE - 8, start="Drafts. ")
        whole = ids(run(engine, request("a", prompt, 40))["a"])
        engine._batch.reset()
        run(engine, request("b", prompt, 7))
        for warm, cold in scores_of_a_beginning(engine, [*prompt, *whole][PAGE : PAGE + 8]):
            assert warm == pytest.approx(cold, abs=2e-2)


def test_a_page_given_back_unused_is_no_beginning(folder: Path) -> None:
    """Its old content had been computed again elsewhere in the meantime, so it got no name, and no predecessor."""
    with started(folder, cache_tokens=13 * PAGE, ngram_draft=True, draft_tokens=20) as engine:
        third = words(engine, 3 * PAGE + 10, start="Three pages. ")
        for name, prompt in (("five", words(engine, 4 * PAGE + 10)), ("a", third), ("d", [*third[::-1]])):
            run(engine, request(name, prompt, 1))  # oldest pages first: five, four, and four that are left alone
        engine.add(request("long", words(engine, 7 * PAGE - 10, start="Long. "), 1))  # and two pages more, for drafts
        engine.step()
        pages = engine._running[0].job.sequences[0].allocated_pages
        assert pages[-1].can_revert and pages[-1].kv_position_revert == PAGE, (
            "it holds the third of those pages, unused"
        )
        run(engine, request("again", third, 1))
        engine.cancel("long")
        for warm, cold in scores_of_a_beginning(engine, third[2 * PAGE : 2 * PAGE + 20]):
            assert warm == pytest.approx(cold, abs=2e-2)
