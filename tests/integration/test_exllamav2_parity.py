"""Numbers of the ExLlamaV2 engine against 32-bit references that share no code with it.

On the CPU harness, so this holds the engine, its attention and its sampling to the truth, and the package's own layers;
not its CUDA kernels. Slow: the same with a real model, and against `transformers`.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared.sampling import SamplingParams
from shared.settings import Settings
from tests.exllamav2 import harness
from workers.engines.base import EngineRequest, Event, Failed, Finished, PromptLogprobs, Token

STORY = "Once upon a time there was a model that knew nothing."
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
#: Two pages and a piece, so that both pages and chunks have edges in it.
LONG = 700
#: Kullback-Leibler divergence of the engine's distribution from the reference's, natural logarithm, per position.
KL = 1e-3
#: Logits nearer to each other than this are the same in 16 bits.
TIE = 0.03


class Said(NamedTuple):
    """What came of one request."""

    tokens: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    end: Event


def run(engine: Any, *requests: EngineRequest) -> list[Said]:
    said = {request.id: Said([], [], [], Finished(request.id, "length")) for request in requests}
    for request in requests:
        engine.add(request)
    while engine.stats().running + engine.stats().waiting:
        for event in engine.step():
            of = said[event.id]
            if isinstance(event, Token):
                of.tokens.append(event.token)
                of.logprobs.append(event.logprob)
            elif isinstance(event, PromptLogprobs):
                of.prompt_logprobs.extend(event.logprobs)
            assert not isinstance(event, Failed), event
            if isinstance(event, Finished):
                said[event.id] = of._replace(end=event)
    return list(said.values())


def loaded(folder: Path, **settings: Any) -> Any:
    harness.install_or_skip()
    from workers.engines.exllamav2.engine import ExLlamaV2Engine
    from workers.engines.exllamav2.options import ExLlamaV2Options

    engine = ExLlamaV2Engine(ExLlamaV2Options.from_settings(Settings(**settings), folder, "m"))
    engine.load(lambda part, what: None)
    return engine


class Checked(NamedTuple):
    """An engine and what it is compared with."""

    engine: Any
    reference: Any


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    harness.install_or_skip()
    from tests.exllamav2 import models
    from tests.exllamav2.reference import Reference

    folder = models.write_tiny_llama(tmp_path_factory.mktemp("m") / "tiny", vocab=500, tokenizer=request.param)
    engine = loaded(folder, lanes=4, context_cells=4096, prefill_chunk=256)
    yield Checked(engine, Reference(folder))
    engine.close()


def ids(engine: Any, length: int, seed: int = 0) -> list[int]:
    """Text as ids, so many of them."""
    found = engine.tokenize(f"{seed} {STORY} " * (1 + length // 8))
    assert len(found) >= length
    return list(found[:length])


def whole_distributions(engine: Any, said: Said, vocab: int) -> list[list[float]]:
    """Log probabilities of every token, by id, for each sampled one; they were asked for with logprobs = vocab."""
    rows = []
    for _, top in said.logprobs:
        row = [-math.inf] * vocab
        for token, value in top:
            row[token] = value
        rows.append(row)
    return rows


def divergence(exact: Any, found: Sequence[float]) -> float:
    import torch

    logs = torch.tensor(found)
    return float((exact.exp() * (exact - logs)).sum())


@pytest.mark.parametrize("length", [1, 17, 255, 256, 257, LONG])
def test_greedy_is_that_of_the_reference(tiny: Checked, length: int) -> None:
    prompt = ids(tiny.engine, length)
    [said] = run(tiny.engine, EngineRequest("r", prompt, 24, 1, GREEDY))
    exact = tiny.reference.logits([*prompt, *said.tokens[:-1]])[length - 1 :, : tiny.engine._vocabulary.vocab_size]
    assert len(said.tokens) == len(exact) == 24
    behind = [float(row.max() - row[token]) for row, token in zip(exact, said.tokens, strict=True)]
    assert max(behind) < TIE, "the best token each time, or one as good"
    assert sum(gap == 0 for gap in behind) >= 22, "and seldom the latter"


@pytest.mark.parametrize("length", [17, 300, LONG])
def test_logprobs_are_those_of_the_reference(tiny: Checked, length: int) -> None:
    """Of prompt and completion, from pages that were computed at once, by chunks, and reused."""
    prompt = ids(tiny.engine, length, seed=1)
    vocab = tiny.engine._vocabulary.vocab_size
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    first, scored, again = (
        run(tiny.engine, EngineRequest("r", prompt, 24, 7, params, logprobs=vocab, prompt_logprobs=best))[0]
        for best in (None, vocab, None)
    )
    whole = [*prompt, *first.tokens]
    exact = tiny.reference.logits(whole)[:, :vocab].log_softmax(-1)
    for said in (first, scored, again):
        assert said.tokens == first.tokens
        for place, row in enumerate(whole_distributions(tiny.engine, said, vocab), start=length - 1):
            assert divergence(exact[place], row) <= KL
            assert said.logprobs[place - length + 1][0] == pytest.approx(
                float(exact[place, whole[place + 1]]), abs=0.02
            )
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == length
    for place, (value, top) in enumerate(scored.prompt_logprobs[1:]):
        assert value == pytest.approx(float(exact[place, prompt[place + 1]]), abs=0.02)
        found = [0.0] * vocab
        for token, logprob in top:
            found[token] = logprob
        assert divergence(exact[place], found) <= KL


def test_a_token_sees_nothing_of_what_comes_after(tiny: Checked) -> None:
    """exllamav2 0.3.2 forgets the mask in its prefill where neither flash-attn nor xformers is installed."""
    prompt = ids(tiny.engine, 300)
    changed = [*prompt[:200], *reversed(prompt[200:])]
    one, other = (
        run(tiny.engine, EngineRequest("r", tokens, 0, 1, GREEDY, prompt_logprobs=1))[0].prompt_logprobs
        for tokens in (prompt, changed)
    )
    assert [entry[0] for entry in one[1:200]] == pytest.approx([entry[0] for entry in other[1:200]], abs=1e-3)
    assert [entry[0] for entry in one[201:]] != pytest.approx([entry[0] for entry in other[201:]], abs=0.5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [1, 13, 39])
def test_a_second_attempt_goes_on_as_if_nothing_had_been(tiny: Checked, temperature: float, cut: int) -> None:
    """As after the end of a worker: from the tokens alone, with and without the prompt in the cache."""
    params = SamplingParams(temperature=temperature, frequency_penalty=0.5, min_tokens=20, ignore_eos=True)
    prompt = ids(tiny.engine, 250, seed=2)
    [whole] = run(tiny.engine, EngineRequest("a", prompt, 40, 5, params, choice=1, logprobs=2))
    for forgotten in (False, True):
        if forgotten:
            tiny.engine._batch.reset()
        rest = EngineRequest("b", prompt, 40, 5, params, choice=1, logprobs=2, generated=whole.tokens[:cut])
        [said] = run(tiny.engine, rest)
        assert said.tokens == whole.tokens[cut:] and said.end == Finished("b", "length")
        values = [logprob[0] for logprob in said.logprobs]
        assert values == pytest.approx([logprob[0] for logprob in whole.logprobs[cut:]], abs=0.02)


# -- a real model


TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Any, Path]]:
    harness.install_or_skip()
    from scripts import carried_model
    from tests.exllamav2 import models

    cache = Settings().cache_dir
    folder = models.write_smollm2(cache / "smollm2-135m-half", carried_model.ensure(cache))
    engine = loaded(folder, lanes=4, context_cells=1024, context_length=512, prefill_chunk=256)
    yield engine, folder
    engine.close()


def completions(engine: Any) -> list[tuple[list[int], Said]]:
    prompts = [list(engine.tokenize(text)) for text in TEXTS]
    vocab = engine._vocabulary.vocab_size
    requests = [EngineRequest(str(n), prompt, 24, 1, GREEDY, logprobs=vocab) for n, prompt in enumerate(prompts)]
    return list(zip(prompts, run(engine, *requests), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_real_model_speaks_as_the_reference(smollm2: tuple[Any, Path]) -> None:
    from tests.exllamav2.reference import Reference

    engine, folder = smollm2
    reference, vocab = Reference(folder), engine._vocabulary.vocab_size
    for prompt, said in completions(engine):
        exact = reference.logits([*prompt, *said.tokens])[:, :vocab].log_softmax(-1)
        rows = whole_distributions(engine, said, vocab)
        for place, (token, row) in enumerate(zip(said.tokens, rows, strict=True), start=len(prompt) - 1):
            best = exact[place].max()
            assert best - exact[place, token] < TIE, "the best token, or one as good"
            assert said.logprobs[place - len(prompt) + 1][0] == pytest.approx(float(exact[place, token]), abs=0.05)
            assert divergence(exact[place], row) <= KL
    assert b"Paris" in engine.detokenize(completions(engine)[0][1].tokens)


#: Runs in the environment of lm-eval, which has transformers: folder and prompts in, greedy ids and log probabilities out.
_TRANSFORMERS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, asked = sys.argv[1], json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
found = []
with torch.inference_mode():
    for prompt, tokens in asked:
        logs = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        found.append({"greedy": logs.argmax(-1).tolist(), "of": [float(row[t]) for row, t in zip(logs, tokens)],
                      "margin": [float(a - b) for a, b in logs.topk(2).values]})
print("REPORT " + json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_model_speaks_as_in_transformers(smollm2: tuple[Any, Path]) -> None:
    from tests.conformance import environments

    engine, folder = smollm2
    asked = completions(engine)
    ended = subprocess.run(
        [str(environments.python("lm-eval")), "-c", _TRANSFORMERS, str(folder)],
        input=json.dumps([(prompt, said.tokens) for prompt, said in asked]),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("REPORT ")]
    for (_, said), exact in zip(asked, json.loads(line.removeprefix("REPORT ")), strict=True):
        for token, best, margin in zip(said.tokens, exact["greedy"], exact["margin"], strict=True):
            assert token == best or margin < TIE, "but for a tie"
        assert [value for value, _ in said.logprobs] == pytest.approx(exact["of"], abs=0.05)
