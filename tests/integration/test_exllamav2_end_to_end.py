"""The ExLlamaV2 engine as its users have it: HTTP, store, worker process, and the package's own generator on the CPU.

A tiny random model, so texts are noise, but the same noise each time. What becomes of failures is in
test_field_cases_exllamav2.py.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from shared import cards, keys
from tests.contract.schemas import check_chunk, check_completion
from tests.exllamav2 import harness
from tests.scores import aligned, joined
from tests.stack import Answer, Stack, Stream

pytestmark = pytest.mark.skipif(harness.missing() is not None, reason=str(harness.missing()))

CONTEXT = 1024
STORY = "Once upon a time there was a model that knew nothing."
#: More than two pages of 256 tokens.
LONG = " ".join(f"{STORY} {number}" for number in range(32))
GREEDY = {"temperature": 0, "ignore_eos": True}
#: Rounding in 16 bits, which depends on how many tokens are computed at once.
ROUNDING = 0.02


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from tests.exllamav2 import models

    folder = models.write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=500, fim=True)
    with Stack(
        tmp_path_factory.mktemp("tiny"),
        ("exllamav2",),
        options=("--model", str(folder)),
        real="tiny",
        module="tests.exllamav2.cli",
        lanes=4,
        context_length=CONTEXT,
        context_cells=4096,
        prefill_chunk=256,
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(tiny: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def ask(tiny: Stack, prompt: Any, **fields: Any) -> Answer:
    answer = tiny.complete(prompt, model="tiny", **{**GREEDY, **fields})
    assert answer.status == 200, answer
    check_completion(answer.json)
    return answer


def stream(tiny: Stack, prompt: Any, **fields: Any) -> Stream:
    stream = tiny.stream(prompt, model="tiny", **{**GREEDY, **fields})
    assert stream.status == 200 and stream.done == 1, stream
    for chunk in stream.data:
        check_chunk(chunk)
    return stream


def ids(tiny: Stack, text: str, **fields: Any) -> list[int]:
    answer = tiny.call("POST", "/tokenize", {"model": "tiny", "prompt": text, **fields})
    assert answer.status == 200, answer
    return answer.json["tokens"]


def sampled(tiny: Stack, prompt: Any, count: int, **fields: Any) -> list[int]:
    """The ids of the first tokens."""
    answer = ask(tiny, prompt, max_tokens=count, logprobs=0, return_tokens_as_token_ids=True, **fields)
    return [int(name.removeprefix("token_id:")) for name in answer.choice["logprobs"]["tokens"]]


def lists(choice: dict[str, Any]) -> dict[str, Any]:
    return choice["logprobs"]


def test_the_official_client_streams_and_gets_what_it_gets_at_once(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": STORY, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text != ""
    assert sum(bool(chunk.choices and chunk.choices[0].text) for chunk in chunks) > 4, "it comes in pieces"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [plain.choices[0].finish_reason] == ["length"]
    assert plain.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_exact_and_tells_what_was_in_the_cache(tiny: Stack) -> None:
    prompt = ids(tiny, f"Usage. {LONG}")
    first, second = (ask(tiny, prompt, max_tokens=9) for _ in range(2))
    assert 2 * 256 < len(prompt) < CONTEXT
    for answer, cached in ((first, 0), (second, len(prompt) - 1)):
        assert answer.usage == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 9,
            "total_tokens": len(prompt) + 9,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    assert first.text == second.text
    other = ask(tiny, [*prompt[:300], *ids(tiny, "And now for something else.")], max_tokens=1)
    assert other.usage["prompt_tokens_details"]["cached_tokens"] == 300
    streamed = stream(tiny, prompt, max_tokens=9, stream_options={"include_usage": True})
    assert streamed.usage == second.usage


@pytest.mark.parametrize("number", range(4))
def test_random_choices_streamed_and_plain_are_the_same(tiny: Stack, number: int) -> None:
    fields = {"temperature": 0.9, "top_p": 0.95, "seed": number, "max_tokens": 40, "n": 2, "logprobs": 1}
    plain, streamed = ask(tiny, STORY, **fields), stream(tiny, STORY, **fields)
    for choice in plain.json["choices"]:
        pieces = [piece for piece in streamed.pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert joined(streamed.pieces, choice["index"])["tokens"] == lists(choice)["tokens"]
    one, other = plain.json["choices"]
    assert one["text"] != other["text"]


def test_a_stop_string_completed_by_the_last_allowed_token_does_not_leak(tiny: Stack) -> None:
    """exllamav2 0.3.2 looks at the length first, and would show it with finish_reason length."""
    tried = 0
    for count in range(6, 24):
        text = ask(tiny, STORY, max_tokens=count).text
        stop = text[-2:]
        if len(text) < 4 or text.index(stop) < len(text) - 2 or "\ufffd" in stop:
            continue
        tried += 1
        plain, streamed = (how(tiny, STORY, max_tokens=count, stop=[stop]) for how in (ask, stream))
        assert (plain.text, plain.finish) == (streamed.text, streamed.finish) == (text[:-2], "stop")
        assert plain.choice["stop_reason"] == streamed.stop_reason == stop
        assert plain.usage["completion_tokens"] == count
    assert tried >= 4


@pytest.mark.parametrize("end", ["end token", "stop token"])
def test_text_held_for_a_stop_string_comes_out_when_a_token_ends_it(tiny: Stack, end: str) -> None:
    """exllamav2 0.3.2 loses it."""
    tokens, tried = sampled(tiny, STORY, 24), 0
    end_id = ids(tiny, "</s>", add_special_tokens=False)[0]
    for count in range(4, 23):
        text = ask(tiny, STORY, max_tokens=count).text
        if "\ufffd" in text[-2:] or tokens[count] in tokens[:count]:
            continue
        tried += 1
        if end == "end token":
            ends = {"logit_bias": {str(end_id): 100}, "min_tokens": count, "ignore_eos": False}
        else:
            ends = {"stop_token_ids": [tokens[count]]}
        fields = {"max_tokens": 40, "stop": [text[-2:] + "zz"], **ends}
        plain, streamed = (how(tiny, STORY, **fields) for how in (ask, stream))
        assert (plain.text, plain.finish) == (streamed.text, streamed.finish) == (text, "stop")
        assert plain.usage["completion_tokens"] == count + 1
    assert tried >= 4


def test_characters_of_several_tokens(tiny: Stack) -> None:
    """The completion is made of the two bytes of é, in any order."""
    first, second = _byte_ids(tiny)
    fields = {"logit_bias": {str(first): 100, str(second): 100}, "temperature": 2.0, "seed": 5}
    tokens = sampled(tiny, "🙂🚀", 60, **fields)
    assert set(tokens) == {first, second}
    text = bytes({first: 0xC3, second: 0xA9}[token] for token in tokens).decode(errors="replace")
    assert "é" in text and "\ufffd" in text
    plain, streamed = (how(tiny, "🙂🚀", echo=True, max_tokens=60, **fields) for how in (ask, stream))
    assert plain.text == streamed.text == "🙂🚀" + text


def _byte_ids(tiny: Stack) -> tuple[int, int]:
    """Ids of the bytes C3 and A9, which the tokenizer joins in texts: found in letters it has no piece for."""
    return ids(tiny, "Ù", add_special_tokens=False)[0], ids(tiny, "©", add_special_tokens=False)[-1]


def test_logprobs_of_prompt_and_completion_are_the_same_in_every_way(tiny: Stack) -> None:
    scored: dict[str, Any] = {"echo": True, "logprobs": 3}
    prompt = f"Logprobs. {LONG}"
    plain, streamed = (how(tiny, prompt, max_tokens=8, **scored) for how in (ask, stream))
    entries = len(ids(tiny, prompt)) - 1  # the BOS is not shown
    aligned(lists(plain.choice), plain.text, entries=entries + 8, best=3, scored_prompt=entries)
    again = joined(streamed.pieces)
    assert streamed.text == plain.text and again["tokens"] == lists(plain.choice)["tokens"]
    _same_scores(again, lists(plain.choice))
    assert plain.usage["prompt_tokens_details"]["cached_tokens"] == 0
    # as evaluation harnesses score: everything is a prompt, and nothing is generated
    whole = [*ids(tiny, prompt), *sampled(tiny, prompt, 8)]
    alone = lists(ask(tiny, whole, max_tokens=0, **scored).choice)
    assert len(alone["tokens"]) == entries + 1 + 8
    _same_scores({name: values[1:] for name, values in alone.items()}, lists(plain.choice), skip=1)


def _same_scores(one: dict[str, Any], other: dict[str, Any], skip: int = 1) -> None:
    for name in ("token_logprobs", "top_logprobs"):
        assert len(one[name]) == len(other[name])
    assert one["token_logprobs"][skip:] == pytest.approx(other["token_logprobs"][skip:], abs=ROUNDING)
    for left, right in zip(one["top_logprobs"][skip:], other["top_logprobs"][skip:], strict=True):
        both = left.keys() & right.keys()
        assert len(both) >= 2, "neighbours may change places"
        assert [left[token] for token in both] == pytest.approx([right[token] for token in both], abs=ROUNDING)


def test_logprobs_are_those_of_the_model_whatever_is_done_to_sampling(tiny: Stack) -> None:
    """exllamav2 0.3.2 reports them after bias and penalties, and at temperature 0 as 0 and -inf."""
    plain = lists(ask(tiny, STORY, max_tokens=1, logprobs=5, temperature=1).choice)
    raw = plain["top_logprobs"][0]
    assert sum(math.exp(value) for value in raw.values()) < 1
    greedy, third = sampled(tiny, STORY, 1)[0], list(raw)[2]
    third_id = _id_of(tiny, third)
    for fields, token in (
        ({}, None),
        ({"logit_bias": {str(third_id): 100}}, third),
        ({"logit_bias": {str(greedy): -100}}, None),
        ({"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5}, None),
        ({"temperature": 0.1, "top_k": 2, "min_p": 0.1}, None),
    ):
        seen = lists(ask(tiny, STORY, max_tokens=1, logprobs=5, **fields).choice)
        best = seen["top_logprobs"][0]
        both = raw.keys() & best.keys()
        assert len(both) >= 4, "neighbours may change places, and the last one its place for another"
        assert [best[name] for name in both] == pytest.approx([raw[name] for name in both], abs=ROUNDING), fields
        if token is not None:
            assert seen["tokens"] == [token] and seen["token_logprobs"][0] == pytest.approx(raw[token], abs=ROUNDING)


def _id_of(tiny: Stack, name: str) -> int:
    """The id behind a token's name in `logprobs`, by asking for ids instead of names."""
    names = lists(ask(tiny, STORY, max_tokens=1, logprobs=5).choice)["top_logprobs"][0]
    by_id = lists(ask(tiny, STORY, max_tokens=1, logprobs=5, return_tokens_as_token_ids=True).choice)
    return int(list(by_id["top_logprobs"][0])[list(names).index(name)].removeprefix("token_id:"))


