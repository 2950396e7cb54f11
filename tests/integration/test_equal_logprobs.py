"""A token's logprobs are the same to the last bit however it comes to be computed: generated alone or in company,
replayed on another worker, or scored. On a tiny model in 8 bits, which shows every difference in the rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.integration.test_llamacpp_engine import ENDLESS, Heard, forget_finished, prompt_logprobs, run
from tests.tiny_model import write_tiny_model
from workers.engines.base import EngineRequest, Logprob, Token
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.lane import EXACT_PROMPT, EXACT_ROWS
from workers.engines.llamacpp.options import LlamaCppOptions

LENGTH = 90  # tokens of a text: more than are computed in one batch when it is replayed


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", add_bos=False, quantised=True)
    engine = LlamaCppEngine(
        LlamaCppOptions(path, "tiny", cache_dir=path.parent, threads=1, lanes=8, context_cells=4096)
    )
    engine.load(lambda part, word: None)
    yield engine
    engine.close()


def tokens_of(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(256) for _ in range(length)]


def generate(name: str, prompt: list[int], generated: list[int] | None = None) -> EngineRequest:
    return EngineRequest(name, prompt, LENGTH, 1, ENDLESS, generated=generated or [], logprobs=3)


def text(heard: Heard, name: str) -> list[tuple[int, Logprob | None]]:
    return [(event.token, event.logprob) for event in heard.by_id[name] if isinstance(event, Token)]


def alone(engine: LlamaCppEngine, request: EngineRequest) -> list[tuple[int, Logprob | None]]:
    forget_finished(engine)
    found = text(run(engine, request), request.id)
    forget_finished(engine)
    return found


@pytest.mark.parametrize("length", [1, 20, EXACT_ROWS + 1, EXACT_PROMPT])
def test_what_is_generated_scores_the_same(engine: LlamaCppEngine, length: int) -> None:
    prompt = tokens_of(length, 1)
    told = alone(engine, generate("a", prompt))
    whole = [*prompt, *(token for token, _ in told)]
    scored = prompt_logprobs(run(engine, EngineRequest("b", whole, 0, 1, prompt_logprobs=3)), "b")
    assert scored[length:] == [logprob for _, logprob in told]


@pytest.mark.parametrize("length", [20, EXACT_PROMPT, 300, 600])
def test_a_text_that_is_replayed_goes_on_the_same(engine: LlamaCppEngine, length: int) -> None:
    prompt = tokens_of(length, 2)
    told = alone(engine, generate("a", prompt))
    for done in (1, 40, 80):
        resumed = alone(engine, generate("a", prompt, [token for token, _ in told[:done]]))
        assert resumed == told[done:]


def test_company_changes_nothing(engine: LlamaCppEngine) -> None:
    """Others generate, begin with long and short prompts and are scored meanwhile."""
    prompt = tokens_of(EXACT_PROMPT, 3)
    told = alone(engine, generate("a", prompt))
    heard = Heard()
    for number in range(3):
        engine.add(EngineRequest(f"before-{number}", tokens_of(30, 10 + number), 400, 1, ENDLESS))
    heard.take(engine.step())
    engine.add(generate("a", prompt))
    for number in range(3):
        heard.take(engine.step())
        engine.add(EngineRequest(f"long-{number}", tokens_of(500, 20 + number), 200, 1, ENDLESS))
    engine.add(EngineRequest("scored", tokens_of(200, 30), 100, 1, ENDLESS, prompt_logprobs=0))
    while not heard.ended("a"):
        heard.take(engine.step())
    assert all(not heard.ended(name) for name in heard.by_id if name != "a") and len(heard.by_id) == 8
    assert text(heard, "a") == told
    for name in heard.by_id:
        engine.cancel(name)


def test_long_prompts_are_computed_in_large_batches(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = engine._context.decode
    monkeypatch.setattr(
        engine._context, "decode", lambda threads: (sizes.append(engine._context.length), decode(threads))[1]
    )
    forget_finished(engine)
    run(engine, EngineRequest("a", tokens_of(512 + 20, 4), 1, 1, ENDLESS))
    assert sizes == [512, 20]
