"""`POST /v1/chat/completions` over HTTP against the whole product: the contract as a client meets it.

What holds for streams and jobs of any kind is tested on raw completions; here is what is a chat's own, and that it goes the
same way. What needs no script runs against both engines (`model`).
"""

from __future__ import annotations

import time

import pytest

from tests.conftest import script, wait_for
from tests.contract.schemas import check_completion
from tests.faults.told import of_answer, of_stream
from tests.integration.test_http_completions import FIXED, refused, whole
from tests.stack import CHATS, END, REAL, SCRIPTED, Chat, Stack, endless, said

FRANCE = said("What is the capital of France?")
TALK = Chat(
    [
        {"role": "developer", "content": "You answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": "Hi.", "reasoning_content": None},
        {"role": "user", "content": "What is the capital of France?"},
    ]
)
THOUGHT = script("<thi", "nk>\n", "why", " so", "</", "think>", "\n\n", "42", delay_ms=20)


def test_an_answer_has_the_shape_of_the_contract(stack: Stack, model: str) -> None:
    before = int(time.time())
    answer = stack.complete(TALK, model=model, max_completion_tokens=5, temperature=0)
    assert answer.status == 200, answer
    check_completion(answer.json)
    assert answer.json["id"] == answer.headers["x-sluice-id"]
    assert answer.json["model"] == model and before <= answer.json["created"] <= time.time()
    assert answer.usage["completion_tokens"] == 5 and answer.finish == "length" and answer.text