def test_penalties_count_what_was_generated_and_not_the_prompt(tiny: Stack) -> None:
    """exllamav2 0.3.2 counts the prompt as well: 200 times this token."""
    token = ids(tiny, "z", add_special_tokens=False)[-1]
    fields = {"logit_bias": {str(token): 50}, "presence_penalty": 2, "frequency_penalty": 2}
    found = sampled(tiny, [token] * 200, 60, **fields)
    assert found[:10] == [token] * 10
    assert set(found[30:]) != {token}, "its own tokens do count"


def test_choices_share_the_prompt(tiny: Stack) -> None:
    prompt = ids(tiny, f"Choices. {LONG}")
    answer = ask(tiny, prompt, max_tokens=6, n=3)
    assert [choice["text"] for choice in answer.json["choices"]] == [answer.json["choices"][0]["text"]] * 3
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (len(prompt), 18)
    best = ask(tiny, prompt, max_tokens=6, best_of=3, temperature=1.5, seed=3)
    assert (best.usage["prompt_tokens"], best.usage["completion_tokens"]) == (len(prompt), 18)
    every = ask(tiny, prompt, max_tokens=6, n=3, temperature=1.5, seed=3, logprobs=0).json["choices"]
    assert len({choice["text"] for choice in every}) == 3
    mean = {choice["text"]: sum(lists(choice)["token_logprobs"]) for choice in every}
    assert best.text == max(mean, key=lambda text: mean[text])


