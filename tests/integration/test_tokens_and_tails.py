"""Counting and tails with a real store and real workers: what is refused never reaches the queue, what is taken
reaches the engine as it was sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from rq.queue import Queue
from rq.serializers import JSONSerializer

from api.app import create_app
from api.services import services_of
from shared import cards, keys
from shared.jobs import Job, new_id
from tests.conftest import Node, Store, Worker, wait_for
from tests.unit.test_thinking import EMPTY, FAMILIES
from workers.engines.scripted import CONTEXT, ScriptedEngine

Start = Callable[..., Worker]
ORIGIN = "scripted:interactive:default"


@pytest.fixture
def client(node: Node) -> Iterator[FlaskClient]:
    app = create_app(node.settings, gateway=node.gateway, hub=node.hub)
    yield app.test_client()
    services_of(app).renderer.close()


def post(client: FlaskClient, path: str, **body: Any) -> Any:
    return client.post(path, json=body)


def complete(client: FlaskClient, prompt: Any, **body: Any) -> Any:
    answer = post(client, "/v1/completions", model="scripted", prompt=prompt, **body)
    assert answer.status_code == 200, answer.json
    return answer.json


def give_template(store: Store, template: str | None) -> None:
    """Puts another template on the card, as a worker with such a model would have."""
    card = cards.decode(store.client.hget(keys.card("scripted"), "card"))
    changed = msgspec.structs.replace(card, chat_template=template)
    store.client.hset(keys.card("scripted"), "card", cards.encode(changed))


def queued(store: Store) -> tuple[int, int, int]:
    """Jobs in the store, jobs in RQ's queue, doorbell rings."""
    jobs = sum(1 for _ in store.client.scan_iter("rq:job:*"))
    return (
        jobs,
        Queue(ORIGIN, connection=store.client, serializer=JSONSerializer).count,
        store.client.llen(keys.bell("scripted")),
    )


