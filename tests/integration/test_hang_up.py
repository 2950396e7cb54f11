"""Promise 6 over HTTP: who hangs up frees what was taken within a second, streamed, plain or still queued."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from shared import frames, keys
from shared.frames import Delta, Error, Name, Take
from tests.conftest import Node, Store, Worker, script, wait_for
from tests.integration.test_http_completions import STORY, whole
from tests.stack import SCRIPTED, Leave, Stack, endless

#: The promise, s.
FREED_S = 1.0
LEAVES: list[Leave] = ["close", "half-close", "reset"]


def long_prompt(model: str) -> str:
    return endless(delay_ms=30) if model == SCRIPTED else STORY


def within_a_second(what: object, left: float) -> None:
    """Polls fast, and measures from when the client left."""
    assert callable(what)
    wait_for(what, 10, every=0.01)
    assert time.monotonic() - left < FREED_S, f"it took {time.monotonic() - left:.2f} s"


@pytest.mark.parametrize("how", LEAVES)
def test_a_stream_that_is_hung_up_frees_its_lane(stack: Stack, model: str, how: Leave) -> None:
    wait_for(stack.idle)
    with stack.open(long_prompt(model), model=model, ignore_eos=True) as stream:
        stream.goes_on(2)
        wait_for(lambda: stack.busy(model) == 1)
        left = stream.leave(how)
        within_a_second(lambda: stack.busy(model) == 0, left)
    wait_for(stack.idle, 2)


@pytest.mark.parametrize("how", LEAVES)
def test_a_plain_request_that_is_hung_up_frees_its_lane(stack: Stack, model: str, how: Leave) -> None:
    wait_for(stack.idle)
    with stack.ask(long_prompt(model), model=model, ignore_eos=True) as request:
        wait_for(lambda: stack.busy(model) == 1)
        left = request.leave(how)
        within_a_second(lambda: stack.busy(model) == 0, left)
    wait_for(stack.idle, 2)


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_queued_request_that_is_hung_up_leaves_the_queue(narrow: Stack, how: Leave, streamed: bool) -> None:
    wait_for(narrow.idle)
    with narrow.open(endless(delay_ms=30)) as running:
        running.goes_on()
        with narrow.open("x") if streamed else narrow.ask("x") as queued:
            wait_for(lambda: narrow.queue() == (1, 1))
            left = queued.leave(how)
            within_a_second(lambda: narrow.queue() == (0, 1), left)
        running.goes_on(3)
        running.leave()
    wait_for(narrow.idle)


def test_a_client_that_does_not_read_is_noticed_too(stack: Stack) -> None:
    """Its socket is full of what it did not read when it goes."""
    wait_for(stack.idle)
    prompt = json.dumps({"pieces": ["x" * 2000], "repeat": 0})
    with stack.ask(prompt, stream=True) as request:
        wait_for(lambda: stack.busy() == 1)
        left = request.leave()
        within_a_second(lambda: stack.busy() == 0, left)
    wait_for(stack.idle)


def test_fb005_a_stream_that_is_hung_up_stops_producing(stack: Stack) -> None:
    wait_for(stack.idle)
    with stack.open(endless(delay_ms=50), max_tokens=2000) as stream:
        stream.goes_on(3)
        left = stream.leave()
    within_a_second(lambda: stack.busy() == 0 and stack.queue() == (0, 0), left)
    with stack.store() as store:
        entries = store.xrange(keys.log(stream.id))
        told = [frame for _, fields in entries for frame in frames.decode_entry(fields[b"f"])]
        produced = sum(len(frame.t) for frame in told if isinstance(frame, Delta))
        assert 3 <= produced < 80
        assert isinstance(told[-1], Error) and told[-1].error["code"] == "cancelled"
    assert stack.complete("next").seconds < 1


def test_fb007_plain_requests_hung_up_twenty_times(stack: Stack, model: str) -> None:
    wait_for(stack.idle)
    for _ in range(20):
        with stack.ask(long_prompt(model), model=model, max_tokens=2000, ignore_eos=True) as request:
            wait_for(lambda: stack.busy(model) >= 1, every=0.01)
            request.leave()
    wait_for(stack.idle, 3)
    with stack.open("fresh", model=model, max_tokens=1) as stream:
        stream.goes_on()
        assert stream.seconds < 2, "it starts at once"
        whole(stream.read())


def test_others_go_on_while_some_hang_up(stack: Stack) -> None:
    words = [f"w{number} " for number in range(60)]
    with stack.open(script(*words, delay_ms=20)) as kept:
        for _ in range(10):
            with stack.open(endless(delay_ms=10)) as stream:
                stream.goes_on(2)
                stream.leave()
        assert whole(kept.read()).text == "".join(words)
    wait_for(stack.idle)


def test_a_lane_that_is_fenced_leaves_the_engine(store: Store, start_worker: Callable[..., Worker], node: Node) -> None:
    """FB-005's kind: the store refuses what an overtaken lane writes, often before a cancel is heard. The engine must
    not go on with it, or with one lane it would never serve anybody again."""
    start_worker(lanes=1)
    overtaken = node.submit(endless(delay_ms=5))
    overtaken.read(lambda stream: len(stream.tokens) > 3)
    top = Name.parse(store.client.xrevrange(keys.log(overtaken.job.id), count=1)[0][0].decode())
    entry = b"[" + frames.encode_frame(Take("another")) + b"]"
    store.client.xadd(keys.log(overtaken.job.id), {"f": entry}, id=f"{top.a + 1}-{top.s + 100}")
    assert node.submit(script("n", "e", "x", "t")).read(timeout=10).text == "next"


def test_hanging_up_on_fast_streams_leaves_no_lane_behind(narrow: Stack) -> None:
    """With one lane, one that stayed behind would be the end. The stream writes so often that it is refused before the
    cancel reaches its worker."""
    for _ in range(20):
        with narrow.open(endless(delay_ms=1)) as stream:
            stream.goes_on(2)
            stream.leave()
        assert narrow.complete(script("o", "k"), timeout=10).text == "ok"


def test_a_choice_that_fails_leaves_no_sibling_behind(start_worker: Callable[..., Worker], node: Node) -> None:
    """With one lane, a sibling that runs on for ever would keep everybody else out."""
    start_worker(lanes=2)
    prompt = json.dumps({"pieces": ["a"], "choices": [{"error_after": 1}, {"repeat": 0}]})
    stream = node.submit(prompt, n=2).read()
    assert stream.error is not None and stream.error["code"] == "internal_error"
    both = node.submit(script("o", "k"), n=2).read(timeout=10)
    assert both.text == "ookk"
