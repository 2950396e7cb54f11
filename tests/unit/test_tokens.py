"""`/tokenize`, `/detokenize`, `/tokenizer_info`, and what an API that can count refuses before it is queued."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from api.services import services_of
from api.tokenizers import Tokenizers
from shared.cards import ModelCard
from tests.conftest import ROOT
from tests.contract.schemas import check_error
from tests.unit.completion_frames import told
from tests.unit.fakes import CARD, FakeStore
from tests.unit.test_thinking import EMPTY, FAMILIES
from workers.engines.scripted_tokenizer import tokenizer_json

TEMPLATE = FAMILIES["qwen3"][0]
MODEL = msgspec.structs.replace(
    CARD, id="m", tokenizer_sha="abc", chat_template=TEMPLATE, bos_id=256, add_bos=True, eos_id=257, pad_id=None,
    end_ids=(258, 257),
)  # fmt: skip


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    store.tokenizers["abc"] = tokenizer_json()
    others = [msgspec.structs.replace(MODEL, id="plain", chat_template=None), CARD]
    monkeypatch.setattr(store, "cards", lambda: [MODEL, *others])
    return store


@pytest.fixture
def client(make_client: Callable[..., FlaskClient]) -> Iterator[FlaskClient]:
    client = make_client()
    yield client
    services_of(client.application).renderer.close()


def post(client: FlaskClient, path: str, **body: Any) -> Any:
    return client.post(path, json=body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_prompt_to_tokens_and_back(client: FlaskClient, prefix: str) -> None:
    answer = post(client, f"{prefix}/tokenize", prompt="hé<|300|>")
    assert answer.status_code == 200
    tokens = [256, 104, 195, 169, 300]
    assert answer.json == {"count": 5, "max_model_len": 1000, "tokens": tokens, "token_strs": None}
    assert post(client, f"{prefix}/tokenize", prompt="h", add_special_tokens=False).json["tokens"] == [104]
    assert post(client, f"{prefix}/tokenize", prompt="<|256|>h").json["tokens"] == [256, 104]
    shown = post(client, f"{prefix}/tokenize", model="m", prompt="h<|300|>", return_token_strs=True).json
    assert shown["token_strs"] == ["<|256|>", "h", "<|300|>"]
    assert post(client, f"{prefix}/detokenize", tokens=tokens).json == {"prompt": "<|256|>hé<|300|>"}
    assert post(client, f"{prefix}/detokenize", tokens=[]).json == {"prompt": ""}
    assert post(client, f"{prefix}/tokenize", prompt="").json["count"] == 1


def test_a_chat_is_rendered_by_the_models_template(client: FlaskClient) -> None:
    chat = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]

    def text(**body: Any) -> str:
        tokens = post(client, "/tokenize", messages=chat, **body).json["tokens"]
        return str(post(client, "/detokenize", tokens=tokens).json["prompt"])

    turns = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    assert text() == turns + "<|im_start|>assistant\n"
    assert text(add_generation_prompt=False) == turns
    assert text(enable_thinking=False) == turns + "<|im_start|>assistant\n" + EMPTY
    assert text(chat_template_kwargs={"enable_thinking": False}) == text(enable_thinking=False)
    assert text(add_special_tokens=True) == "<|256|>" + text()


def test_tokenizer_info(client: FlaskClient) -> None:
    for path in ("/tokenizer_info?model=m", "/v1/tokenizer_info", "/tokenizer_info/"):
        assert client.get(path).json == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|256|>",
            "eos_token": "<|257|>",
            "pad_token": None,
            "chat_template": TEMPLATE,
            "add_bos_token": True,
            "model_max_length": 1000,
        }


WRONG = [
    ("/tokenize", {}, 400, "prompt"), ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"), ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": []}, 400, "messages"), ("/tokenize", {"messages": [5]}, 400, "messages"),
    ("/tokenize", {"messages": [{"role": "x", "content": "y"}]}, 400, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ("/tokenize", {"model": "plain", "messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, 400, "chat_template"),
    ("/tokenize", {"model": "absent", "prompt": "a"}, 404, "model"), ("/tokenize", {"model": "", "prompt": "a"}, 404, "model"),
    ("/tokenize", {"model": "scripted", "prompt": "a"}, 503, "model"),
    ("/detokenize", {}, 400, "tokens"), ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1.0]}, 400, "tokens"), ("/detokenize", {"tokens": [True]}, 400, "tokens"),
    ("/detokenize", {"tokens": [65536]}, 400, "tokens"), ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"model": "absent", "tokens": [1]}, 404, "model"),
    ("/detokenize", {"model": "scripted", "tokens": [1]}, 503, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG, ids=lambda value: ascii(value)[:50])
def test_what_is_wrong_is_named(client: FlaskClient, path: str, body: dict[str, Any], status: int, param: str) -> None:
    """FB-072: a model without a template says so."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.json
    check_error(answer.json)
    assert answer.json["error"]["param"] == param