def test_fb140_a_prompt_that_is_too_long_is_refused_before_anything_else(tiny: Stack, client: OpenAI) -> None:
    """FB-140: streamed or not, as text, as ids and in a batch; and usage shows every prompt token."""
    long = [300] * CONTEXT
    for prompt in (long, [[300, 301], long], "z" + " z" * CONTEXT):
        for streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model="tiny", prompt=prompt, max_tokens=1, stream=streamed)
            assert refused.value.code == "context_length_exceeded"
            assert str(CONTEXT) in refused.value.message
            assert refused.value.response.headers["content-type"] == "application/json"
    assert str(CONTEXT + 5) in tiny.complete([300] * (CONTEXT + 5), model="tiny", max_tokens=1).error["message"]
    answer = ask(tiny, long[1:], max_tokens=1)
    assert answer.usage["prompt_tokens"] == CONTEXT - 1 and answer.usage["completion_tokens"] == 1
    refused_later = tiny.complete(long[1:], model="tiny", max_tokens=2)
    assert (refused_later.status, refused_later.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("name", ["tiny/adapter", "adapter", "tiny "])
def test_fb139_an_adapter_that_is_not_there_is_not_answered_by_its_base(tiny: Stack, name: str) -> None:
    """FB-139"""
    answer = tiny.complete(STORY, model=name, max_tokens=1)
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


def test_what_cannot_run_is_refused_without_the_worker(tiny: Stack) -> None:
    """The context and the tokenizer are on the model's card: nothing is queued to find out."""
    [worker] = tiny.workers()
    os.kill(worker, signal.SIGSTOP)
    try:
        for fields in ({"prompt": " z" * (CONTEXT + 1)}, {"prompt": [500]}, {"prompt": "a", "mirostat_tau": 1.0}):
            answer = tiny.complete(model="tiny", max_tokens=1, timeout=3, **fields)
            assert answer.status == 400 and answer.seconds < 3, answer
        assert tiny.queue("tiny") == (0, 0)
        assert len(ids(tiny, STORY)) > 10
    finally:
        os.kill(worker, signal.SIGCONT)
    ask(tiny, STORY, max_tokens=1)


def test_a_gap_is_filled_as_if_the_ids_had_been_sent(tiny: Stack) -> None:
    before, after, middle = (ids(tiny, f"<|fim_{name}|>")[-1] for name in ("prefix", "suffix", "middle"))
    bos = ids(tiny, "")[0]
    parts = [ids(tiny, text, add_special_tokens=False) for text in ("def f(", "return 1")]
    sent = [bos, before, *parts[0], after, *parts[1], middle]
    by_ids = ask(tiny, sent, max_tokens=8)
    gap = ask(tiny, "def f(", suffix="return 1", max_tokens=8)
    assert gap.text == by_ids.text != ask(tiny, "def f(", max_tokens=8).text
    assert gap.usage["prompt_tokens"] == len(sent)
    assert stream(tiny, "def f(", suffix="return 1", max_tokens=8).text == gap.text


@pytest.mark.parametrize(
    "text", [STORY, "", "naïve café 漢字 🙂\x00\n\t", "<|im_start|>user\nhi<|im_end|>", "<s>twice"]
)
def test_the_api_counts_as_the_engine_does(tiny: Stack, text: str) -> None:
    with tiny.store() as store:
        card = cards.decode(store.hget(keys.card("tiny"), "card") or b"")
    assert card.tokenizer_sha is not None, "the tokenizer has been proven"
    assert card.context == CONTEXT
    for fields in ({}, {"add_special_tokens": False}):
        counted = ids(tiny, text, **fields)
        if counted:
            assert ask(tiny, text, max_tokens=1, **fields).usage["prompt_tokens"] == len(counted)


def test_many_at_once_come_to_the_same_as_alone(tiny: Stack) -> None:
    """More than there are lanes, of all lengths, plain and streamed."""
    prompts = [f"{number}: {STORY * (1 + number % 5)}" for number in range(12)]
    alone = [ask(tiny, prompt, max_tokens=12).text for prompt in prompts]
    with ThreadPoolExecutor(12) as threads:
        plain = threads.map(lambda prompt: ask(tiny, prompt, max_tokens=12).text, prompts)
        streamed = threads.map(lambda prompt: stream(tiny, prompt, max_tokens=12).text, prompts)
        assert list(plain) == alone
        assert list(streamed) == alone
