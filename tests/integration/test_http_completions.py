"""`POST /v1/completions` over HTTP against the whole product: the contract as a client meets it.

What needs no script runs against both engines (`model`).
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import time
from typing import Any

import pytest

from tests.conftest import script, wait_for
from tests.contract.schemas import check_chunk, check_completion, check_error
from tests.stack import END, PARIS, REAL, SCRIPTED, Answer, Stack, Stream, endless, event_name

STORY = "Once upon a time, there was a little girl"
FRANCE = "The capital of France is"
#: Nearly fills the 512 tokens of `narrow`.
LONG = "word" + " word" * 500
#: Fields that make two runs of one request equal.
FIXED = {"temperature": 0, "seed": 5, "max_tokens": 6}


def refused(answer: Answer | Stream, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """Checks an error response, streamed or not; returns its message."""
    if isinstance(answer, Stream):
        assert answer.answer is not None, f"a stream began: {answer}"
        answer = answer.answer
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    check_error(answer.json)
    if param is not None:
        assert answer.error["param"] == param, answer
    if code is not None:
        assert answer.error["code"] == code, answer
    return answer.error["message"]


def whole(stream: Stream) -> Stream:
    """Checks what holds for every stream that ended well."""
    assert stream.status == 200 and stream.answer is None and stream.ended, stream
    for chunk in stream.data:
        check_chunk(chunk)
    for field in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[field] for chunk in stream.data}) == 1, field
    assert stream.finish in ("stop", "length") and stream.error is None, stream
    assert stream.done == 1 and stream.raw.endswith(b"data: [DONE]\n\n"), stream
    assert b"HTTP/1" not in stream.raw
    names = [event_name(event_id or "none") for event_id in stream.ids]
    assert all(before < after for before, after in itertools.pairwise(names)), stream.ids
    return stream


# The response object


def test_a_completion_has_the_shape_of_the_contract(stack: Stack, model: str) -> None:
    before = int(time.time())
    answer = stack.complete(STORY, model=model, max_tokens=5, temperature=0)
    assert answer.status == 200, answer
    check_completion(answer.json)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["id"] == answer.headers["x-sluice-id"]
    assert answer.json["model"] == model
    assert before <= answer.json["created"] <= time.time()
    assert answer.usage["completion_tokens"] == 5 and answer.finish == "length"
    assert answer.text and not answer.text.startswith(STORY)


def test_chunks_have_the_shape_of_the_contract(stack: Stack, model: str) -> None:
    with stack.open(STORY, model=model, **FIXED) as stream:
        whole(stream.read())
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["x-accel-buffering"] == "no"
        assert {chunk["id"] for chunk in stream.data} == {stream.id}
        assert {chunk["model"] for chunk in stream.data} == {model}
        assert stream.pieces[-1]["finish_reason"] and stream.pieces[-1]["text"] == ""
        assert stream.same_connection() == 200, "the body ended where it said it would"


def test_a_stream_says_what_the_plain_answer_says(stack: Stack, model: str) -> None:
    plain = stack.complete(STORY, model=model, **FIXED)
    stream = whole(stack.stream(STORY, model=model, **FIXED))
    assert (stream.text, stream.finish, stream.usage) == (plain.text, plain.finish, plain.usage)
    if model == REAL:
        assert len(stream.data) > 3, "piece by piece"


def test_without_a_limit_the_text_ends_by_itself(stack: Stack) -> None:
    answer = stack.complete(script("a", " b", " c"), max_tokens=None)
    assert (answer.text, answer.finish, answer.choice["stop_reason"]) == ("a b c", "stop", None)
    assert answer.usage["completion_tokens"] == 4, "the end token counts"


@pytest.mark.parametrize("streamed", [False, True])
def test_echo(stack: Stack, model: str, streamed: bool) -> None:
    fields = {"model": model, **FIXED}
    plain = stack.complete(STORY, **fields)
    if not streamed:
        echoed = stack.complete(STORY, echo=True, **fields)
        assert echoed.text == STORY + plain.text
        assert echoed.usage == plain.usage
        return
    stream = whole(stack.stream(STORY, echo=True, **fields))
    assert stream.pieces[0]["text"] == STORY, "the prompt is the first chunk"
    assert stream.text == STORY + plain.text
    assert stream.usage == plain.usage


def test_echo_is_exact(stack: Stack, model: str) -> None:
    """No trimming, no normalising, also of what a tokenizer would write otherwise."""
    prompt = "  \n\tÄ e\u0301 🌍 <b>&amp;\u2028 \\u0041\" "
    assert stack.complete(prompt, model=model, echo=True, max_tokens=1, temperature=0).text.startswith(prompt)
    assert whole(stack.stream(prompt, model=model, echo=True, max_tokens=1, temperature=0)).text.startswith(prompt)


# Usage


def test_usage_without_stream_options_is_on_the_last_chunk(stack: Stack, model: str) -> None:
    plain = stack.complete(STORY, model=model, **FIXED)
    for options in ({}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": None}}):
        stream = whole(stack.stream(STORY, model=model, **FIXED, **options))
        assert [chunk.get("usage") for chunk in stream.data][:-1] == [None] * (len(stream.data) - 1)
        assert stream.data[-1]["choices"] and stream.data[-1]["usage"] == plain.usage


def test_usage_in_a_chunk_of_its_own(stack: Stack, model: str) -> None:
    plain = stack.complete(STORY, model=model, **FIXED)
    stream = whole(stack.stream(STORY, model=model, **FIXED, stream_options={"include_usage": True}))
    *before, last = stream.data
    assert (last["choices"], last["usage"]) == ([], plain.usage)
    assert all("usage" in chunk and chunk["usage"] is None for chunk in before)
    assert before[-1]["choices"][0]["finish_reason"]


def test_no_usage(stack: Stack, model: str) -> None:
    stream = whole(stack.stream(STORY, model=model, **FIXED, stream_options={"include_usage": False}))
    assert stream.usage is None


def test_running_usage(stack: Stack, model: str) -> None:
    prompt = script(*"abcdefgh", delay_ms=30) if model == SCRIPTED else STORY
    plain = stack.complete(prompt, model=model, **FIXED)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = whole(stack.stream(prompt, model=model, **FIXED, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.data]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert stream.data[-1]["usage"] == plain.usage
    assert {chunk["usage"]["prompt_tokens"] for chunk in stream.data} == {plain.usage["prompt_tokens"]}


def test_stream_options_are_for_streams(stack: Stack, model: str) -> None:
    asked = {"stream_options": {"include_usage": True}}
    refused(stack.complete(STORY, model=model, **asked), 400, param="stream_options")
    refused(stack.stream(STORY, model=model, stream_options={"other": True}), 400, param="stream_options")
    refused(stack.stream(STORY, model=model, stream_options={"include_usage": 1}), 400, param="stream_options")
    assert stack.complete(STORY, model=model, max_tokens=1, stream_options={}).status == 200


# Sampling


def test_the_same_seed_gives_the_same_text(stack: Stack, model: str) -> None:
    fields = {"model": model, "temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    first, again = (stack.complete(STORY, seed=7, **fields).text for _ in range(2))
    assert first == again
    assert whole(stack.stream(STORY, seed=7, **fields)).text == first
    if model == REAL:
        others = {stack.complete(STORY, seed=seed, **fields).text for seed in (8, 9)}
        assert len({first, *others}) == 3


def test_without_a_seed_every_text_is_another(stack: Stack) -> None:
    texts = {stack.complete(STORY, model=REAL, max_tokens=16, temperature=1.0, seed=seed).text for seed in (None, -1)}
    assert len(texts) == 2


def test_greedy(stack: Stack, model: str) -> None:
    """Temperature 0, a tiny one and top_p 0 are the same, whatever the seed."""
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1e-6, "seed": 3}, {"top_p": 0}, {"top_k": 1}]
    texts = {stack.complete(FRANCE, model=model, max_tokens=8, **way).text for way in ways}
    assert len(texts) == 1
    if model == REAL:
        assert texts.pop().startswith(" Paris")


def test_logit_bias_forces_and_forbids(stack: Stack) -> None:
    forced = stack.complete(STORY, model=REAL, max_tokens=3, temperature=0, logit_bias={str(PARIS): 100})
    assert forced.text == " Paris" * 3
    forbidden = stack.complete(FRANCE, model=REAL, max_tokens=8, temperature=0, logit_bias={str(PARIS): -100})
    assert not forbidden.text.startswith(" Paris") and len(forbidden.text) > 0


def test_logit_bias_of_a_script_that_leaves_a_choice(stack: Stack) -> None:
    prompt = json.dumps({"prefer": ["a", "b"]})
    assert stack.complete(prompt, max_tokens=3).text == "aaa"
    assert stack.complete(prompt, max_tokens=3, logit_bias={"97": -100}).text == "bbb"
    assert stack.complete(prompt, max_tokens=3, logit_bias={"122": 100}).text == "zzz"


def test_the_end_token_and_how_it_is_put_off(stack: Stack) -> None:
    """The end token is made the likeliest; it ends the text at once, later, or never."""
    fields = {"model": REAL, "temperature": 0, "logit_bias": {str(END): 100}}
    at_once = stack.complete(STORY, **fields)
    assert (at_once.text, at_once.finish, at_once.usage["completion_tokens"]) == ("", "stop", 1)
    later = stack.complete(STORY, min_tokens=4, **fields)
    assert (later.finish, later.usage["completion_tokens"]) == ("stop", 5) and later.text
    never = stack.complete(STORY, ignore_eos=True, max_tokens=6, **fields)
    assert (never.finish, never.usage["completion_tokens"]) == ("length", 6) and never.text
    for more in ({}, {"min_tokens": 4}, {"ignore_eos": True, "max_tokens": 6}):
        plain, stream = stack.complete(STORY, **fields, **more), whole(stack.stream(STORY, **fields, **more))
        assert (stream.text, stream.finish, stream.usage) == (plain.text, plain.finish, plain.usage)


def test_stop_token_ids(stack: Stack) -> None:
    fields = {"model": REAL, "temperature": 0, "max_tokens": 8, "stop_token_ids": [PARIS]}
    answer = stack.complete(FRANCE, **fields)
    assert (answer.text, answer.finish, answer.choice["stop_reason"]) == ("", "stop", PARIS)
    assert answer.usage["completion_tokens"] == 1
    stream = whole(stack.stream(FRANCE, **fields))
    assert (stream.text, stream.stop_reason, stream.usage) == ("", PARIS, answer.usage)
    put_off = stack.complete(FRANCE, min_tokens=3, **fields)
    assert put_off.usage["completion_tokens"] >= 3 and not put_off.text.startswith(" Paris")


def test_stop_strings_on_the_real_model(stack: Stack) -> None:
    """Cut out of what it would say, so that they lie across its tokens."""
    fields = {"model": REAL, "temperature": 0, "max_tokens": 16}
    text = stack.complete(STORY, **fields).text
    for begin, end in ((3, 5), (7, 16), (len(text) - 4, len(text))):
        stop = text[begin:end]
        want = text[: text.index(stop)]
        answer = stack.complete(STORY, stop=["never so", stop], **fields)
        assert (answer.text, answer.finish, answer.choice["stop_reason"]) == (want, "stop", stop)
        stream = whole(stack.stream(STORY, stop=stop, **fields))
        assert (stream.text, stream.finish, stream.stop_reason, stream.usage) == (want, "stop", stop, answer.usage)
    other = stack.complete(STORY, stop=[text[:3] + "\0", text[-2:] + "\0"], **fields)
    assert (other.text, other.finish) == (text, "length"), "what was held back comes out"


# max_tokens and the context

EVERYTHING: list[dict[str, Any]] = [{}, {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": -1}]


def context(stack: Stack, model: str) -> int:
    return stack.call("GET", f"/v1/models/{model}").json["max_model_len"]


@pytest.mark.parametrize("limit", EVERYTHING)
def test_no_limit_means_all_remaining_context(stack: Stack, narrow: Stack, model: str, limit: dict[str, Any]) -> None:
    if model == SCRIPTED:
        answer = stack.complete(endless(), **limit)
        assert answer.usage["total_tokens"] == context(stack, SCRIPTED)
        assert answer.text == "tick " * answer.usage["completion_tokens"]
    else:
        answer = narrow.complete(LONG, model=model, ignore_eos=True, **limit)
        assert answer.usage["total_tokens"] == context(narrow, model) == 512
        assert 1 < answer.usage["completion_tokens"] < 20
    assert answer.finish == "length"


def test_no_limit_streamed(narrow: Stack) -> None:
    stream = whole(narrow.stream(LONG, model=REAL, ignore_eos=True))
    assert stream.finish == "length" and stream.usage and stream.usage["total_tokens"] == 512


def test_exactly_the_room_left_and_one_more(stack: Stack, model: str) -> None:
    prompt = script("x") if model == SCRIPTED else STORY
    fields: dict[str, Any] = {"model": model} if model == SCRIPTED else {"model": model, "logit_bias": {str(END): 100}}
    length = stack.complete(prompt, max_tokens=1, **fields).usage["prompt_tokens"]
    limit = context(stack, model)
    assert stack.complete(prompt, max_tokens=limit - length, **fields).status == 200
    too_many = limit - length + 1
    for answer in (
        stack.complete(prompt, max_tokens=too_many, **fields),
        stack.stream(prompt, max_tokens=too_many, **fields),
    ):
        message = refused(answer, 400, param="max_tokens", code="context_length_exceeded")
        for number in (limit, length, too_many):
            assert str(number) in message, f"{number} is not named: {message}"


def test_far_too_many_tokens(stack: Stack, model: str) -> None:
    for answer in (
        stack.complete(STORY, model=model, max_tokens=100_000_000),
        stack.stream(STORY, model=model, max_tokens=100_000_000),
    ):
        message = refused(answer, 400, param="max_tokens", code="context_length_exceeded")
        assert "100000000" in message and str(context(stack, model)) in message


def test_a_prompt_longer_than_the_context(stack: Stack, narrow: Stack, model: str) -> None:
    server = stack if model == SCRIPTED else narrow
    prompt = "word " * (context(server, model) + 1)
    for answer in (server.complete(prompt, model=model), server.stream(prompt, model=model)):
        message = refused(answer, 400, param="prompt", code="context_length_exceeded")
        assert str(context(server, model)) in message and "-" not in message


def test_a_prompt_that_fills_the_context(stack: Stack) -> None:
    """There is no room for one token: an error, never an empty text."""
    length = context(stack, SCRIPTED)
    refused(stack.complete("x" * length), 400, code="context_length_exceeded")
    answer = stack.complete("x" * (length - 1))
    assert answer.usage["completion_tokens"] == 1 and answer.finish == "length"


def test_a_limit_that_may_be_cut(stack: Stack, model: str) -> None:
    fields: dict[str, Any] = {"model": model} if model == SCRIPTED else {"model": model, "logit_bias": {str(END): 100}}
    answer = stack.complete(STORY, max_tokens=100_000_000, fit_max_tokens=True, **fields)
    room = context(stack, model) - answer.usage["prompt_tokens"]
    assert answer.headers["x-sluice-max-tokens"] == str(room)


# Errors

WRONG: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (1.5, "10", True, 2.0)],
    *[("temperature", value) for value in (-0.1, 2.1, "1", True)],
    *[("top_p", value) for value in (-0.1, 1.1, "0.5")],
    *[("n", value) for value in (0, -1, 1.5, True, 129)],
    *[("best_of", value) for value in (0, 21, "2")],
    *[("stop", value) for value in ("", [""], [1], [None], 5, {"a": "b"}, ["a"] * 65, "x" * 1001)],
    *[("stream", value) for value in ("true", 1, {})],
    *[("echo", value) for value in ("yes", 0)],
    *[("logprobs", value) for value in (-1, 21, True, "1")],
    *[("logit_bias", value) for value in ({"1": 101}, {"x": 1}, {"-1": 1}, {"99999999": 1}, {"1": "1"}, [], 5)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (3, "1")],
    *[("repetition_penalty", value) for value in (0, "1")],
    *[("seed", value) for value in ("1", 1.5, 2**63)],
    *[("prompt", value) for value in ([], [True], [1, "a"], [[]], [[1], "a"], {"a": 1}, 5, [99999999], [-1])],
    *[("min_p", value) for value in (2, -1)],
    ("top_k", -2),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("stop_token_ids", [99999999]),
    ("stop_token_ids", ["1"]),
    ("user", 5),
    ("suffix", 5),
    ("stream_options", "x"),
    ("reasoning_effort", "banana"),
]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_wrong_field_is_a_400_that_names_it(stack: Stack, model: str, streamed: bool) -> None:
    queued = stack.queue(model)
    for field, value in WRONG:
        request = {"model": model, "prompt": "x", "max_tokens": 1, **({"stream": True} if streamed else {}), field: value}
        answer = stack.call("POST", "/v1/completions", request)
        assert answer.status == 400, (field, value, answer)
        check_error(answer.json)
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"] == field, (field, value, answer)
        assert "x-sluice-id" not in answer.headers, "nothing was queued"
    assert stack.queue(model) == queued


UNSUPPORTED: list[tuple[str, Any]] = [
    ("dry_multiplier", 0.5),
    ("xtc_probability", 0.5),
    ("mirostat_mode", 2),
    ("temperature_last", True),
    ("smoothing_factor", 0.1),
    ("banned_strings", ["x"]),
    ("token_healing", True),
]


def test_what_is_not_served_is_said(stack: Stack, model: str) -> None:
    """Never ignored, never 500: a client that asks for it would otherwise believe that it got it."""
    for field, value in UNSUPPORTED:
        for answer in (
            stack.complete("x", model=model, max_tokens=1, **{field: value}),
            stack.stream("x", model=model, max_tokens=1, **{field: value}),
        ):
            refused(answer, 400, param=field, code="unsupported_parameter")
        assert stack.complete("x", model=model, max_tokens=1, **{field: None}).status == 200


def test_unknown_fields_are_ignored_and_named(stack: Stack, model: str) -> None:
    answer = stack.complete("x", model=model, max_tokens=1, surprise=1, another={"a": 1}, nothing=None)
    assert answer.status == 200
    assert answer.headers["x-sluice-ignored"] == "surprise, another"
    many = stack.complete("x", model=model, max_tokens=1, **{f"f{i}": i for i in range(15)}, **{"bad\nname": 1})
    assert many.headers["x-sluice-ignored"] == ", ".join(f"f{i}" for i in range(10)) + ", +6"
    stream = stack.stream("x", model=model, max_tokens=1, surprise=1)
    assert stream.headers["x-sluice-ignored"] == "surprise"
    assert "x-sluice-ignored" not in stack.complete("x", model=model, max_tokens=1).headers


@pytest.mark.parametrize("name", ["", "no-such-model", "../scripted", "scripted\n", "SCRIPTED"])
def test_a_model_that_does_not_exist(stack: Stack, name: str) -> None:
    for answer in (stack.complete("x", model=name), stack.stream("x", model=name)):
        refused(answer, 404, param="model", code="model_not_found")


def test_an_engine_that_fails_is_a_500_without_inside_information(stack: Stack) -> None:
    answer = stack.complete(script("a", "b", error_after=1))
    refused(answer, 500, code="internal_error")
    assert b"Traceback" not in answer.raw and b".py" not in answer.raw
    at_once = stack.stream(script("a", error_after=0))
    assert at_once.answer is None or at_once.answer.status == 500
    assert (at_once.error or at_once.answer and at_once.answer.error)["code"] == "internal_error"


def test_a_failure_after_the_headers_is_one_error_event(stack: Stack) -> None:
    with stack.open(script("a", "b", "c", "d", delay_ms=120, error_after=3)) as stream:
        stream.read()
        assert stream.status == 200 and stream.text == "abc" and stream.finish is None
        assert [sorted(event) for event in stream.data if "error" in event] == [["error"]]
        check_error({"error": stream.error})
        assert stream.error and stream.error["type"] == "server_error"
        assert stream.raw.endswith(b"data: [DONE]\n\n") and stream.done == 1
        assert b"HTTP/1" not in stream.raw and stream.usage is None
        assert stream.same_connection() == 200, "one response, and the connection is in step"


# Headers


def test_every_response_has_a_request_id_and_a_time(stack: Stack, model: str) -> None:
    answers = [
        stack.call("GET", "/health"),
        stack.call("GET", "/v1/models"),
        stack.call("GET", "/nope"),
        stack.call("PUT", "/v1/completions"),
        stack.call("OPTIONS", "/v1/completions"),
        stack.complete("x", model=model, max_tokens=1),
        stack.complete("x", model="no-such-model"),
        stack.call("POST", "/v1/completions", raw=b"{bad"),
    ]
    stream = stack.stream("x", model=model, max_tokens=1)
    for headers in [*(answer.headers for answer in answers), stream.headers]:
        assert headers["x-request-id"], headers
        assert int(headers["openai-processing-ms"]) >= 0
        assert not {"x-powered-by", "set-cookie"} & headers.keys()
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    accepted = [answer for answer in answers if "x-sluice-id" in answer.headers]
    assert len(accepted) == 1 and "x-sluice-id" in stream.headers


def test_the_clients_request_id_comes_back(stack: Stack) -> None:
    def sent(**headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return stack.call("GET", "/health", headers=named).headers["x-request-id"]

    assert sent(X_Request_Id="mine 1!") == "mine 1!"
    assert sent(X_Client_Request_Id="mine 2") == "mine 2"
    assert sent(X_Request_Id="first", X_Client_Request_Id="second") == "first"
    assert sent(X_Request_Id="x" * 128) == "x" * 128
    assert sent(X_Request_Id="x" * 129).startswith("req-")
    assert sent(X_Request_Id="ä").startswith("req-")
    assert sent(X_Request_Id="x" * 129, X_Client_Request_Id="second") == "second"
    with stack.open(script("a"), headers={"X-Request-Id": "of a stream"}) as stream:
        assert stream.headers["x-request-id"] == "of a stream"


def test_errors_worth_repeating_are_told_from_others(stack: Stack) -> None:
    assert "x-should-retry" not in stack.complete("x", temperature=9).headers
    assert "x-should-retry" not in stack.complete("x", model="no-such-model").headers


# Methods, paths, bodies


def test_methods(stack: Stack) -> None:
    listed = stack.call("GET", "/v1/models")
    head = stack.call("HEAD", "/v1/models")
    assert (head.status, head.raw) == (200, b"")
    assert head.headers["content-length"] == listed.headers["content-length"]
    for path, allowed in (("/v1/completions", {"POST", "OPTIONS"}), ("/v1/models", {"GET", "HEAD", "OPTIONS"})):
        options = stack.call("OPTIONS", path)
        assert (options.status, options.raw) == (204, b"")
        assert set(options.headers["allow"].split(", ")) == allowed
        assert "content-type" not in options.headers
        assert not any(name.startswith("access-control") for name in options.headers)
        for method in {"GET", "HEAD", "PUT", "DELETE", "PATCH", "POST"} - allowed:
            answer = stack.call(method, path, {} if method not in ("GET", "HEAD") else None)
            assert answer.status == 405 and set(answer.headers["allow"].split(", ")) == allowed, (method, answer)
            if method != "HEAD":
                refused(answer, 405, code="method_not_allowed")


def test_paths(stack: Stack) -> None:
    for path in ("/nope", "/v1/nope", "/v1", "/v1/completions/x/y", "/v1//completions", "/%00", "/v1/completions%20"):
        for method in ("GET", "POST"):
            refused(stack.call(method, path, {} if method == "POST" else None), 404)
    for path in ("/v1/models/", "/v1/models?x=1", "/health/", "/ready", "/v1/status"):
        assert stack.call("GET", path).status == 200, path
    assert stack.call("POST", "/v1/completions/?x=1", {"model": SCRIPTED, "prompt": "x"}).status == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_does_not_say_it_is_json(stack: Stack, kind: str) -> None:
    raw = b'{"model":"scripted","prompt":"x"}'
    answer = stack.call("POST", "/v1/completions", raw=raw, headers={"Content-Type": kind})
    refused(answer, 415, code="unsupported_media_type")


def test_json_may_name_its_charset(stack: Stack) -> None:
    raw = '{"model":"scripted","prompt":"ä"}'.encode()
    for kind in ("application/json; charset=utf-8", "Application/JSON;charset=UTF-8"):
        assert stack.call("POST", "/v1/completions", raw=raw, headers={"Content-Type": kind}).text == "ä"


def test_a_body_that_is_too_large(stack: Stack) -> None:
    raw = b'{"model":"scripted","prompt":"' + b"x" * 11_000_000 + b'"}'
    refused(stack.call("POST", "/v1/completions", raw=raw), 413, code="body_too_large")
    announced = stack.call("POST", "/v1/completions", raw=raw[:0], headers={"Content-Length": "20000000000"})
    refused(announced, 413, code="body_too_large")
    assert stack.complete("x").status == 200


def test_many_requests_on_one_connection(stack: Stack) -> None:
    """Answers of every kind leave the connection in step."""
    client = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
    requests: list[tuple[dict[str, Any], int]] = [
        ({"prompt": "a", "stream": True}, 200),
        ({"prompt": "a"}, 200),
        ({"prompt": "a", "n": 0}, 400),
        ({"prompt": "a", "model": "none"}, 404),
        ({"prompt": script("a", error_after=0)}, 500),
    ]
    for request, status in requests * 3:
        content = json.dumps({"model": SCRIPTED, **request})
        client.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        with client.getresponse() as response:
            read = response.read()
            assert response.status == status and b"HTTP/1" not in read
    client.close()


def test_pipelined_requests_are_answered_one_after_the_other(stack: Stack) -> None:
    content = b'{"model":"scripted","prompt":"a b"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    one = head + b"Content-Length: %d\r\n\r\n" % len(content) + content
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", stack.port), timeout=20) as client:
        client.sendall(one + one + last)
        read = b"".join(iter(lambda: client.recv(65536), b""))
    assert read.count(b"HTTP/1.1 200") == 3 and read.count(b'"text":"a b"') == 2


# Models


def test_models(stack: Stack) -> None:
    listed = stack.call("GET", "/v1/models").json
    assert listed["object"] == "list" and {model["id"] for model in listed["data"]} == {SCRIPTED, REAL}
    for model in listed["data"]:
        assert model["object"] == "model" and isinstance(model["created"], int) and model["owned_by"]
        assert stack.call("GET", f"/v1/models/{model['id']}").json == model
    refused(stack.call("GET", "/v1/models/no/such/model"), 404, code="model_not_found")


def test_an_alias_answers_under_the_real_id(narrow: Stack) -> None:
    answer = narrow.complete(FRANCE, model="small", max_tokens=2, temperature=0)
    assert answer.json["model"] == REAL and answer.text.startswith(" Paris")
    stream = whole(narrow.stream(FRANCE, model="small", max_tokens=2, temperature=0))
    assert {chunk["model"] for chunk in stream.data} == {REAL}
    assert narrow.call("GET", "/v1/models/small").json["id"] == REAL
    assert narrow.models() == [SCRIPTED, REAL]


def test_the_default_model_is_the_only_real_one(stack: Stack) -> None:
    """`scripted` does not count where another is served."""
    for name in ({}, {"model": None}):
        answer = stack.call("POST", "/v1/completions", {"prompt": FRANCE, "max_tokens": 2, "temperature": 0, **name})
        assert answer.json["model"] == REAL and answer.text.startswith(" Paris")


# Comments of a stream


def test_a_stream_that_waits_says_where_it_stands(narrow: Stack, model: str) -> None:
    prompt = endless(delay_ms=20) if model == SCRIPTED else STORY
    wait_for(narrow.idle)
    with narrow.open(prompt, model=model, ignore_eos=True) as first:
        first.goes_on()
        with narrow.open("x", model=model, max_tokens=1) as second, narrow.open("y", model=model, max_tokens=1) as third:
            assert (second.status, third.status) == (200, 200), "the headers do not wait for a lane"
            second.read(lambda stream: stream.comments, 5)
            third.read(lambda stream: stream.comments, 5)
            assert second.comments[0].startswith(": queued position=1")
            assert third.comments[0].startswith(": queued position=2")
            assert not second.data and not third.data
            first.leave()
            for stream in (second, third):
                whole(stream.read())
                for line in stream.raw.split(b"\n\n"):
                    assert not line.startswith(b":") or b"\n" in line, "a comment has no blank line of its own"
    wait_for(narrow.idle)


def test_a_silent_stream_is_kept_alive(narrow: Stack) -> None:
    wait_for(narrow.idle)
    stream = whole(narrow.stream(script("a", "b", start_delay_ms=3500)))
    assert stream.text == "ab"
    assert len([line for line in stream.comments if line == ": keep-alive"]) >= 2, stream.comments
    assert not any(line.startswith(": ping") for line in stream.comments)
