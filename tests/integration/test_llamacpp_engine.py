"""The llama.cpp engine with a real model: lanes that come and go, cells that run out, and what callers see of it.

Text of a batch may differ from text alone in late tokens (float sums in another order), so exact comparisons run
alone, and batched greedy text is only held to what any order of sums gives.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import ContextLengthExceeded, EngineOverloaded, InternalError, InvalidRequest
from shared.sampling import SamplingParams
from shared.settings import Settings
from workers.engines.base import (
    EngineDied,
    EngineRequest,
    Event,
    Failed,
    Finished,
    Logprob,
    PromptLogprobs,
    Started,
    Token,
)
from workers.engines.llamacpp.binding import LoadError
from workers.engines.llamacpp.carried import find_carried_model
from workers.engines.llamacpp.context import SCORED_ROWS
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.options import LlamaCppOptions

GREEDY = SamplingParams(temperature=0)
#: Goes on as long as it is allowed to.
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def model_file() -> Path:
    named = os.environ.get("SLUICE_TEST_MODEL")
    path = Path(named) if named else find_carried_model(Settings().cache_dir)
    if path is None:
        pytest.skip("no model: neither the carried one in the cache nor SLUICE_TEST_MODEL")
    return path


def started(**options: object) -> LlamaCppEngine:
    engine = LlamaCppEngine(
        LlamaCppOptions(model=model_file(), model_id="m", cache_dir=Settings().cache_dir, threads=1, **options)  # type: ignore[arg-type]
    )
    engine.card = engine.load(lambda part, word: None)  # type: ignore[attr-defined]
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaCppEngine]:
    engine = started(lanes=16, context_cells=8192)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small() -> Iterator[LlamaCppEngine]:
    """A pool of 300 cells, small batches."""
    engine = started(lanes=4, context_cells=300, batch_tokens=64, prefill_chunk=16)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test an engine holds no lane and no cell, but those of finished sequences, which can be given up."""
    yield
    for name in ("engine", "small"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.cells_used) == (0, 0, 0)
            forget_finished(engine)
            assert engine._cells.used == 0
            assert sorted(engine._free_sequences) == list(range(engine._options.lanes + engine._spare))


def forget_finished(engine: LlamaCppEngine) -> None:
    while engine._evict():
        pass


class Heard:
    """All events, kept by request."""

    def __init__(self) -> None:
        self.by_id: dict[str, list[Event]] = defaultdict(list)

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.by_id[event.id].append(event)

    def tokens(self, request_id: str) -> list[int]:
        return [event.token for event in self.by_id[request_id] if isinstance(event, Token)]

    def text(self, request_id: str) -> bytes:
        return b"".join(e.piece for e in self.by_id[request_id] if isinstance(e, Token) and not e.end)

    def ended(self, request_id: str) -> bool:
        return bool(self.by_id[request_id]) and isinstance(self.by_id[request_id][-1], Finished | Failed)

    def proper(self, request_id: str) -> None:
        """One Started first, one end last, and in between nothing of either."""
        events = self.by_id[request_id]
        assert isinstance(events[0], Started) and self.ended(request_id)
        assert sum(isinstance(event, Started | Finished | Failed) for event in events) == 2


def run(engine: LlamaCppEngine, *requests: EngineRequest, heard: Heard | None = None) -> Heard:
    """Adds `requests` and steps until nobody is left."""
    heard = heard or Heard()
    for request in requests:
        engine.add(request)
    while (stats := engine.stats()).running + stats.waiting:
        heard.take(engine.step())
    return heard


def ask(
    engine: LlamaCppEngine,
    request_id: str,
    text: str,
    max_new: int,
    params: SamplingParams = GREEDY,
    **more: object,
) -> EngineRequest:
    return EngineRequest(request_id, engine.tokenize(text), max_new, 1, params, **more)  # type: ignore[arg-type]


FRANCE = "The capital of France is"


def test_it_knows_the_capital_of_france(engine: LlamaCppEngine) -> None:
    heard = run(engine, ask(engine, "a", FRANCE, 12))
    heard.proper("a")
    assert b"Paris" in heard.text("a")
    assert heard.by_id["a"][-1] == Finished("a", "length")
    assert len(heard.tokens("a")) == 12
    # The logits' tail must not tire: alone and again, greedy is the same.
    assert run(engine, ask(engine, "b", FRANCE, 12)).tokens("b") == heard.tokens("a")


