"""Many at once, and many in a row: streams join and leave, nobody waits for anybody, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.conftest import script, wait_for
from tests.integration.test_http_completions import whole
from tests.stack import REAL, Stack, Stream

LANES = 16


@pytest.fixture
def open_streams() -> Iterator[ExitStack]:
    """Closed at the end, whatever happened."""
    with ExitStack() as streams:
        yield streams


def on_the_real_model(stack: Stack, streams: ExitStack, number: int) -> Stream:
    """A story without max_tokens that does not end by itself."""
    prompt = f"Story number {number}: once upon a time"
    return streams.enter_context(stack.open(prompt, model=REAL, ignore_eos=True, temperature=0.8, seed=number))


def all_go_on(streams: list[Stream], more: int) -> None:
    for stream in streams:
        stream.goes_on(more)
        assert stream.status == 200 and stream.finish is None and stream.error is None, stream


def test_sixteen_requests_without_a_limit_run_side_by_side(stack: Stack, open_streams: ExitStack) -> None:
    """Each may use all remaining context, 16 times what there is memory for: none waits for that."""
    wait_for(stack.idle)
    began = time.monotonic()
    first = [on_the_real_model(stack, open_streams, number) for number in range(8)]
    all_go_on(first, 3)
    assert stack.busy(REAL) == 8
    second = [on_the_real_model(stack, open_streams, number) for number in range(8, LANES)]
    all_go_on(second, 3)
    wait_for(lambda: stack.busy(REAL) == LANES)
    all_go_on(first + second, 3)
    assert stack.queue(REAL)[0] == 0

    for stream in first[:4]:
        stream.leave()
    wait_for(lambda: stack.busy(REAL) == LANES - 4, 2)
    all_go_on(first[4:] + second, 2)

    ending = [
        open_streams.enter_context(stack.open(f"Tale {number}", model=REAL, stop=["a", "e", "i", "o", " "], seed=number))
        for number in range(4)
    ]
    for stream in ending:
        assert whole(stream.read()).finish == "stop"
    all_go_on(first[4:] + second, 2)
    assert stack.busy(REAL) == LANES - 4

    for stream in first[4:] + second:
        assert stream.text and "\ufffd" not in stream.text
        stream.leave()
    wait_for(stack.idle, 3)
    assert time.monotonic() - began < 90


def test_two_hundred_fast_streams_in_a_row(stack: Stack) -> None:
    """The worker is done before the client's request is fully handled; none may wait for a time-out."""
    prompt = script("a", "b", "c")
    for _ in range(200):
        with stack.open(prompt) as stream:
            whole(stream.read(timeout=10))
            assert (stream.text, stream.finish) == ("abc", "stop")
            assert stream.seconds < 2, "it waited for something"


def test_three_hundred_streams_at_once(stack: Stack) -> None:
    """64 run, the others wait for their turn; all are whole."""
    words = [f"word{number} " for number in range(15)]

    def one(number: int) -> str:
        stream = whole(stack.stream(script(f"{number}: ", *words, delay_ms=10), timeout=90))
        return stream.text

    with ThreadPoolExecutor(300) as clients:
        texts = list(clients.map(one, range(300)))
    assert texts == [f"{number}: " + "".join(words) for number in range(300)]
    wait_for(stack.idle)
