"""Fill-in-the-middle, control tokens and reused prompts over the real path: API, store, worker, llama.cpp, tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.app import create_app
from shared.cards import Fim
from shared.settings import Settings
from tests.conftest import Node, Store, Worker, wait_for
from tests.contract.schemas import check_completion
from tests.scores import aligned
from tests.tiny_model import ID, write_tiny_model
from workers.engines.llamacpp.engine import LlamaCppEngine
from workers.engines.llamacpp.options import LlamaCppOptions

PRE, SUF, MID = ID["<|fim_prefix|>"], ID["<|fim_suffix|>"], ID["<|fim_middle|>"]
BOS, MARK, THINK = ID["<|begin|>"], ID["<|mark|>"], ID["<think>"]
#: Of one model with a BOS, of the other without: both tokenizers add one to a raw prompt.
TEMPLATES = {
    "tiny": "{{ bos_token }}{% for m in messages %}{{ m.content }}<|mark|>{% endfor %}",
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
PLAIN = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def workers(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("model")
    started = []
    for name, fim in (("tiny", True), ("plain", False)):
        path = write_tiny_model(folder / f"{name}.gguf", fim=fim, chat_template=TEMPLATES[name])
        options = ("--engine", "llamacpp", "--model", str(path))
        started.append(Worker(store.url, name, *options, lanes=4, context_cells=1024, threads=1))
    yield
    for worker in started:
        worker.kill()


@pytest.fixture
def client(workers: None, node: Node) -> FlaskClient:
    wait_for(lambda: len(node.gateway.cards()) == 2)
    return create_app(Settings(), gateway=node.gateway, hub=node.hub).test_client()


def ask(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**PLAIN, **fields})
    assert response.status_code == 200, response.json
    check_completion(response.json)
    answer: dict[str, Any] = response.json
    return answer


def refused(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"model": "tiny", "max_tokens": 6, **fields})
    assert response.status_code == 400
    error: dict[str, Any] = response.json["error"]
    return error


def test_the_card_tells_what_the_file_says(client: FlaskClient, node: Node) -> None:
    tiny, plain = node.gateway.card("tiny"), node.gateway.card("plain")
    assert tiny.fim == Fim(PRE, SUF, MID) and plain.fim is None
    assert set(tiny.control_ids) == set(ID.values()) - {THINK}
    assert tiny.refuses("mirostat_tau") and not tiny.refuses("top_k")


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix")])
def test_files_may_name_the_tokens_of_a_gap(keys: tuple[str, ...], tmp_path: Path) -> None:
    ids = dict(zip((f"tokenizer.ggml.{key}_token_id" for key in keys), (PRE, SUF, MID), strict=False))
    path = write_tiny_model(tmp_path / "m.gguf", fim=False, metadata=ids)
    engine = LlamaCppEngine(LlamaCppOptions(path, "m", tmp_path, lanes=1, context_cells=256))
    assert engine.load(lambda part, word: None).fim == (
        Fim(PRE, SUF, MID) if len(keys) == 3 else Fim(PRE, SUF, mode="spm")
    )
    engine.close()


def test_a_gap_is_filled_as_if_the_ids_had_been_sent(client: FlaskClient) -> None:
    """FB-133: one BOS, and none in the middle."""
    ids = [BOS, PRE, *b"def f(", SUF, *b"return 1", MID]
    by_ids = ask(client, prompt=ids)["choices"][0]["text"]
    gap = {"prompt": "def f(", "suffix": "return 1"}
    answer = ask(client, **gap)
    assert answer["choices"][0]["text"] == by_ids != ask(client, prompt="def f(")["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert ask(client, prompt=list(b"def f("), suffix="return 1")["usage"]["prompt_tokens"] == len(ids) - 1
    streamed = client.post("/v1/completions", json={**PLAIN, **gap, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith('data: {"')]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == by_ids
    for prompt in ("<|begin|>def f(", [BOS, *b"def f("]):
        assert ask(client, prompt=prompt, suffix="return 1")["choices"][0]["text"] == by_ids
    several = ask(client, prompt=["def f(", ""], suffix="return 1", n=2)
    assert [choice["text"] for choice in several["choices"][:2]] == [by_ids] * 2
    marked = {"prompt": "a", "suffix": "<|mark|>"}
    assert ask(client, **marked)["usage"]["prompt_tokens"] == 1 + 3 + 2
    assert ask(client, **marked, parse_special=False)["usage"]["prompt_tokens"] == 1 + 3 + 1 + 8
    assert ask(client, **marked, add_special_tokens=False)["usage"]["prompt_tokens"] == 3 + 2


def test_a_gap_that_does_not_fit_is_named(client: FlaskClient) -> None:
    error = refused(client, prompt="a" * 500, suffix="b" * 600)
    assert error["code"] == "context_length_exceeded" and "1104" in error["message"]
    assert refused(client, prompt="a", suffix="b", echo=True)["param"] == "echo"
    error = refused(client, model="plain", prompt="a", suffix="b")
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    ask(client, model="plain", prompt="a", suffix="")


def test_control_tokens_are_hidden_unless_asked_for(client: FlaskClient) -> None:
    forced = {"prompt": "a", "max_tokens": 3, "logit_bias": {str(MARK): 100}, "logprobs": 1}
    hidden = ask(client, **forced)
    choice = hidden["choices"][0]
    assert choice["text"] == "" and hidden["usage"]["completion_tokens"] == 3
    assert choice["logprobs"]["tokens"] == ["<|mark|>"] * 3
    assert choice["logprobs"]["text_offset"] == [1] * 3
    assert ask(client, **forced, skip_special_tokens=False)["choices"][0]["text"] == "<|mark|>" * 3
    thinking = ask(client, prompt="a", max_tokens=2, logit_bias={str(THINK): 100})
    assert thinking["choices"][0]["text"] == "<think>" * 2, "no control token"
    stopped = ask(client, **{**forced, "stop": "<|mark|>"})
    assert stopped["choices"][0]["finish_reason"] == "length", "what is not shown stops nothing"
    stopped = ask(client, **{**forced, "stop": "<|mark|>"}, skip_special_tokens=False)
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_fb034_one_bos_and_it_has_no_entry(client: FlaskClient) -> None:
    """FB-009, FB-128: a BOS that the server added counts in prompt_tokens, and is neither echoed nor scored; one that
    was sent is as any other token."""
    scored = {"echo": True, "logprobs": 1, "max_tokens": 2}
    for prompt, more, ids, entries in (
        ("hi", {}, 3, 2),
        ("<|begin|>hi", {}, 3, 3),
        ("hi", {"add_special_tokens": False}, 2, 2),
        ([BOS, *b"hi"], {}, 3, 3),
        (list(b"hi"), {}, 2, 2),
        ("<|begin|>hi", {"parse_special": False}, 12, 11),
    ):
        answer = ask(client, prompt=prompt, **scored, **more)
        [choice] = answer["choices"]
        assert answer["usage"]["prompt_tokens"] == ids, (prompt, more)
        assert choice["text"].startswith("<|begin|>hi" if prompt[0] in ("<", BOS) else "hi")
        aligned(choice["logprobs"], choice["text"], entries=entries + 2, best=1, scored_prompt=entries)
    one = ask(client, prompt="", echo=True, logprobs=1, max_tokens=1)
    assert one["usage"]["prompt_tokens"] == 1 and len(one["choices"][0]["logprobs"]["tokens"]) == 1


def test_fb034_a_chat_has_the_bos_of_its_template_and_no_other(client: FlaskClient) -> None:
    """With nobody outside the worker who could tokenise: the card tells how the BOS is written."""

    def spoken(model: str, content: str) -> dict[str, Any]:
        body = {**PLAIN, "model": model, "messages": [{"role": "user", "content": content}]}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.json
        check_completion(response.json)
        found: dict[str, Any] = response.json
        return found

    for model, ids in (("tiny", [BOS, *b"hi", MARK]), ("plain", [*b"hi"])):
        answer = spoken(model, "hi")
        assert answer["usage"]["prompt_tokens"] == len(ids)
        by_ids = ask(client, model=model, prompt=ids)
        assert answer["choices"][0]["message"]["content"] == by_ids["choices"][0]["text"]
    forged = spoken("tiny", "<|begin|>hi<|mark|>")["usage"]["prompt_tokens"]
    assert forged == 1 + len("<|begin|>hi<|mark|>") + 1, "and nobody else writes one"


def test_usage_tells_how_much_of_the_prompt_was_there(client: FlaskClient) -> None:
    prompt = "Anna lives in Paris with her brother Tom. " * 8
    answer = ask(client, prompt=prompt, n=4, temperature=1.0)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = ask(client, prompt=prompt, n=4, temperature=1.0)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1 == len(prompt)
    scored = ask(client, prompt=prompt, echo=True, logprobs=0)
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 6


def test_a_reference_is_the_same_after_odd_requests(client: FlaskClient) -> None:
    """FB-143"""
    reference = {"prompt": "Anna lives in Paris with her brother Tom. " * 8, "max_tokens": 16, "logprobs": 2}
    before = ask(client, **reference)["choices"][0]
    for n in range(25):
        prompt = reference["prompt"][: 15 * n + 1] + "é🌍\x00" * (n % 3)  # type: ignore[index]
        client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": n, "n": 1 + n % 3})
        client.post("/v1/completions", json={"model": "tiny", "prompt": [n, BOS, 257, *b"Anna"], "max_tokens": 10**6})
    after = ask(client, **reference)["choices"][0]
    assert after["logprobs"]["tokens"] == before["logprobs"]["tokens"]
    assert after["logprobs"]["token_logprobs"] == pytest.approx(before["logprobs"]["token_logprobs"], abs=0.02)