def test_the_card(engine: LlamaCppEngine) -> None:
    card = engine.card  # type: ignore[attr-defined]
    assert (card.id, card.engine, card.lanes, card.context) == ("m", "llamacpp", 16, 8192)
    assert card.vocab_size == len(engine._model.pieces)
    assert card.end_ids and all(0 <= token < card.vocab_size for token in card.end_ids)
    assert card.fingerprint.startswith("fp_") and card.created > 0
    assert "message" in (card.chat_template or "message")
    for token in card.control_ids:
        assert engine.tokenize(engine.detokenize([token]).decode(), add_special=False) == [token]
    assert card.refuses("dry_multiplier") and card.refuses("banned_strings") and not card.refuses("temperature")


def test_text_goes_through_tokens_and_back(engine: LlamaCppEngine) -> None:
    for text in ("plain", "a\x00b", "Grüße 🌍 \n\t 漢字", "  two  spaces  ", "x" * 5000, ""):
        assert engine.detokenize(engine.tokenize(text, add_special=False)) == text.encode()
    end = engine.card.end_ids[-1]  # type: ignore[attr-defined]
    shown = engine.detokenize([end]).decode()
    assert engine.tokenize(shown, add_special=False) == [end]
    assert len(engine.tokenize(shown, add_special=False, parse_special=False)) > 1
    with pytest.raises(InvalidRequest):
        engine.detokenize([engine.card.vocab_size])  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest):
        engine.tokenize("\ud800")


def test_a_bos_is_added_once(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bos = engine._model.bos_id
    if bos is None:
        pytest.skip("this model has no BOS")
    monkeypatch.setattr(engine._model, "add_bos", True)
    plain = engine.tokenize("hello", add_special=False)
    assert engine.tokenize("hello") == [bos, *plain]
    assert engine.tokenize(engine.detokenize([bos]).decode() + "hello") == [bos, *plain]


def test_tokenising_in_other_threads_while_it_steps(engine: LlamaCppEngine) -> None:
    texts = [f"Thread {n} says: naïve café 漢字 {n * 7919}! " * 20 for n in range(4)]
    expected = [engine.tokenize(text) for text in texts]
    wrong: list[int] = []
    stop = threading.Event()

    def tokenise(number: int) -> None:
        while not stop.is_set():
            if engine.tokenize(texts[number]) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=tokenise, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    run(engine, ask(engine, "a", FRANCE, 10, ENDLESS))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_requests_join_and_leave_while_others_run(engine: LlamaCppEngine) -> None:
    heard = Heard()
    engine.add(ask(engine, "long", "Once upon a time", 40, ENDLESS))
    for _ in range(5):
        heard.take(engine.step())
    engine.add(ask(engine, "short", FRANCE, 5))
    while not heard.ended("short"):
        heard.take(engine.step())
    assert not heard.ended("long") and len(heard.tokens("long")) >= 10
    run(engine, heard=heard)
    heard.proper("long")
    heard.proper("short")
    assert len(heard.tokens("long")) == 40 and b"Paris" in heard.text("short")


def test_a_long_prefill_does_not_stall_generating_lanes(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy_on_batches(engine, monkeypatch)
    heard = run(engine, ask(engine, "gen", "Once upon a time", 1, ENDLESS))
    engine.add(ask(engine, "gen", "Once upon a time", 30, ENDLESS))
    heard = Heard()
    heard.take(engine.step())
    engine.add(ask(engine, "prompt", "word " * 600, 2, ENDLESS))
    batches.clear()
    before = len(heard.tokens("gen"))
    while not heard.tokens("prompt"):
        heard.take(engine.step())
        before += 1
        assert len(heard.tokens("gen")) == before, "a token in every step"
    assert len(batches) >= 4 and max(batches) <= 128 + 1
    run(engine, heard=heard)


def test_a_short_prompt_passes_a_long_one(engine: LlamaCppEngine) -> None:
    heard = Heard()
    engine.add(ask(engine, "long", "word " * 700, 1))
    engine.add(ask(engine, "short", FRANCE, 1))
    while not heard.tokens("short"):
        heard.take(engine.step())
    assert not heard.tokens("long")
    run(engine, heard=heard)


def test_sixteen_requests_without_max_tokens_run_at_once(engine: LlamaCppEngine) -> None:
    """Each may use nearly the whole pool; taking prompt + max_tokens up front would run them one by one."""
    heard = Heard()
    for number in range(16):
        prompt = engine.tokenize(f"Story number {number}:")
        engine.add(EngineRequest(str(number), prompt, 8192 - len(prompt), number, SamplingParams(ignore_eos=True)))
    for _ in range(4):
        heard.take(engine.step())
    assert engine.stats().running == 16
    assert all(len(heard.tokens(str(number))) >= 3 for number in range(16))
    for number in range(16):
        engine.cancel(str(number))


def test_cancel_frees_lane_and_cells_at_once(engine: LlamaCppEngine) -> None:
    heard = Heard()
    engine.add(ask(engine, "a", "Once upon a time", 500, ENDLESS))
    engine.add(ask(engine, "b", FRANCE, 8))
    for _ in range(3):
        heard.take(engine.step())
    engine.cancel("a")
    engine.cancel("nobody")
    assert engine.stats().running == 1
    seen = len(heard.by_id["a"])
    run(engine, heard=heard)
    assert len(heard.by_id["a"]) == seen and b"Paris" in heard.text("b")
    engine.add(ask(engine, "waiting", FRANCE, 8))
    engine.cancel("waiting")
    assert engine.step() == []


def test_going_on_from_generated_ids(engine: LlamaCppEngine) -> None:
    prompt = engine.tokenize("My favourite fruits are")
    penalised = SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={30: -5.0})
    for params in (penalised, SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.5)):
        whole = run(engine, EngineRequest("a", prompt, 24, 7, params)).tokens("a")
        for cut in (1, 10, len(whole) - 1):
            heard = run(engine, EngineRequest("b", prompt, 24, 7, params, generated=whole[:cut]))
            heard.proper("b")
            assert heard.tokens("b") == whole[cut:], "only new tokens, and the same"