def test_a_switch_of_thinking_does_nothing_to_a_prompt_and_that_is_told(client: FlaskClient) -> None:
    plain = client.post("/tokenize", json={"prompt": "abc"})
    switched = client.post("/tokenize", json={"prompt": "abc", "enable_thinking": False, "foo": 1})
    assert switched.json == plain.json and switched.headers["x-sluice-ignored"] == "foo, enable_thinking"
    chat = {"messages": [{"role": "user", "content": "x"}], "enable_thinking": False}
    assert "x-sluice-ignored" not in client.post("/tokenize", json=chat).headers


def test_a_missing_field_is_asked_for(client: FlaskClient) -> None:
    assert client.post("/detokenize", json={}).json["error"]["message"] == "tokens is required."


def test_info_of_models_that_have_none(client: FlaskClient) -> None:
    assert client.get("/tokenizer_info?model=absent").status_code == 404
    assert client.get("/tokenizer_info?model=scripted").status_code == 503
    assert client.get("/tokenize").status_code == 405


TOO_MUCH = [
    {"prompt": "x" * 999}, {"prompt": "x" * 10_000}, {"prompt": ["ok", "x" * 999]}, {"prompt": "x" * 900, "max_tokens": 100},
    {"prompt": [7] * 1000}, {"prompt": [[7], [7] * 991], "max_tokens": 10}, {"prompt": "é" * 499, "max_tokens": 2},
    {"prompt": "x" * 998, "max_tokens": 2, "stream": True},
    {"prompt": "x" * 1000, "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "x" * 970, "max_tokens": 20, "enable_thinking": False},
]  # fmt: skip


@pytest.mark.parametrize("body", TOO_MUCH, ids=lambda body: str({**body, "prompt": "..."}))
def test_what_cannot_fit_is_refused_before_anything_is_queued(client: FlaskClient, store: FakeStore, body: Any) -> None:
    answer = post(client, "/v1/completions", **body)
    assert (answer.status_code, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "1000" in answer.json["error"]["message"]
    assert store.calls == [] and store.jobs == []


@pytest.mark.parametrize("limit", [998, 1000, 99_999])
def test_the_error_names_limit_prompt_and_request(client: FlaskClient, store: FakeStore, limit: int) -> None:
    """Also where max_tokens alone is more than the context. The BOS counts."""
    answer = post(client, "/v1/completions", prompt="abc", max_tokens=limit)
    error = answer.json["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert "context is 1000 tokens" in error["message"] and "prompt has 4 tokens" in error["message"]
    assert f"asks for {limit}" in error["message"] and store.calls == []


def test_token_prompts_are_counted_without_a_tokenizer(client: FlaskClient, store: FakeStore) -> None:
    answer = post(client, "/v1/completions", model="scripted", prompt=[7] * 995, max_tokens=6)
    assert (answer.status_code, store.calls) == (400, [])


def test_what_just_fits_is_queued_as_it_was_sent(client: FlaskClient, store: FakeStore) -> None:
    store.script = lambda job: iter(told("x"))
    for prompt, limit in (("x" * 998, 1), ("x" * 998, None), ([7] * 999, 1), ("<|256|>" + "x" * 900, 99)):
        assert post(client, "/v1/completions", prompt=prompt, max_tokens=limit).status_code == 200
        assert store.jobs[-1].prompts == [prompt] and store.jobs[-1].tail == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_was_cut_is_told_at_once(client: FlaskClient, store: FakeStore, stream: bool) -> None:
    store.script = lambda job: iter(told("x"))

    def told_limit(**body: Any) -> str | None:
        answer = post(client, "/v1/completions", stream=stream, fit_max_tokens=True, **body)
        assert answer.status_code == 200
        limit: str | None = answer.headers.get("x-sluice-max-tokens")
        return limit

    assert told_limit(prompt="x" * 899, max_tokens=500) == "100"
    if stream:  # the script ends one choice only
        assert told_limit(prompt=["x", "x" * 899], max_tokens=10**9) == "100"
    assert told_limit(prompt="x", max_tokens=500) is None
    assert told_limit(prompt="x" * 963, max_tokens=100, enable_thinking=False) == str(1000 - 1 - 963 - len(EMPTY))


def test_thinking_off_puts_the_tail_on_the_job(client: FlaskClient, store: FakeStore) -> None:
    """FB-061, FB-063: in each place; the prompt stays as it was sent."""
    store.script = lambda job: iter(told("x"))
    for off in (
        {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"thinking": False}}, {"reasoning": {"effort": "off"}}, {"thinking": {"type": "disabled"}},
        {"enable_thinking": False, "reasoning_effort": "high"},
    ):  # fmt: skip
        answer = post(client, "/v1/completions", prompt="say /think", **off)
        assert answer.status_code == 200 and "x-sluice-ignored" not in answer.headers
        assert (store.jobs[-1].prompts, store.jobs[-1].tail) == (["say /think"], EMPTY)
    for on in ({}, {"enable_thinking": True}, {"reasoning_effort": "max"}, {"enable_thinking": None}):
        answer = post(client, "/v1/completions", prompt="say /no_think", **on)
        assert answer.status_code == 200 and "x-sluice-ignored" not in answer.headers
        assert (store.jobs[-1].prompts, store.jobs[-1].tail) == (["say /no_think"], "")


@pytest.mark.parametrize("model", ["plain", "scripted"])
def test_a_switch_without_effect_is_named(client: FlaskClient, store: FakeStore, model: str) -> None:
    """FB-062, FB-072: a template without a switch, or none; raw completions work all the same."""
    store.script = lambda job: iter(told("x"))
    answer = post(client, "/v1/completions", model=model, prompt="x", enable_thinking=False, bogus=1)
    assert (answer.status_code, answer.headers["x-sluice-ignored"]) == (200, "bogus, enable_thinking")
    assert store.jobs[-1].tail == ""


def test_a_template_that_fails_fails_only_who_needs_it(
    client: FlaskClient, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FB-068"""
    evil = msgspec.structs.replace(MODEL, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    monkeypatch.setattr(store, "cards", lambda: [evil])
    store.script = lambda job: iter(told("x"))
    answer = post(client, "/v1/completions", prompt="x", enable_thinking=False)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "enable_thinking")
    assert post(client, "/tokenize", messages=[{"role": "user", "content": "x"}]).status_code == 400
    assert post(client, "/v1/completions", prompt="x").status_code == 200
    assert len(store.jobs) == 1


def test_tokenizers_are_loaded_once_and_not_all_are_kept() -> None:
    fetched: list[str] = []

    def fetch(sha: str) -> str | None:
        fetched.append(sha)
        return {"gone": None, "broken": "{}"}.get(sha, tokenizer_json())

    tokenizers = Tokenizers(fetch)

    def card(sha: str | None) -> ModelCard:
        return msgspec.structs.replace(CARD, tokenizer_sha=sha)

    first = tokenizers.of(card("a"))
    assert first is tokenizers.of(card("a")) and first is not None
    assert tokenizers.of(card(None)) is tokenizers.of(card("gone")) is tokenizers.of(card("broken")) is None
    assert fetched == ["a", "gone", "broken"]


def test_a_tokenizer_is_loaded_by_one_request_for_all_that_come_meanwhile() -> None:
    asking, fetched = threading.Barrier(8), list[str]()

    def fetch(sha: str) -> str:
        fetched.append(sha)
        return tokenizer_json()

    tokenizers = Tokenizers(fetch)

    def ask() -> object:
        asking.wait()
        return tokenizers.of(MODEL)

    with ThreadPoolExecutor(8) as threads:
        found = [asked.result() for asked in [threads.submit(ask) for _ in range(8)]]
    assert len(set(map(id, found))) == 1 and fetched == ["abc"]


def test_a_long_text_does_not_hold_up_greenlets() -> None:
    code = """
from gevent import monkey; monkey.patch_all()
import gevent, time
from api.tokenizers import Tokenizers
from shared.jobs import Job
from tests.unit.fakes import CARD
from workers.engines.scripted_tokenizer import tokenizer_json
import msgspec
card = msgspec.structs.replace(CARD, tokenizer_sha="a", context=10**8)
tokenizers, gaps, stop = Tokenizers(lambda sha: tokenizer_json()), [], []
tokenizers.of(card)
def tick():
    last = time.monotonic()
    while not stop:
        gevent.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last += gaps[-1]
ticking = gevent.spawn(tick)
gevent.sleep(0.02)
began = time.monotonic()
rooms = tokenizers.rooms(Job(id="j", model="m", prompts=["word " * 400000], seed=1, created=0), card)
took = time.monotonic() - began
stop.append(1)
ticking.join()
assert rooms == [10**8 - 2000000], rooms
print(took, len(gaps), sorted(gaps)[len(gaps) * 9 // 10])
"""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    took, ticks, slow = map(float, out.stdout.split())
    assert ticks > took * 20 and slow < 0.1, out.stdout
