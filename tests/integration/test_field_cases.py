"""Faults that people met in servers like this one, from outside: each test names its case.

The same cases are tested nearer to their causes in tests/unit; here they go through the whole product.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import connection
from tests.conftest import script, wait_for
from tests.contract.schemas import check_error
from tests.integration.test_hang_up import FREED_S
from tests.integration.test_http_completions import refused, whole
from tests.stack import ROOT, SCRIPTED, Stack, endless, hexes


def both(stack: Stack, prompt: str, **fields: Any) -> tuple[str, str, int]:
    """(text, finish_reason, completion_tokens), which must be the same streamed and not."""
    plain = stack.complete(prompt, **fields)
    stream = whole(stack.stream(prompt, **fields))
    assert (stream.text, stream.finish, stream.usage) == (plain.text, plain.finish, plain.usage)
    return plain.text, plain.finish, plain.usage["completion_tokens"]


def test_fb001_the_beginning_of_a_stop_string_is_not_sent(stack: Stack) -> None:
    prompt = script("ABC", " DEF", "G", "HI", "J", "K", delay_ms=20)
    assert both(stack, prompt, stop=["DEFGHIJ"], max_tokens=20) == ("ABC ", "stop", 5)
    stream = whole(stack.stream(prompt, stop=["DEFGHIJ"], max_tokens=20))
    assert not set("".join(piece["text"] for piece in stream.pieces)) & set("DEFGHIJ")
    refuted = script("ABC", " DEF", "G", "HI", "Z", delay_ms=20)
    assert both(stack, refuted, stop=["DEFGHIJ"]) == ("ABC DEFGHIZ", "stop", 6)


def test_fb002_a_stream_that_is_over_at_once_is_complete(stack: Stack) -> None:
    for _ in range(50):
        with stack.open(script("a", "b", "c")) as stream:
            assert whole(stream.read(timeout=5)).text == "abc"


def test_fb003_characters_over_several_tokens(stack: Stack) -> None:
    for delay in (0, 20):
        prompt = hexes("f09f", "8c8d", "e4bd", "a0", delay_ms=delay)
        assert both(stack, prompt)[0] == "🌍你"
        stream = whole(stack.stream(prompt))
        assert "\ufffd" not in stream.raw.decode() and b"\\ud" not in stream.raw


@pytest.mark.parametrize("delay", [0, 120])
def test_fb004_a_failure_after_the_first_chunk(stack: Stack, delay: int) -> None:
    with stack.open(script("a", "b", "c", "d", delay_ms=delay, error_after=3)) as stream:
        stream.read()
        assert stream.status == 200 and stream.text == "abc" and stream.finish is None
        check_error({"error": stream.error})
        assert stream.raw.endswith(b"data: [DONE]\n\n") and stream.raw.count(b'"error"') == 1
        assert stream.same_connection() == 200


def test_fb005_hanging_up_reaches_the_worker(stack: Stack) -> None:
    wait_for(stack.idle)
    with stack.open(endless(delay_ms=50), max_tokens=2000) as stream:
        stream.goes_on(3)
        left = stream.leave()
    wait_for(stack.idle)
    assert time.monotonic() - left < 2
    assert stack.complete("x").seconds < 1


def test_fb007_hanging_up_on_a_plain_request(stack: Stack) -> None:
    wait_for(stack.idle)
    with stack.ask(endless(delay_ms=50), max_tokens=2000) as request:
        wait_for(lambda: stack.busy() == 1)
        left = request.leave()
    wait_for(lambda: stack.busy() == 0, 3, every=0.01)
    assert time.monotonic() - left < FREED_S


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"])
def test_fb014_numbers_that_are_none(stack: Stack, model: str, field: str, number: str) -> None:
    value = f'{{"1":{number}}}' if field == "logit_bias" else number
    raw = f'{{"model":"{model}","prompt":"x","{field}":{value}}}'.encode()
    answer = stack.call("POST", "/v1/completions", raw=raw)
    refused(answer, 400)
    assert answer.error["type"] == "invalid_request_error" and "x-sluice-id" not in answer.headers


# FB-016: a blocking read must be over before its socket's time-out.

#: Commands that wait in the store, by redis-py's names, and the argument that says how long.
BLOCKING = {
    **dict.fromkeys(("blpop", "brpop", "brpoplpush", "blmove", "bzpopmin", "bzpopmax"), ("timeout", 1.0)),
    **dict.fromkeys(("blmpop", "bzmpop"), ("timeout", 1.0)),
    **dict.fromkeys(("xread", "xreadgroup"), ("block", 0.001)),
    **dict.fromkeys(("wait", "waitaof"), ("timeout", 0.001)),
}


def blocking_calls() -> Iterator[tuple[str, float | None]]:
    """(where, seconds or None for no limit) of each call of a blocking command of the store in the product."""
    for folder in ("api", "workers", "shared"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                name = node.func.attr
                if name not in BLOCKING or "store" not in ast.unparse(node.func.value).lower():
                    continue
                argument, unit = BLOCKING[name]
                given = next((word.value for word in node.keywords if word.arg == argument), None)
                if given is None and argument == "block":
                    continue  # without BLOCK it does not wait
                yield f"{path.name}:{node.lineno}", None if given is None else _value(given, path) * unit


def _value(expression: ast.expr, path: Path) -> float:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return float(eval(compile(ast.Expression(expression), str(path), "eval"), vars(module)))


def test_fb016_every_blocking_call_is_shorter_than_its_sockets_timeout() -> None:
    calls = dict(blocking_calls())
    assert calls, "the search finds none any more: has the worker another way to wait?"
    for where, seconds in calls.items():
        assert seconds is not None and 0 < seconds < connection.SOCKET_TIMEOUT, where
    assert 0 < connection.BLOCK_TIMEOUT < connection.SOCKET_TIMEOUT
    client = connection.connect("redis://localhost")
    assert client.connection_pool.connection_kwargs["socket_timeout"] == connection.SOCKET_TIMEOUT
    text = "".join(path.read_text() for folder in ("api", "workers") for path in (ROOT / folder).rglob("*.py"))
    for word in ('"BLPOP"', '"BRPOP"', '"BLMOVE"', '"BLOCK"'):
        assert word not in text, f"{word} is sent raw; its time must be checked here"


def clients(stack: Stack) -> dict[str, str]:
    """id -> name of the last command of each connection to the store, but ours."""
    with stack.store() as store:
        own = store.client_id()
        return {row["id"]: row["cmd"] for row in store.client_list() if int(row["id"]) != own}


def stays_quiet(stack: Stack, seconds: float, every: float) -> None:
    """Nobody leaves and nobody reconnects while nothing happens."""
    wait_for(stack.idle)
    pids, before, errors = set(stack.processes()), clients(stack), stack.log().count("_lost")
    until = time.monotonic() + seconds
    seen = [len(before)]
    wait_for(lambda: seen.append(len(clients(stack))) or time.monotonic() > until, seconds + 30, every)
    after = clients(stack)
    assert set(stack.processes()) == pids, "a process ended or was replaced"
    assert max(seen) - min(seen) <= 2, f"the number of connections moves: {seen}"
    assert len(after.keys() - before.keys()) <= 2, (before, after)
    assert stack.log().count("_lost") == errors


def test_fb016_idle_for_twenty_seconds_then_a_slow_stream(stack: Stack) -> None:
    stays_quiet(stack, 20, 1)
    stream = whole(stack.stream(script("a", "b", start_delay_ms=8000)))
    assert stream.text == "ab" and stream.times[0] > 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fb016_idle_for_ten_minutes_then_a_very_slow_stream(stack: Stack) -> None:
    stays_quiet(stack, 600, 5)
    stream = whole(stack.stream(script("a", "b", start_delay_ms=60_000), timeout=120))
    assert stream.text == "ab" and stream.times[0] > 55
    assert len(stream.comments) >= 5, "kept alive"


def test_fb024_every_way_to_end(stack: Stack) -> None:
    assert both(stack, script("a", repeat=0), max_tokens=5) == ("aaaaa", "length", 5)
    assert both(stack, script(*"abcd"), max_tokens=5) == ("abcd", "stop", 5), "the end token is the fifth"
    assert both(stack, script(*"abc", "STO", "P"), max_tokens=5, stop=["STOP"]) == ("abc", "stop", 5)
    assert both(stack, script(*"abcd", "STO"), max_tokens=5, stop=["STOP"]) == ("abcdSTO", "length", 5)


OPTIONAL = (
    *("max_tokens", "temperature", "top_p", "n", "stream", "stop", "logprobs", "echo", "seed", "logit_bias", "suffix"),
    *("user", "best_of", "stream_options", "response_format", "presence_penalty", "frequency_penalty"),
)


def test_fb025_null_is_absent(stack: Stack) -> None:
    everything = stack.complete(script("a", "b"), **dict.fromkeys(OPTIONAL))
    assert (everything.text, everything.finish) == ("ab", "stop")
    for field in OPTIONAL:
        assert stack.complete(script("a", "b"), **{field: None}).text == "ab", field


def test_fb026_max_tokens_that_is_no_count(stack: Stack, model: str) -> None:
    for value in (1.5, "10", True, 2.0, [], {}):
        refused(stack.complete("x", model=model, max_tokens=value), 400, param="max_tokens")
    for value in (0, -1, -186):
        assert stack.complete(script("a", repeat=30), max_tokens=value).text == "a" * 30
    message = refused(stack.complete("x" * 40_000), 400, code="context_length_exceeded")
    assert "32768" in message and "40000" in message and "-" not in message


def test_fb027_max_tokens_beyond_the_room(stack: Stack) -> None:
    prompt = script("a", "b")
    room = 32768 - len(prompt)
    for value in (100_000_000, room + 1):
        refused(stack.complete(prompt, max_tokens=value), 400, param="max_tokens", code="context_length_exceeded")
    assert both(stack, prompt, max_tokens=room) == ("ab", "stop", 3)


def test_fb030_tokens_are_counted_not_chunks(stack: Stack) -> None:
    """Ten tokens, four of them one emoji's, two of them held back for a stop string."""
    prompt = hexes("61", "f0", "9f", "8c", "8d", "62", "53", "54", "63", "64")
    assert both(stack, prompt, stop=["STOP"]) == ("a🌍bSTcd", "stop", 11)
    assert both(stack, prompt, stop=["STOP"], max_tokens=10) == ("a🌍bSTcd", "length", 10)
    usage = stack.complete(prompt).usage
    assert usage["prompt_tokens"] == len(prompt) and usage["total_tokens"] == len(prompt) + 11