def test_nothing_left_to_do_ends_without_computing(engine: LlamaCppEngine) -> None:
    prompt = engine.tokenize(FRANCE)
    end = engine.card.end_ids[-1]  # type: ignore[attr-defined]
    assert run(engine, EngineRequest("a", prompt, 0, 1)).by_id["a"] == [Started("a"), Finished("a", "length")]
    full = run(engine, EngineRequest("a", prompt, 2, 1, generated=[5, 6]))
    assert full.by_id["a"] == [Started("a"), Finished("a", "length")]
    over = run(engine, EngineRequest("a", prompt, 9, 1, generated=[5, end]))
    assert over.by_id["a"] == [Started("a"), Finished("a", "stop")]


def test_seeds_and_choices(engine: LlamaCppEngine) -> None:
    prompt = engine.tokenize("Once upon a time")

    def texts(seed: int, choice: int) -> list[int]:
        request = EngineRequest("a", prompt, 8, seed, SamplingParams(temperature=1.5), choice=choice)
        return run(engine, request).tokens("a")

    assert texts(1, 0) == texts(1, 0)
    assert len({tuple(texts(s, c)) for s, c in [(1, 0), (1, 1), (2, 0)]}) == 3


def test_stop_tokens_and_end_tokens(engine: LlamaCppEngine) -> None:
    paris = engine.tokenize(" Paris", add_special=False)[0]
    heard = run(engine, ask(engine, "a", FRANCE, 20, SamplingParams(temperature=0, stop_token_ids=(paris,))))
    assert heard.by_id["a"][-1] == Finished("a", "stop", paris)
    assert heard.tokens("a")[-1] == paris
    held = SamplingParams(temperature=0, stop_token_ids=(paris,), min_tokens=3)
    assert paris not in run(engine, ask(engine, "a", FRANCE, 3, held)).tokens("a")
    end = engine.card.end_ids[-1]  # type: ignore[attr-defined]
    forced = run(engine, ask(engine, "a", FRANCE, 5, SamplingParams(temperature=0, logit_bias={end: 100.0})))
    last = forced.by_id["a"][-2]
    assert isinstance(last, Token) and last.end and last.token == end
    assert forced.by_id["a"][-1] == Finished("a", "stop")
    ignored = SamplingParams(temperature=0, logit_bias={end: 100.0}, ignore_eos=True)
    assert len(run(engine, ask(engine, "a", FRANCE, 5, ignored)).tokens("a")) == 5


