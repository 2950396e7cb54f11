"""Field cases of the legacy completions API: prompts, scoring, logprobs, choices. From outside, on the whole product.

What needs no script runs against both engines (`model`). The rest of this kind is in test_field_cases.py; FB-009 and
FB-034 on a model that adds a BOS, and FB-133 on one with tokens for it, are in test_gap_and_specials.py.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import script
from tests.contract.schemas import check_completion
from tests.integration.test_field_cases import both
from tests.integration.test_http_completions import FRANCE, STORY, refused, whole
from tests.scores import aligned, joined
from tests.stack import END, PARIS, REAL, SCRIPTED, Answer, Stack, hexes

#: Two runs with these are equal.
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 5, "ignore_eos": True}


def choices(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer
    check_completion(answer.json)
    return answer.json["choices"]


def ids_of(stack: Stack, model: str, text: str) -> list[int]:
    answer = stack.call("POST", "/tokenize", {"model": model, "prompt": text})
    assert answer.status == 200, answer
    return answer.json["tokens"]


def test_fb008_scoring_without_a_new_token(stack: Stack, model: str) -> None:
    prompt = "Your answer: Yes"
    fields = {"model": model, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    answer = stack.complete(prompt, **fields)
    assert (answer.text, answer.finish, answer.usage["completion_tokens"]) == (prompt, "length", 0)
    count = answer.usage["prompt_tokens"]
    aligned(answer.choice["logprobs"], prompt, entries=count, best=1, scored_prompt=count)
    stream = whole(stack.stream(prompt, **fields))
    assert (stream.text, stream.finish, stream.usage) == (prompt, "length", answer.usage)
    assert joined(stream.pieces) == answer.choice["logprobs"]


def test_fb008_scoring_many_at_once(stack: Stack, model: str) -> None:
    """As evaluations do it: continuations of one question, several choices, token ids."""
    prompts = [ids_of(stack, model, f"Question: 2 + 2 =\nAnswer:{end}") for end in (" 4", " five", "")]
    scored = choices(stack.complete(prompts, model=model, echo=True, logprobs=1, max_tokens=0, n=2))
    assert [choice["index"] for choice in scored] == list(range(6))
    for number, prompt in enumerate(prompts):
        first, second = scored[2 * number : 2 * number + 2]
        assert first["logprobs"] == second["logprobs"]
        aligned(first["logprobs"], first["text"], entries=len(prompt), best=1, scored_prompt=len(prompt))
    alone = stack.complete(prompts[1], model=model, echo=True, logprobs=1, max_tokens=0).choice["logprobs"]
    assert scored[2]["logprobs"]["tokens"] == alone["tokens"]
    assert scored[2]["logprobs"]["token_logprobs"][1:] == pytest.approx(alone["token_logprobs"][1:], abs=0.05)


@pytest.mark.parametrize("streamed", [False, True])
def test_fb008_a_long_prompt_is_scored_whole_for_every_choice(stack: Stack, streamed: bool) -> None:
    """Its logprobs come in pieces, and the other choices have text before they are all there."""
    prompt = script("a", "b") + " " * 3000
    fields = {"echo": True, "logprobs": 0, "n": 3, "stop": ["b"]}
    plain = choices(stack.complete(prompt, **fields))
    for choice in plain:
        assert (choice["text"], choice["finish_reason"]) == (prompt + "a", "stop")
        aligned(choice["logprobs"], choice["text"], entries=len(prompt) + 1, best=0, scored_prompt=len(prompt))
    if streamed:
        with stack.open(prompt, **fields) as stream:
            stream.read()
        for choice in plain:
            assert joined(stream.pieces, choice["index"]) == choice["logprobs"]


def test_fb009_echo_and_logprobs_score_the_prompt_and_the_text(stack: Stack, model: str) -> None:
    prompt = "The cat sat on the mat"
    answer = stack.complete(prompt, model=model, echo=True, logprobs=1, max_tokens=1, **GREEDY)
    usage, scores = answer.usage, answer.choice["logprobs"]
    aligned(scores, answer.text, entries=usage["total_tokens"], best=1, scored_prompt=usage["prompt_tokens"])
    assert "".join(scores["tokens"]) == answer.text
    assert answer.text.startswith(prompt) and len(answer.text) > len(prompt)
    tokens = ids_of(stack, model, prompt)
    again = stack.complete(tokens, model=model, echo=True, logprobs=1, max_tokens=1, **GREEDY)
    if model == REAL:
        assert (again.text, again.usage) == (answer.text, answer.usage)
        assert again.choice["logprobs"]["tokens"] == scores["tokens"]
    assert again.choice["logprobs"]["text_offset"][: len(tokens)] == scores["text_offset"][: len(tokens)]


def test_fb009_the_end_token_has_an_entry(stack: Stack) -> None:
    answer = stack.complete(script("a", "b"), logprobs=0)
    assert answer.choice["logprobs"]["tokens"] == ["a", "b", "<|257|>"]
    length = len(script("a", "b"))
    assert answer.choice["logprobs"]["text_offset"] == [length, length + 1, length + 2]
    bias = {str(END): 100}
    answer = stack.complete(FRANCE, model=REAL, logprobs=0, temperature=0, logit_bias=bias)
    assert (answer.text, answer.choice["logprobs"]["tokens"]) == ("", ["<|im_end|>"])
    assert answer.choice["logprobs"]["text_offset"] == [len(FRANCE)]
    stream = whole(stack.stream(FRANCE, model=REAL, logprobs=0, temperature=0, logit_bias=bias))
    assert stream.pieces[-1]["logprobs"] == answer.choice["logprobs"], "on the finish chunk"


def test_fb012_every_form_of_prompt(stack: Stack, model: str) -> None:
    fields = {"model": model, "max_tokens": 1, "temperature": 0}
    for prompt, count, tokens in (([1, 345, 222], 1, 3), ([[1, 345], [222]], 2, 3), (["a", "b"], 2, 2)):
        answer = stack.complete(prompt, **fields)
        assert len(choices(answer)) == count and answer.usage["prompt_tokens"] == tokens, answer
    for wrong in ([], [1, "a"], ["a", 1], [[1], "a"], [[1], 2], [[]], [[1], []], [True], [[True]], [[["a"]]], {}, 5):
        refused(stack.complete(wrong, **fields), 400, param="prompt")
    tokens = ids_of(stack, model, " déjà vu\n🌍")
    echoed = stack.complete(tokens, echo=True, **fields)
    assert echoed.text.startswith(" déjà vu\n🌍")
    assert stack.complete(tokens, **fields).text == echoed.text.removeprefix(" déjà vu\n🌍")


def test_fb013_an_id_beyond_the_vocabulary(stack: Stack, model: str) -> None:
    workers = stack.workers()
    for prompt in ([99999999], [[1], [99999999]], [65_600, 1], [2**31], [2**63 - 1]):
        for answer in (
            stack.complete(prompt, model=model, max_tokens=1),
            stack.stream(prompt, model=model, max_tokens=1),
        ):
            message = refused(answer, 400, param="prompt")
            assert "vocabulary" in message
    assert "x-sluice-id" not in stack.complete([99999999], model=model).headers, "not queued"
    assert stack.complete(STORY, model=model, max_tokens=1).status == 200
    assert stack.workers() == workers


def test_fb023_minus_infinity_is_json(stack: Stack, model: str) -> None:
    """Raw values, whatever is masked; what is minus infinity all the same is -9999."""
    prompt = script("a", "b", logprobs=[-1e308, -20000.0]) if model == SCRIPTED else STORY
    fields = {"model": model, "max_tokens": 2, "logprobs": 5, "top_k": 1, "logit_bias": {"5": -100}, "seed": 1}
    answer = stack.complete(prompt, **fields)
    scores = answer.choice["logprobs"]
    assert len(scores["tokens"]) == 2
    assert all(isinstance(value, float) and value <= 0 for value in scores["token_logprobs"])
    assert all(len(top) in (5, 6) for top in scores["top_logprobs"])
    for word in (b"NaN", b"Infinity", b"1e999"):
        assert word not in answer.raw
    stream = whole(stack.stream(prompt, **fields))
    assert joined(stream.pieces) == scores


def test_fb028_an_empty_prompt(stack: Stack) -> None:
    """From BOS where there is one, else 400; those who come later are served."""
    for prompt in ("", [""], ["", "a"], ["a", None], None):
        message = refused(stack.complete(prompt), 400, param="prompt")
        assert "empty" in message
        refused(stack.stream(prompt), 400, param="prompt")
    refused(stack.call("POST", "/v1/completions", {"model": SCRIPTED}), 400, param="prompt")
    assert stack.complete("x").status == 200
    fields = {"model": REAL, "max_tokens": 2, **GREEDY}
    texts = {stack.complete(prompt, **fields).text for prompt in ("", [""], None, [None])}
    left_out = stack.call("POST", "/v1/completions", fields)
    assert texts == {left_out.text} and left_out.usage["prompt_tokens"] == 1
    mixed = stack.complete(["", "a"], **fields)
    assert len(choices(mixed)) == 2 and mixed.usage["prompt_tokens"] == 2
    echoed = stack.complete("", echo=True, logprobs=0, **fields)
    assert (echoed.text, len(echoed.choice["logprobs"]["tokens"])) == (left_out.text, 2), "BOS is not echoed"


def test_fb034_no_bos_where_the_model_adds_none(stack: Stack, model: str) -> None:
    bos = "<|im_start|>" if model == REAL else "<|256|>"
    for text in ("hi", f"{bos}hi", "<s>hi"):
        count = len(ids_of(stack, model, text))
        for more in ({}, {"add_special_tokens": False}):
            answer = stack.complete(text, model=model, echo=True, logprobs=0, max_tokens=1, temperature=0, **more)
            assert answer.usage["prompt_tokens"] == count and answer.text.startswith(text)
            assert len(answer.choice["logprobs"]["tokens"]) == count + answer.usage["completion_tokens"]
    first = stack.complete(f"{bos}hi", model=model, echo=True, logprobs=0, max_tokens=1).choice["logprobs"]["tokens"]
    assert first.count(bos) == 1 and first[0] == bos
    written = stack.complete(f"{bos}hi", model=model, max_tokens=1, parse_special=False)
    assert written.usage["prompt_tokens"] > len(ids_of(stack, model, f"{bos}hi")), "as ordinary characters"


@pytest.mark.parametrize("prompt", [[-1], [[-1]], [1.0], [9223372036854775808], [1, -1], [[1], [-5]], [1e3], [2**70]])
def test_fb041_negative_and_other_impossible_ids(stack: Stack, model: str, prompt: Any) -> None:
    refused(stack.complete(prompt, model=model, max_tokens=1), 400, param="prompt")
    refused(stack.stream(prompt, model=model, max_tokens=1), 400, param="prompt")


def test_fb042_logit_bias(stack: Stack, model: str) -> None:
    wrong: list[Any] = [{"191222222": -100}, {"-1": 1}, {"abc": 1}, {"5": 101}, {"5": -100.5}, {"5": None}, {" 5": 1}]
    wrong += [{"5": True}, {"5": "1"}, {"": 1}, {"5.0": 1}, {"٥": 1}, {str(token): 1 for token in range(5000)}, [5]]
    for bias in wrong:
        answer = stack.complete(STORY, model=model, max_tokens=1, logit_bias=bias)
        assert answer.status == 400, (str(bias)[:50], answer)
        refused(answer, 400, param="logit_bias")
    plain = stack.complete(FRANCE, model=model, max_tokens=2, **GREEDY).text
    assert stack.complete(FRANCE, model=model, max_tokens=2, logit_bias={}, **GREEDY).text == plain
    many = {str(token): -1 for token in range(300)}
    assert stack.complete(FRANCE, model=model, max_tokens=1, logit_bias=many).status == 200
    if model == REAL:
        barred = stack.complete(FRANCE, model=model, max_tokens=1, logit_bias={str(PARIS): -100}, **GREEDY)
        forced = stack.complete(STORY, model=model, max_tokens=1, logit_bias={str(PARIS): 100}, **GREEDY)
        assert plain.startswith(" Paris") and barred.text != " Paris" and forced.text == " Paris"


def test_fb123_every_choice_has_its_index_and_its_text(stack: Stack, model: str) -> None:
    prompt: str = STORY
    if model == SCRIPTED:
        prompt = json.dumps({"delay_ms": 5, "choices": [{"pieces": [f"{n}", "🌍", "."]} for n in range(3)]})
    fields = {"model": model, "n": 3, "max_tokens": 4, "temperature": 1, "seed": 11, "ignore_eos": True}
    plain = choices(stack.complete(prompt, **fields))
    assert [choice["index"] for choice in plain] == [0, 1, 2]
    with stack.open(prompt, **fields) as stream:
        stream.read()
    assert {piece["index"] for piece in stream.pieces} == {0, 1, 2}
    for choice in plain:
        mine = [piece for piece in stream.pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [choice["finish_reason"]]
    assert len({choice["text"] for choice in plain}) == 3
    one = stack.complete(prompt, **{**fields, "n": 1})
    assert one.text == plain[0]["text"], "the first choice is the same for any n"


def test_fb124_best_of(stack: Stack, model: str) -> None:
    def ask(**fields: Any) -> Any:
        return (stack.stream if fields.get("stream") else stack.complete)(STORY, model=model, max_tokens=3, **fields)

    with stack.open(STORY, model=model, max_tokens=3, n=2, best_of=2) as stream:
        assert {piece["index"] for piece in stream.read().pieces} == {0, 1}
    refused(ask(n=2, best_of=1), 400, param="best_of")
    refused(ask(n=1, best_of=3, stream=True), 400, param="best_of")
    assert len(choices(ask(n=2, best_of=None))) == 2
    for n in (129, 0, -1):
        refused(ask(n=n), 400, param="n")
    refused(ask(n=1, best_of=21), 400, param="best_of")
    refused(ask(n=1, best_of=0), 400, param="best_of")
    if model == SCRIPTED:
        assert len(choices(ask(n=128))) == 128


def test_fb124_best_of_keeps_the_likeliest_and_counts_all(stack: Stack) -> None:
    values = [[-2.0, -2.0], [-1.0, -0.5], [-0.5, -3.0]]
    prompt = json.dumps({"choices": [{"pieces": [f"{n}"], "logprobs": lp} for n, lp in enumerate(values)]})
    answer = stack.complete(prompt, best_of=3)
    assert (answer.text, answer.usage["completion_tokens"]) == ("1", 6)
    assert answer.usage["prompt_tokens"] == len(prompt), "the prompt counts once"
    two = stack.complete(prompt, n=2, best_of=3, logprobs=0)
    assert [choice["text"] for choice in choices(two)] == ["1", "2"]
    assert choices(two)[0]["logprobs"]["token_logprobs"] == [-1.0, -0.5]
    fields = {"model": REAL, "max_tokens": 6, "temperature": 1, "seed": 4, "logprobs": 0, "ignore_eos": True}
    several = choices(stack.complete(STORY, n=3, **fields))
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in several]
    best = stack.complete(STORY, best_of=3, **fields)
    assert best.text == several[means.index(max(means))]["text"] and best.usage["completion_tokens"] == 18


def as_bytes(token: str) -> bytes:
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()


def test_fb125_tokens_join_to_the_text(stack: Stack, model: str) -> None:
    for prompt in ("\n1. Carol has 20", "a 🌍 b", "  two  spaces\n\n", "ﬁ e\u0301 ä", "\ufffd"):
        answer = stack.complete(prompt, model=model, echo=True, logprobs=2, max_tokens=3, **GREEDY)
        scores = answer.choice["logprobs"]
        count = answer.usage["prompt_tokens"]
        entries = count + answer.usage["completion_tokens"]
        aligned(scores, answer.text, entries=entries, best=2, scored_prompt=count)
        shown = (token for token in scores["tokens"] if token not in ("<|257|>", "<|im_end|>"))
        assert b"".join(as_bytes(token) for token in shown).decode(errors="replace") == answer.text


def test_fb126_tokens_that_are_no_text_are_strings_all_the_same(stack: Stack) -> None:
    answer = stack.complete(hexes("f09f", "8c8d", "c3", "a9", "41"), logprobs=5)
    scores = answer.choice["logprobs"]
    want = ["bytes:\\xf0\\x9f", "bytes:\\x8c\\x8d", "bytes:\\xc3", "bytes:\\xa9", "A", "<|257|>"]
    assert (answer.text, scores["tokens"]) == ("🌍éA", want)
    begin = scores["text_offset"][0]
    assert [offset - begin for offset in scores["text_offset"]] == [0, 0, 1, 1, 2, 3]
    # two ids with one string: the higher value stays, unless ids are asked for
    twice = script("\0", "\0", logprobs=[-0.5, -40.0])
    scores = stack.complete(twice, logprobs=2, max_tokens=2).choice["logprobs"]
    assert [top["\0"] for top in scores["top_logprobs"]] == [-0.5, -10.0]
    named = stack.complete(twice, logprobs=2, max_tokens=2, return_tokens_as_token_ids=True).choice["logprobs"]
    assert named["tokens"] == ["token_id:512", "token_id:513"]
    assert named["top_logprobs"][0] == {"token_id:512": -0.5, "token_id:0": -10.0}
    assert named["top_logprobs"][1] == {"token_id:0": -10.0, "token_id:1": -11.0, "token_id:513": -40.0}
    real = stack.complete("日本語の", model=REAL, logprobs=5, max_tokens=12, echo=True, **GREEDY)
    assert all(isinstance(token, str) for token in real.choice["logprobs"]["tokens"])
    assert all(isinstance(name, str) for top in real.choice["logprobs"]["top_logprobs"][1:] for name in top)


def test_fb127_logprobs_in_streams(stack: Stack, model: str) -> None:
    """Held back for a stop string and for halves of characters; no token lost and none doubled."""
    prompts: list[tuple[str, dict[str, Any]]] = [(STORY, {"stop": ["never so", ". T"]}), (FRANCE, {})]
    if model == SCRIPTED:
        parts = ["61", "f0", "9f", "8c", "8d", "53", "54", "4f", "62", "e4bd", "a0", "53"]
        prompts = [(hexes(*parts, delay_ms=delay), {"stop": ["STOP"]}) for delay in (0, 5)]
        prompts += [(script("x", "aS", "T", "OP", "yz", delay_ms=3), {"stop": ["STOP"]})]
    for prompt, more in prompts:
        fields = {"model": model, "logprobs": 2, "max_tokens": 12, **GREEDY, **more}
        plain = stack.complete(prompt, **fields)
        stream = whole(stack.stream(prompt, **fields))
        assert stream.text == plain.text and joined(stream.pieces) == plain.choice["logprobs"]
        end = len(prompt)
        for piece in stream.pieces:
            end += len(piece["text"])
            offsets = piece["logprobs"]["text_offset"]
            assert all(offset < end for offset in offsets) or piece["finish_reason"], "only what its text completes"


def test_fb128_logprobs_is_a_count(stack: Stack, model: str) -> None:
    fields = {"model": model, "max_tokens": 1, "temperature": 0}
    for count in (0, 1, 5, 6, 20):
        [top] = stack.complete(STORY, logprobs=count, **fields).choice["logprobs"]["top_logprobs"]
        assert len(top) in (count, count + 1) if count else len(top) == 1
    assert stack.complete(STORY, logprobs=None, **fields).choice["logprobs"] is None
    for wrong in (-1, 21, True, False, 1.0, "1", [1]):
        refused(stack.complete(STORY, logprobs=wrong, **fields), 400, param="logprobs")


@pytest.mark.parametrize("streamed", [False, True])
def test_fb129_echo_without_logprobs(stack: Stack, model: str, streamed: bool) -> None:
    prompt = "abc"
    fields = {"model": model, "max_tokens": 3, "echo": True, **GREEDY}

    def ask(**more: Any) -> tuple[str, dict[str, Any] | None]:
        if streamed:
            stream = whole(stack.stream(prompt, **fields, **more))
            assert [piece["text"] for piece in stream.pieces].count(prompt) == 1 + (model == SCRIPTED)
            return stream.text, stream.usage
        answer = stack.complete(prompt, **fields, **more)
        return answer.text, answer.usage

    silent = stack.complete(prompt, **{**fields, "echo": False})
    text, usage = ask()
    assert (text, usage) == (prompt + silent.text, silent.usage)
    if model == REAL:
        assert "b" not in silent.text, "or the next lines prove nothing"
        assert ask(stop=["b", "abc"]) == (text, usage), "not searched in the prompt"


def test_fb129_a_stop_string_in_the_prompt_or_across_its_end(stack: Stack) -> None:
    prompt = script("cd", "ef")
    for stop in (prompt[:5], prompt[-1:] + "c", "}"):
        assert both(stack, prompt, echo=True, stop=[stop]) == (prompt + "cdef", "stop", 3)
    assert both(stack, prompt, echo=True, stop=["de"]) == (prompt + "c", "stop", 2)


def test_fb130_all_mixes_of_stream_echo_logprobs(stack: Stack, model: str) -> None:
    prompts = [STORY, FRANCE] if model == REAL else [script("a", "🌍", "c"), "some words"]
    texts = {}
    for echo, logprobs, n in itertools.product((False, True), (None, 2), (1, 2)):
        fields = {"model": model, "echo": echo, "logprobs": logprobs, "n": n, "max_tokens": 3, **GREEDY}
        plain = stack.complete(prompts, **fields)
        with stack.open(prompts, **fields) as stream:
            stream.read()
        assert stream.error is None and stream.done == 1 and stream.usage == plain.usage
        for choice in choices(plain):
            index, prompt = choice["index"], prompts[choice["index"] // n]
            mine = [piece for piece in stream.pieces if piece["index"] == index]
            assert "".join(piece["text"] for piece in mine) == choice["text"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            assert (joined(mine, index) if logprobs is not None else None) == choice["logprobs"]
            assert choice["text"].startswith(prompt) or not echo
            texts.setdefault((index // n, index % n), set()).add(choice["text"].removeprefix(prompt if echo else ""))
            if logprobs is not None:
                assert choice["logprobs"]["text_offset"][0] == (0 if echo else len(prompt))
    assert all(len(found) == 1 for found in texts.values()), "the same text in every mix"


def test_fb131_stop_token_ids_beyond_the_vocabulary(stack: Stack, model: str) -> None:
    fields = {"model": model, "max_tokens": 24, **GREEDY}
    alone = stack.complete(STORY, **fields).text
    with ThreadPoolExecutor(1) as threads:
        neighbour = threads.submit(stack.complete, STORY, **fields)
        for wrong in ([151645222], [-1], [2**40], [True], ["1"], [1.0], 5, [[1]], [99999999, 1]):
            refused(stack.complete(STORY, model=model, max_tokens=1, stop_token_ids=wrong), 400, param="stop_token_ids")
        assert neighbour.result().text == alone
    assert stack.complete(STORY, stop_token_ids=[], **fields).text == alone


def test_fb132_stop_strings_of_every_shape(stack: Stack, model: str) -> None:
    fields = {"model": model, "max_tokens": 4, **GREEDY}
    for wrong in ("", [""], ["", "END"], [1], [None], [["a"]], 5, {"a": 1}, ["x" * 10_000], ["a"] * 65, True):
        refused(stack.complete(STORY, stop=wrong, **fields), 400, param="stop")
    plain = stack.complete(STORY, **fields).text
    for harmless in ([], None, "END", ["never"] * 5, [f"never {n}" for n in range(64)], ["\0"], ["x" * 1000]):
        assert stack.complete(STORY, stop=harmless, **fields).text == plain, harmless
    assert both(stack, script("a", "E", "N", "b", "END", "c"), stop="END")[0] == "aENb", "one stop, not three"
    assert both(stack, script("a", "\0", "b"), stop=["\0"])[0] == "a"


def test_fb133_a_suffix_is_filled_or_refused(stack: Stack, model: str) -> None:
    for answer in (
        stack.complete("1, ", model=model, suffix=", 5", max_tokens=2),
        stack.stream("1, ", model=model, suffix=", 5", max_tokens=2),
    ):
        refused(answer, 400, param="suffix", code="unsupported_parameter")
    assert stack.complete("1, ", model=model, suffix="", max_tokens=2).status == 200
