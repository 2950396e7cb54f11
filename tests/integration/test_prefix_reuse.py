"""Prompts that begin alike: computed once, remembered for a while, never at anybody's cost.

Most of it runs on a tiny random model, whose logprobs show every wrong cell as well as a real one's would. Reused
memory was computed in a batch of another size, so its numbers differ in the last digits: texts are compared by their
logprobs, and equal ids are asked for only as far as the model is sure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from shared.sampling import SamplingParams
from tests.integration.test_llamacpp_engine import (
    ENDLESS,
    GREEDY,
    Heard,
    ask,
    forget_finished,
    prompt_logprobs,
    run,
    spy_on_batches,
)
from tests.integration.test_llamacpp_engine import started as started_real
from tests.tiny_model import write_tiny_model
from workers.engines.base import EngineRequest, Failed, Started, Token
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.options import LlamaCppOptions
from workers.engines.llamacpp.prefixes import WORTH

#: Some hundred tokens, and then questions about them.
STORY = "Anna lives in Paris with her brother Tom, a baker. Every morning they walk along the river to the market. " * 4
QUESTIONS = ("The name of Anna's brother is", "The city in which they live is", "What they do every morning is")
#: Largest difference of a logprob that other batches make, with float weights and with 8-bit ones.
NOISE, NOISE_Q8 = 0.02, 0.5

Start = Callable[..., LlamaCppEngine]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines with the tiny model."""
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", add_bos=False)
    engines: list[LlamaCppEngine] = []

    def start(**options: int) -> LlamaCppEngine:
        engine = LlamaCppEngine(LlamaCppOptions(path, "tiny", cache_dir=path.parent, threads=1, **options))  # type: ignore[arg-type]
        engine.load(lambda part, word: None)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(started: Start) -> LlamaCppEngine:
    return started(lanes=8, context_cells=2048)


@pytest.fixture(scope="module")
def small(started: Start) -> LlamaCppEngine:
    return started(lanes=4, context_cells=300, batch_tokens=64, prefill_chunk=16)


@pytest.fixture(autouse=True)
def with_nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests begin with an empty memory; afterwards it is empty again once the finished sequences are given up."""
    yield
    for name in {"engine", "small"} & set(request.fixturenames):
        engine = request.getfixturevalue(name)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.cells_used) == (0, 0, 0)
        assert engine._cells.used <= engine._cells.total
        forget_finished(engine)
        assert engine._cells.used == 0
        assert sorted(engine._free_sequences) == list(range(engine._options.lanes + engine._spare))


def cached(heard: Heard, request_id: str) -> int:
    return next(event.cached for event in heard.by_id[request_id] if isinstance(event, Started))


def sampled(heard: Heard, request_id: str) -> list[Token]:
    return [event for event in heard.by_id[request_id] if isinstance(event, Token)]


def same_text(one: list[Token], other: list[Token], noise: float = NOISE) -> bool:
    """The same tokens with the same logprobs, up to noise; from where two tokens are as likely, texts may part."""
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine.logprob is not None and theirs.logprob is not None
        mine_best, theirs_best = dict(mine.logprob[1]), dict(theirs.logprob[1])
        for token in mine_best.keys() & theirs_best.keys():
            if abs(mine_best[token] - theirs_best[token]) > noise and max(mine_best[token], theirs_best[token]) > -5:
                return False
        if mine.token != theirs.token:
            return abs(mine_best[mine.token] - mine_best.get(theirs.token, -99.0)) < noise
    return True


def check_a_prompt_is_computed_once(engine: LlamaCppEngine, text: str, noise: float) -> None:
    request = ask(engine, "a", text, 12, ENDLESS, logprobs=3)
    forget_finished(engine)
    alone = run(engine, request)
    assert cached(alone, "a") == 0
    with pytest.MonkeyPatch.context() as patch:
        batches = spy_on_batches(engine, patch)
        again = run(engine, request)
    assert cached(again, "a") == len(request.prompt) - 1
    assert batches == [1] * 12, "only the last token of the prompt, and the text"
    assert same_text(sampled(alone, "a"), sampled(again, "a"), noise)


def test_a_prompt_is_computed_once(engine: LlamaCppEngine) -> None:
    for question in QUESTIONS:
        check_a_prompt_is_computed_once(engine, STORY + question, NOISE)


def test_a_prompt_is_computed_once_by_a_real_model() -> None:
    engine = started_real(lanes=2, context_cells=512)
    try:
        check_a_prompt_is_computed_once(engine, STORY + QUESTIONS[0], NOISE_Q8)
    finally:
        engine.close()


def test_what_prompts_have_in_common_is_computed_once(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(engine, str(n), STORY + question, 8, ENDLESS, logprobs=3) for n, question in enumerate(QUESTIONS)]
    alone = []
    for request in requests:
        forget_finished(engine)
        alone.append(sampled(run(engine, request), request.id))
    forget_finished(engine)
    batches = spy_on_batches(engine, monkeypatch)
    heard = run(engine, *requests)
    story = len(engine.tokenize(STORY))
    assert cached(heard, "0") == 0 and cached(heard, "1") >= story - 1 and cached(heard, "2") >= story - 1
    assert sum(batches) < 1.3 * story
    for request, before in zip(requests, alone, strict=True):
        heard.proper(request.id)
        assert same_text(before, sampled(heard, request.id))


def test_eight_choices_of_one_prompt_need_its_memory_once(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 x 600 tokens into 2048 cells."""
    prompt = (engine.tokenize(STORY) * 3)[:600]
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    requests = [EngineRequest(str(n), prompt, 20, 1, params, choice=n) for n in range(8)]
    batches = spy_on_batches(engine, monkeypatch)
    heard, most = Heard(), 0
    for request in requests:
        engine.add(request)
    while (stats := engine.stats()).running + stats.waiting:
        heard.take(engine.step())
        most = max(most, engine.stats().cells_used)
    assert most <= 600 + 8 * 21
    assert sum(batches) == 600 + 7 + 8 * 19
    assert [cached(heard, str(n)) for n in range(8)] == [0] + [599] * 7
    assert len({tuple(heard.tokens(str(n))) for n in range(8)}) == 8
    assert len({heard.tokens(str(n))[0] for n in range(8)}) > 1