def test_fb032_the_held_tail_comes_out(stack: Stack) -> None:
    for delay in (0, 20):
        assert both(stack, script("almost", " </sto", delay_ms=delay), stop=["</stop>"])[0] == "almost </sto"


def test_fb033_a_stop_string_inside_a_token(stack: Stack) -> None:
    assert both(stack, script("Hel", "lo wor", "ld. Next"), stop=["world."])[0] == "Hello "
    for cuts in itertools.product((False, True), repeat=4):
        pieces = [""]
        for char, new in zip("xabcy", (*cuts, False), strict=True):
            pieces[-1] += char
            pieces += [""] if new else []
        assert both(stack, script(*pieces), stop=["b", "abc"])[:2] == ("xa", "stop"), pieces


@pytest.mark.parametrize("first", [" Paris", "\n\n", "\t", "\u00a0"])
def test_fb035_nothing_is_trimmed(stack: Stack, first: str) -> None:
    prompt = script(first, "x ")
    assert both(stack, prompt)[0] == first + "x "
    echoed, _, _ = both(stack, prompt, echo=True)
    assert echoed == prompt + first + "x "
    assert stack.complete(echoed, echo=True, max_tokens=1).text.startswith(echoed), "it can be sent back as a prompt"


BODIES = [
    *(b"{:", b"", b"[]", b"5", b'"x"', b"null", b"true", b'{"model":"scripted"', b'{"model":"scripted"} x', b"\xff{}"),
    *(b'{"model":"scripted","prompt":"a","prompt":"b"}', b'{"model":5}', b'{"model":"scripted","prompt":{}}'),
    *(b'{"model":"scripted","prompt":"a","stream":{}}', b'{"model":"scripted","prompt":"a","logit_bias":[]}'),
    b'{"model":"scripted","prompt":"\\ud800"}',
    b'{"model":"scripted","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
]


def test_fb039_bodies_that_are_no_request(stack: Stack) -> None:
    for raw in BODIES:
        answer = stack.call("POST", "/v1/completions", raw=raw)
        assert answer.status == 400, (raw[:60], answer)
        check_error(answer.json)
        assert "x-sluice-id" not in answer.headers
    assert stack.complete("x").status == 200


LOOSE: list[tuple[str, Any]] = [
    *(("temperature", True), ("max_tokens", True), ("n", False), ("seed", "1"), ("top_p", "0.5"), ("stream", "false")),
    *(("stream", 1), ("echo", "yes"), ("logprobs", True), ("n", 2.0)),
]


@pytest.mark.parametrize(("field", "value"), LOOSE)
def test_fb040_types_are_strict(stack: Stack, field: str, value: Any) -> None:
    raw = json.dumps({"model": SCRIPTED, "prompt": "x", field: value}).encode()
    answer = stack.call("POST", "/v1/completions", raw=raw)
    refused(answer, 400, param=field)
    assert not answer.headers["content-type"].startswith("text/event-stream")