def test_the_card_and_its_tokenizer_are_in_the_store(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    start_worker()
    [card] = wait_for(node.gateway.cards)
    assert card.tokenizer_sha and card.eos_id == 257
    assert list(store.client.scan_iter("sluice:tokenizer:*")) == [keys.tokenizer(card.tokenizer_sha).encode()]
    assert store.client.ttl(keys.tokenizer(card.tokenizer_sha)) == -1
    assert '"model"' in (node.gateway.tokenizer(card.tokenizer_sha) or "")


def test_what_cannot_fit_changes_nothing_in_the_queue(
    store: Store, start_worker: Start, node: Node, client: FlaskClient
) -> None:
    """With nobody there who would take it away again: the queue is as it was. The worker alone would refuse it too."""
    worker = start_worker()
    wait_for(node.gateway.cards)
    worker.stop()
    store.client.set(keys.starter("scripted"), "test", ex=60)
    before = queued(store)
    for body in (
        {"prompt": "x" * CONTEXT},
        {"prompt": "é" * (CONTEXT // 2), "stream": True},
        {"prompt": "x" * (CONTEXT - 10), "max_tokens": 11},
        {"prompt": ["x", [5]]},
        {"prompt": [5] * CONTEXT},
        {"prompt": [70_000]},
        {"prompt": "x", "logit_bias": {"70000": 1}},
        {"prompt": ""},
    ):
        answer = post(client, "/v1/completions", model="scripted", **body)
        assert answer.status_code == 400, answer.json
    assert queued(store) == before
    stream = post(
        client,
        "/v1/completions",
        model="scripted",
        prompt="x" * 32_000,
        max_tokens=5000,
        fit_max_tokens=True,
        stream=True,
    )
    assert (stream.status_code, stream.headers["x-sluice-max-tokens"]) == (200, str(CONTEXT - 32_000))
    assert queued(store)[1] == before[1] + 1
    stream.close()
    wait_for(lambda: queued(store)[1] == before[1])
    store.client.delete(keys.starter("scripted"))


def test_the_worker_checks_again(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit("x" * CONTEXT).read()
    assert stream.error is not None and stream.error["code"] == "context_length_exceeded"


def test_token_endpoints_answer_without_a_worker(store: Store, start_worker: Start, node: Node) -> None:
    worker = start_worker()
    wait_for(node.gateway.cards)
    worker.stop()
    wait_for(lambda: not node.gateway.cards())
    app = create_app(node.settings, gateway=node.gateway, hub=node.hub)
    client, engine = app.test_client(), ScriptedEngine()
    for named in ({"model": "scripted"}, {}):
        tokens = post(client, "/tokenize", prompt="ä <|300|>", **named).json["tokens"]
        assert tokens == engine.tokenize("ä <|300|>")
        assert post(client, "/v1/detokenize", tokens=tokens, **named).json == {"prompt": "ä <|300|>"}
        assert client.get("/tokenizer_info", query_string=named).json["eos_token"] == "<|257|>"
    assert post(client, "/tokenize", model="nobody", prompt="x").status_code == 404
    store.client.delete(*store.client.scan_iter("sluice:tokenizer:*"))
    fresh = create_app(node.settings, gateway=node.gateway, hub=node.hub).test_client()
    assert post(fresh, "/tokenize", model="scripted", prompt="x").status_code == 503


def test_raw_prompts_reach_the_engine_as_they_were_sent(
    store: Store, start_worker: Start, node: Node, client: FlaskClient
) -> None:
    """The engine repeats its prompt: byte for byte the one that was sent, and the tail only where thinking is off.

    FB-061, FB-063, FB-065, FB-072."""
    start_worker()
    wait_for(node.gateway.cards)
    chosen = random.Random(9)
    alphabet = ("a", " ", "\n", "<think>", "</think>", "<|im_start|>", "assistant\n", "/think", "/no_think", "é", "🌍")
    for family in ("qwen3", "glm", "glm-4.5-like", "deepseek-v3.1-like", "no switch"):
        template, _, tail = FAMILIES[family]
        give_template(store, template)
        wait_for(lambda template=template: node.gateway.card("scripted").chat_template == template)
        for _ in range(6):
            prompt = "x" + "".join(chosen.choice(alphabet) for _ in range(chosen.randint(0, 12)))
            for on in ({}, {"enable_thinking": True}, {"reasoning_effort": "high"}):
                assert complete(client, prompt, **on)["choices"][0]["text"] == prompt
            prompt, whole = prompt + "z", prompt + "z" + (tail or "")
            for sent in ([prompt] * 2, [list(prompt.encode())] * 2):
                off = complete(client, sent, enable_thinking=False)
                assert [choice["text"] for choice in off["choices"]] == [whole] * 2
                assert off["usage"]["prompt_tokens"] == 2 * len(whole.encode())
    give_template(store, FAMILIES["qwen3"][0])
    wait_for(lambda: node.gateway.card("scripted").chat_template == FAMILIES["qwen3"][0])
    for prompt, more in (("x<think>\n", "\n</think>\n\n"), ("x" + EMPTY, "")):
        for sent in (prompt, list(prompt.encode())):
            assert complete(client, sent, enable_thinking=False)["choices"][0]["text"] == prompt + more


def test_a_tail_is_neither_echoed_nor_scored_and_counts(
    store: Store, start_worker: Start, node: Node, client: FlaskClient
) -> None:
    start_worker()
    wait_for(node.gateway.cards)
    give_template(store, FAMILIES["qwen3"][0])
    wait_for(lambda: node.gateway.card("scripted").chat_template == FAMILIES["qwen3"][0])
    for sent in ("hi", [104, 105]):
        answer = complete(client, sent, enable_thinking=False, echo=True, logprobs=0, max_tokens=1)
        [choice] = answer["choices"]
        assert choice["text"].startswith("hihi<think>") and answer["usage"]["prompt_tokens"] == 2 + len(EMPTY)
        assert choice["logprobs"]["tokens"][:2] == ["h", "i"] and len(choice["logprobs"]["tokens"]) == 3
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_a_job_whose_tail_is_nonsense_hurts_nobody(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    assert node.submit("x", tail="y" * CONTEXT).read().error is not None
    assert node.submit("x", tail="y").read().text == "xy"
    assert Job(id=new_id(), model="m", prompts=["x"], seed=1, created=0).tail == ""