def test_others_pass_those_who_wait_for_a_prefill(engine: LlamaCppEngine) -> None:
    prompt = (engine.tokenize(STORY) * 5)[:1200]
    heard = Heard()
    for name in ("first", "sibling"):
        engine.add(EngineRequest(name, prompt, 4, 1, GREEDY))
    engine.add(ask(engine, "other", "The capital of France is", 1))
    heard.take(engine.step())
    assert heard.ended("other") and not heard.by_id["sibling"]
    run(engine, heard=heard)
    assert cached(heard, "sibling") == 1199
    for name in ("first", "sibling", "other"):
        heard.proper(name)


def test_those_who_pass_leave_a_lane(engine: LlamaCppEngine) -> None:
    prompt = (engine.tokenize(STORY) * 5)[:1000]
    heard = Heard()
    for name in ("first", "sibling"):
        engine.add(EngineRequest(name, prompt, 30, 1, ENDLESS))
    for number in range(8):
        engine.add(EngineRequest(str(number), [100 + number] * 20, 60, 1, ENDLESS))
    heard.take(engine.step())
    while not heard.by_id["sibling"]:
        assert engine.stats().running <= 7
        heard.take(engine.step())
    assert not heard.ended("0") and engine.stats().running == 8
    run(engine, heard=heard)


def test_when_the_first_goes_away_the_next_one_computes(engine: LlamaCppEngine) -> None:
    prompt = (engine.tokenize(STORY) * 5)[:1200]
    requests = [EngineRequest(str(n), prompt, 6, 1, ENDLESS, logprobs=2) for n in range(3)]
    heard = Heard()
    for request in requests:
        engine.add(request)
    heard.take(engine.step())
    engine.cancel("0")
    run(engine, heard=heard)
    assert 0 < cached(heard, "1") < 1199, "what the first had computed is of use"
    assert cached(heard, "2") == 1199
    forget_finished(engine)
    alone = run(engine, requests[1])
    for name in ("1", "2"):
        heard.proper(name)
        assert same_text(sampled(alone, "1"), sampled(heard, name))


def test_a_conversation_goes_on_behind_its_own_text(engine: LlamaCppEngine) -> None:
    prompt = engine.tokenize(STORY + QUESTIONS[0])
    answer = run(engine, EngineRequest("a", prompt, 10, 1, ENDLESS)).tokens("a")
    longer = [*prompt, *answer, *engine.tokenize(" And the name of the river is", add_special=False)]
    heard = run(engine, EngineRequest("b", longer, 4, 1, GREEDY))
    assert cached(heard, "b") == len(prompt) + 9, "all but the last sampled token was in memory"
    resumed = run(engine, EngineRequest("c", prompt, 14, 1, ENDLESS, generated=answer))
    assert cached(resumed, "c") == len(prompt), "of a resumed one, the prompt counts"


def test_scored_prompts_are_computed_whole(engine: LlamaCppEngine) -> None:
    request = ask(engine, "a", STORY[:400], 2, GREEDY)
    run(engine, request)
    scored = [EngineRequest(name, request.prompt, 2, 1, GREEDY, prompt_logprobs=1) for name in ("b", "c")]
    heard = run(engine, *scored)
    for name in ("b", "c"):
        assert cached(heard, name) == 0
        lps = prompt_logprobs(heard, name)
        assert len(lps) == len(request.prompt) and None not in lps[1:]
    assert cached(run(engine, request), "a") == len(request.prompt) - 1


def test_short_beginnings_are_not_shared(engine: LlamaCppEngine) -> None:
    heard = run(engine, *(EngineRequest(str(n), [7] * (WORTH - 1) + [100 + n] * 9, 2, 1) for n in range(3)))
    assert [cached(heard, str(n)) for n in range(3)] == [0, 0, 0]
    heard = run(engine, *(EngineRequest(str(n), [7] * WORTH + [100 + n] * 9, 2, 1) for n in range(3)))
    assert [cached(heard, str(n)) for n in range(3)] == [0, WORTH, WORTH]