def test_logprobs_of_prompt_and_tokens(engine: LlamaCppEngine) -> None:
    """What is generated greedily scores the same to the last bit when it is a prompt."""
    prompt = engine.tokenize(FRANCE)
    first = run(engine, EngineRequest("a", prompt, 150, 1, ENDLESS, logprobs=3))
    tokens = [event for event in first.by_id["a"] if isinstance(event, Token)]
    for token in tokens:
        assert token.logprob is not None
        own, best = token.logprob
        assert len(best) >= 3 and (token.token, own) in best
        first_allowed = next(i for i, _ in best if i not in engine.card.end_ids)  # type: ignore[attr-defined]
        assert token.token == first_allowed, "greedy samples the best that is not banned"
    whole = [*prompt, *(token.token for token in tokens)]
    assert len(whole) > 2 * SCORED_ROWS
    scored = run(engine, EngineRequest("b", whole, 0, 1, prompt_logprobs=1))
    scored.proper("b")
    assert not scored.tokens("b")
    lps = prompt_logprobs(scored, "b")
    assert lps[0] is None and len(lps) == len(whole)
    for token, lp in zip(tokens, lps[len(prompt) :], strict=True):
        assert lp is not None and token.logprob is not None
        assert dict(lp[1])[token.token] == lp[0] == token.logprob[0]
    alone = run(engine, EngineRequest("c", whole[:1], 2, 1, GREEDY, prompt_logprobs=0))
    assert prompt_logprobs(alone, "c") == [None] and len(alone.tokens("c")) == 2


def prompt_logprobs(heard: Heard, request_id: str) -> list[Logprob | None]:
    """All of them, without holes or repetitions."""
    lps: list[Logprob | None] = []
    for event in heard.by_id[request_id]:
        if isinstance(event, PromptLogprobs):
            assert event.start == len(lps)
            lps += event.logprobs
    return lps