def test_a_stream_says_what_the_plain_answer_says(stack: Stack, model: str) -> None:
    """One choice; another seed of a real model need not give the same numbers in another batch."""
    for more in ({}, {"stop": ["a", "France"]}, {"logprobs": True, "top_logprobs": 3}):
        plain = of_answer(stack.complete(TALK, model=model, **FIXED, **more))
        stream = whole(stack.stream(TALK, model=model, **FIXED, **more))
        told = of_stream(stream)
        assert stream.data[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert told.choices[0].text == plain.choices[0].text
        assert told.choices[0].finish_reason == plain.choices[0].finish_reason
        assert told.usage["completion_tokens"] == plain.usage["completion_tokens"]


def test_the_prompt_is_what_the_template_writes(stack: Stack) -> None:
    """The same tokens as a raw prompt that its client has rendered, and so the same text."""
    tokens = stack.call("POST", "/tokenize", {"model": REAL, "messages": TALK}).json["tokens"]
    rendered = stack.call("POST", "/detokenize", {"model": REAL, "tokens": tokens}).json["prompt"]
    assert rendered.startswith("<|im_start|>system\nYou answer briefly.<|im_end|>\n") and "Hello!<|im_end|>" in rendered
    assert rendered.endswith("<|im_start|>assistant\n")
    chat = stack.complete(TALK, model=REAL, **FIXED)
    raw = stack.complete(rendered, model=REAL, **FIXED)
    by_ids = stack.complete(tokens, model=REAL, **FIXED)
    assert chat.text == raw.text == by_ids.text
    assert chat.usage["prompt_tokens"] == raw.usage["prompt_tokens"] == len(tokens)
    again = stack.complete(TALK, model=REAL, **FIXED)
    assert again.usage["prompt_tokens_details"]["cached_tokens"] > 0, "prompts that begin alike are found"


def test_it_ends_by_itself(stack: Stack) -> None:
    answer = stack.complete(said("Say hi."), model=REAL, temperature=0, logprobs=True)
    assert answer.finish == "stop" and answer.choice["stop_reason"] is None and "<|im_end|>" not in answer.text
    entries = answer.choice["logprobs"]["content"]
    assert len(entries) == answer.usage["completion_tokens"] and entries[-1]["token"] == "<|im_end|>"
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == answer.text


def test_logprobs(stack: Stack) -> None:
    fields = {"model": REAL, **FIXED, "logprobs": True}
    entries = stack.complete(FRANCE, **fields, top_logprobs=4).choice["logprobs"]["content"]
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy"
        assert entry["logprob"] == values[0]
    bare = stack.complete(FRANCE, **fields).choice["logprobs"]["content"]
    assert [entry["token"] for entry in bare] == [entry["token"] for entry in entries]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * len(bare)
    named = stack.complete(FRANCE, **fields, return_tokens_as_token_ids=True).choice["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for entry in named)
    assert [entry["bytes"] for entry in named] == [entry["bytes"] for entry in bare]


def test_choices_are_numbered_and_differ(stack: Stack) -> None:
    answer = stack.complete(FRANCE, model=REAL, n=3, max_tokens=12, temperature=1.5, seed=3)
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    texts = {choice["message"]["content"] for choice in answer.json["choices"]}
    assert len(texts) > 1 and answer.usage["completion_tokens"] > 12
    scripted = said('{"choices": [{"pieces": ["<think>", "a", "</think>b"]}, {"pieces": ["c"]}]}')
    told = of_stream(stack.stream(scripted, n=2))
    assert [(told.choices[i].reasoning, told.choices[i].text) for i in (0, 1)] == [("a", "b"), ("", "c")]
    assert told.usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert told == of_answer(stack.complete(scripted, n=2))


def test_reasoning_is_told_apart(stack: Stack) -> None:
    plain = stack.complete(said(THOUGHT))
    assert (plain.reasoning, plain.text) == ("why so", "42")
    assert plain.usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    stream = whole(stack.stream(said(THOUGHT)))
    assert (stream.reasoning, stream.text) == ("why so", "42") and b"think" not in stream.raw.replace(b"chatcmpl", b"")
    assert of_stream(stream) == of_answer(plain)
    for limit, parts in ((3, ("why", "")), (1, ("", "<thi")), (7, ("why so", ""))):
        cut = stack.complete(said(THOUGHT), max_completion_tokens=limit)
        assert (cut.reasoning, cut.text, cut.finish) == (*parts, "length")
    running = stack.stream(said(THOUGHT), stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in running.data]
    assert counts == sorted(counts) and counts[-1] == 6
    assert "reasoning_content" not in stack.complete(FRANCE, model=REAL, max_tokens=2).choice["message"]


def test_usage_forms(stack: Stack) -> None:
    """As on raw completions: FB-029."""
    prompt = said(script("a", "b", delay_ms=20))
    plain = stack.complete(prompt).usage
    assert whole(stack.stream(prompt)).data[-1]["usage"] == plain
    extra = whole(stack.stream(prompt, stream_options={"include_usage": True})).data
    assert extra[-1]["choices"] == [] and extra[-1]["usage"] == plain and all(c["usage"] is None for c in extra[:-1])
    assert not any("usage" in chunk for chunk in stack.stream(prompt, stream_options={"include_usage": False}).data)
    refused(stack.complete(prompt, stream_options={"include_usage": True}), 400, param="stream_options")


def test_limits(stack: Stack, narrow: Stack) -> None:
    assert stack.complete(said(script(*"abc")), max_completion_tokens=2, max_tokens=1).text == "ab"
    for field in ("max_completion_tokens", "max_tokens"):
        error = stack.complete(FRANCE, model=REAL, **{field: 100_000})
        message = refused(error, 400, param=field, code="context_length_exceeded")
        assert "8192" in message and "100000" in message
    refused(narrow.complete(said("word " * 600), model=REAL), 400, param="messages", code="context_length_exceeded")
    refused(narrow.stream(said("word " * 600), model=REAL), 400, param="messages", code="context_length_exceeded")
    fitted = narrow.complete(FRANCE, model=REAL, max_completion_tokens=10**9, fit_max_tokens=True, stop=["."])
    assert int(fitted.headers["x-sluice-max-tokens"]) == 512 - fitted.usage["prompt_tokens"]
    stopped = stack.complete(FRANCE, model=REAL, max_tokens=4, stop_token_ids=[END], logit_bias={str(END): 100})
    assert (stopped.finish, stopped.text, stopped.usage["completion_tokens"]) == ("stop", "", 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_wrong_fields(stack: Stack, model: str, streamed: bool) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    for field, value, code in (
        ("messages", said(image), "invalid_value"), ("messages", [], "invalid_value"), ("messages", None, "invalid_value"),
        ("temperature", 3, "invalid_value"), ("top_logprobs", 21, "invalid_value"), ("n", 0, "invalid_value"),
        ("logprobs", 2, "invalid_value"), ("functions", [{"name": "f"}], "unsupported_parameter"),
        ("function_call", "auto", "unsupported_parameter"), ("max_completion_tokens", 1.0, "invalid_value"),
        ("reasoning_effort", "banana", "invalid_value"), ("modalities", ["audio"], "invalid_value"),
    ):  # fmt: skip
        body = {"model": model, "messages": FRANCE, "stream": streamed, field: value}
        refused(stack.call("POST", CHATS, body), 400, param=field, code=code)
    names = (
        "metadata verbosity prediction modalities prompt_cache_key safety_identifier tools response_format seed stop"
    )
    answer = stack.complete(FRANCE, model=model, max_tokens=1, **dict.fromkeys(names.split()))
    assert answer.status == 200 and "x-sluice-ignored" not in answer.headers
    refused(stack.complete(FRANCE, model="nobody"), 404, param="model", code="model_not_found")
    answer = stack.complete(FRANCE, model=model, max_tokens=1, best_of=2, echo=True, response_format={"type": "text"})
    assert answer.status == 200 and answer.headers["x-sluice-ignored"] == "best_of, echo"


def test_failures(stack: Stack) -> None:
    """FB-004: before the headers a status, behind them one error event."""
    refused(stack.complete(said(script("a", error_after=1))), 500, code="internal_error")
    with stack.open(said(script("<think>a", "b", delay_ms=150, error_after=2))) as stream:
        stream.read()
        assert stream.status == 200 and stream.reasoning == "ab" and stream.finish is None
        assert (stream.error or {})["code"] == "internal_error" and stream.done == 1
        assert stream.same_connection() == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_hanging_up_frees_the_lane(stack: Stack, streamed: bool) -> None:
    """FB-005, FB-007"""
    wait_for(stack.idle)
    if streamed:
        with stack.open(said(endless(delay_ms=20))) as stream:
            stream.goes_on(3)
            stream.leave()
    else:
        with stack.ask(said(endless(delay_ms=20))) as waiting:
            wait_for(lambda: stack.busy(SCRIPTED) == 1)
            waiting.leave()
    wait_for(lambda: stack.busy(SCRIPTED) == 0, 2)
    wait_for(stack.idle)


def test_chats_and_raw_completions_run_side_by_side(stack: Stack) -> None:
    """Each gets its own, whatever kinds share the engine."""
    with stack.open(said(endless(delay_ms=20))) as chat, stack.open(endless(delay_ms=20)) as raw:
        chat.goes_on(2)
        raw.goes_on(2)
        assert stack.complete(said(script("a"))).text == stack.complete(script("a")).text == "a"
        job = stack.job(chat.id).json
        assert (job["object"], job["status"], job["choices"]) == ("chat.completion", "running", [])
        refused(stack.call("GET", f"/v1/completions/{chat.id}"), 404)
        refused(stack.call("GET", f"{CHATS}/{raw.id}"), 404)
        refused(stack.call("POST", f"{CHATS}/{raw.id}/cancel"), 404)
        assert stack.cancel(chat.id).json["status"] == "cancelled"
        assert (chat.read().error or {})["code"] == "cancelled"
        raw.goes_on(2)
    wait_for(stack.idle)