def spy_on_codes(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    decode = engine._context.decode

    def spy(threads: int) -> int:
        codes.append(decode(threads))
        return codes[-1]

    monkeypatch.setattr(engine._context, "decode", spy)
    return codes


def test_what_is_kept_gives_way_before_any_lane(small: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = spy_on_codes(small, monkeypatch)
    for n in range(6):
        run(small, EngineRequest(str(n), [100 + n] * 70, 2, 1, ENDLESS))
    assert small._cells.used > 0 and len(small._finished) > 0
    aside = []
    monkeypatch.setattr(small, "_set_youngest_aside", lambda: aside.append(1))
    requests = [EngineRequest(str(n), [50 + n] * 20, 55, 1, ENDLESS) for n in range(4)]
    heard = run(small, *requests)
    assert not aside and set(codes) == {0} and all(len(heard.tokens(str(n))) == 55 for n in range(4))
    whole = run(small, EngineRequest("a", [9] * 40, 260, 1, ENDLESS))
    assert len(whole.tokens("a")) == 260 and set(codes) == {0}


def test_our_account_of_shared_cells_is_llama_cpps(small: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that share beginnings in all ways fill the pool to the last cell, and llama.cpp always has room."""
    codes = spy_on_codes(small, monkeypatch)
    chance = random.Random(3)
    full = 0
    for round_ in range(6):
        heard = Heard()
        names = [f"{round_}-{n}" for n in range(8)]
        for name in names:
            cut = chance.randrange(20, 150)
            prompt = ([11] * 40 + [12] * 60 + [13] * 60)[:cut] + [chance.randrange(100, 200)] * chance.randrange(1, 9)
            small.add(EngineRequest(name, prompt, chance.randrange(20, 120), 1, ENDLESS))
        while (stats := small.stats()).running + stats.waiting:
            heard.take(small.step())
            full += small._cells.free <= 1
            if chance.random() < 0.05:
                gone = chance.choice(names)
                small.cancel(gone)
    assert set(codes) == {0} and full > 0


def test_after_an_error_in_a_step_nothing_is_kept(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(engine, "a", STORY, 5, ENDLESS)
    run(engine, request)
    engine.add(ask(engine, "b", STORY, 5, ENDLESS))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_advance", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.cancel("b")
    assert len(engine._finished) == 0 and engine._cells.used == 0
    assert cached(run(engine, request), "a") == 0


def test_odd_requests_never_spoil_what_others_reuse(engine: LlamaCppEngine) -> None:
    """Fifty requests of all kinds, most of them beginning like the reference, some cancelled, some failing."""
    reference = ask(engine, "reference", STORY + QUESTIONS[0], 12, ENDLESS, logprobs=3)
    before = sampled(run(engine, reference), "reference")
    chance, heard = random.Random(7), Heard()
    for n in range(50):
        prompt = list(reference.prompt[: chance.randrange(1, len(reference.prompt) + 1)])
        if chance.random() < 0.3:
            prompt += [chance.randrange(5, 250) for _ in range(chance.randrange(1, 40))]
        name, params = f"f{n}", SamplingParams(temperature=chance.choice((0.0, 1.5)), ignore_eos=chance.random() < 0.5)
        engine.add(
            EngineRequest(
                name,
                prompt,
                chance.randrange(0, 12) if chance.random() < 0.9 else 300,
                n,
                params,
                choice=chance.randrange(3),
                generated=[chance.randrange(5, 99)] * chance.choice((0, 0, 3)),
                logprobs=chance.choice((None, 2)),
                prompt_logprobs=chance.choice((None, None, None, 0)),
            )
        )
        for _ in range(chance.randrange(3)):
            heard.take(engine.step())
        if chance.random() < 0.3 or n % 10 == 9:
            engine.cancel(f"f{chance.randrange(n + 1)}")
        if n == 25 and engine._waiting:  # past our own check, an id that llama.cpp refuses
            engine._waiting[-1].tokens[-1] = -1
    for n in range(50):
        if len(heard.tokens(f"f{n}")) > 30:
            engine.cancel(f"f{n}")
    run(engine, heard=heard)
    after = run(engine, reference)
    assert cached(after, "reference") > len(reference.prompt) // 2
    assert same_text(before, sampled(after, "reference"))
    forget_finished(engine)
    assert [t.token for t in sampled(run(engine, reference), "reference")] == [t.token for t in before]
    assert sum(isinstance(events[-1], Failed) for events in heard.by_id.values() if events) <= 5


def test_no_reuse_where_it_is_switched_off(started: Start) -> None:
    engine = started(lanes=2, context_cells=600, prefix_cache=0)
    requests = [EngineRequest(str(n), [7] * 60, 2, 1) for n in range(2)]
    heard = run(engine, *requests)
    assert [cached(heard, str(n)) for n in range(2)] == [0, 0] and engine._cells.used == 0