def spy_on_batches(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all batches that go to llama.cpp."""
    sizes: list[int] = []
    decode = engine._context.decode

    def spy(threads: int) -> int:
        sizes.append(engine._context.length)
        return decode(threads)

    monkeypatch.setattr(engine._context, "decode", spy)
    return sizes


def test_batches_stay_within_what_llama_cpp_takes(small: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_batches(small, monkeypatch)
    run(small, *(ask(small, str(n), "word " * 60, 6, ENDLESS, prompt_logprobs=0) for n in range(6)))
    assert 0 < max(sizes) <= small._context.batch_limit == 64
    with pytest.raises(OverflowError):
        small._context.clear_batch()
        small._context.append(0, [1] * 65, 0, 0)


def test_when_cells_run_out_the_youngest_waits_and_all_finish(small: LlamaCppEngine) -> None:
    """Four lanes that want 4 x 120 of 300 cells."""
    requests = [ask(small, str(n), f"{FRANCE} Paris. The number {n} is", 110, ENDLESS) for n in range(4)]
    heard = Heard()
    for request in requests:
        small.add(request)
    aside = False
    order: list[str] = []
    while (stats := small.stats()).running + stats.waiting:
        assert stats.cells_used <= stats.cells
        heard.take(small.step())
        aside = aside or (small.stats().waiting > 0 and len(heard.by_id) == 4)
        order += [request_id for request_id in heard.by_id if heard.ended(request_id) and request_id not in order]
        if len(order) < 4 and small._running:
            assert small._running[0].id == min(set("0123") - set(order)), "the oldest goes on"
    assert aside and order[0] == "0"
    for request in requests:
        heard.proper(request.id)
        assert len(heard.tokens(request.id)) == 110
        # Alone it begins alike; a batch may differ in late tokens only.
        alone = run(small, replace(request, max_new=8)).tokens(request.id)
        assert heard.tokens(request.id)[:8] == alone


def test_scoring_goes_on_where_it_was_when_a_lane_is_set_aside(small: LlamaCppEngine) -> None:
    heard = Heard()
    small.add(ask(small, "old", FRANCE, 200, ENDLESS))
    heard.take(small.step())
    small.add(ask(small, "young", "word " * 90, 40, ENDLESS, prompt_logprobs=0))
    for _ in range(3):
        heard.take(small.step())
    assert small._set_youngest_aside().id == "young"
    run(small, heard=heard)
    heard.proper("young")
    assert len(prompt_logprobs(heard, "young")) == len(small.tokenize("word " * 90))
    assert len(heard.tokens("young")) == 40


def test_one_request_may_use_the_whole_pool_and_no_more(small: LlamaCppEngine) -> None:
    prompt = small.tokenize("word " * 200)
    heard = run(small, EngineRequest("a", prompt, 300 - len(prompt), 1, ENDLESS))
    assert len(heard.tokens("a")) == 300 - len(prompt)
    with pytest.raises(ContextLengthExceeded, match="300"):
        small.add(EngineRequest("b", prompt, 301 - len(prompt), 1, ENDLESS))


def test_llama_cpp_out_of_cells_is_handled_like_our_own_count(
    small: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer 1 of llama_decode, made real by an account that counts more cells than there are."""
    monkeypatch.setattr(small._cells, "total", 2000)
    requests = [ask(small, str(n), "word " * 100, 60, ENDLESS) for n in range(4)]
    heard = run(small, *requests)
    for request in requests:
        heard.proper(request.id)
        assert len(heard.tokens(request.id)) == 60
    engine_alone = small._context.decode
    monkeypatch.setattr(small._context, "decode", lambda threads: 1)
    heard = run(small, ask(small, "a", FRANCE, 2))
    assert isinstance(failed := heard.by_id["a"][-1], Failed) and isinstance(failed.error, EngineOverloaded)
    monkeypatch.setattr(small._context, "decode", engine_alone)


def test_a_refused_batch_fails_its_new_requests_only(small: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    small.add(ask(small, "old", FRANCE, 12))
    heard.take(small.step())
    small.add(ask(small, "new", FRANCE, 12))
    # Past our own check, an id that llama.cpp itself refuses with -1.
    small._waiting[0].tokens[1] = -1
    run(small, heard=heard)
    assert isinstance(failed := heard.by_id["new"][-1], Failed) and isinstance(failed.error, InternalError)
    assert b"Paris" in heard.text("old") and len(heard.tokens("old")) == 12


def test_any_other_answer_is_the_end_of_the_engine(small: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    small.add(ask(small, "a", FRANCE, 12))
    monkeypatch.setattr(small._context, "decode", lambda threads: -3)
    with pytest.raises(EngineDied):
        small.step()
    small.cancel("a")


def test_what_can_never_run_is_refused_at_once(small: LlamaCppEngine) -> None:
    vocab = small.card.vocab_size  # type: ignore[attr-defined]
    for bad in (
        EngineRequest("a", [], 5, 1),
        EngineRequest("a", [vocab], 5, 1),
        EngineRequest("a", [-1], 5, 1),
        EngineRequest("a", [5], 5, 1, generated=[vocab]),
        EngineRequest("a", [5] * 301, 1, 1),
        EngineRequest("a", [5], 5, 1, SamplingParams(top_p=2.0)),
        EngineRequest("a", [5], 5, 1, SamplingParams(logit_bias={vocab: 1.0})),
    ):
        with pytest.raises(InvalidRequest):
            small.add(bad)
    assert small.step() == []


def test_files_that_are_no_models_are_named(tmp_path: Path) -> None:
    model_file()
    (tmp_path / "text.gguf").write_text("hello")
    cut = tmp_path / "cut" / "model.gguf"
    cut.parent.mkdir()
    cut.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 64)
    (tmp_path / "empty").mkdir()
    for path, word in (
        (tmp_path / "text.gguf", "no GGUF"),
        (tmp_path / "absent.gguf", "no model at"),
        (tmp_path / "empty", "none"),
        (cut, "cannot load"),
    ):
        engine = LlamaCppEngine(LlamaCppOptions(model=path, model_id="m", cache_dir=tmp_path))
        with pytest.raises(LoadError, match=word):
            engine.load(lambda part, word: None)
