"""Workers that come when work waits and go when there is none, as clients see it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shared import keys
from tests import batches
from tests.conftest import script, wait_for
from tests.scaling.worker import set_load
from tests.stack import REAL, SCRIPTED, Stack, endless

#: What a worker takes to load its model, and how long one must be too many before it goes, s.
LOAD_S, IDLE_S = 2.0, 1.5
#: What `up` says of a worker that it ends.
GOES = "is not needed any more"
#: The script by which KEDA reads the length of whatever lies at a key (its redis scaler, since 2.0).
KEDA = """
local kind = redis.call('type', KEYS[1]).ok
return redis.call(({ zset = 'zcard', set = 'scard', list = 'llen', hash = 'hlen', none = 'llen' })[kind], KEYS[1])
"""


class Scaled(Stack):
    """A stack that may have no worker; it is there once it lists its models."""

    def wait_ready(self) -> None:
        wait_for(lambda: self.process.poll() is not None or "| ready: " in self.log(), 100)
        assert self.process.poll() is None, self.log()[-3000:]

    @property
    def data_dir(self) -> Path:
        return Path(self.env["SLUICE_DATA_DIR"])

    def live(self) -> int:
        return len(self.status()["workers"])

    def at_zero(self) -> bool:
        return not self.workers() and not self.live()

    def workers(self) -> list[int]:
        return sorted(super().workers() + self.pids(" -m tests.scaling.worker "))

    def at_work(self, model: str = SCRIPTED) -> int:
        """What KEDA reads."""
        with self.store() as store:
            return int(store.eval(KEDA, 1, keys.work(model)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    folder = tmp_path_factory.mktemp("scaled")
    set_load(folder / "data", LOAD_S)
    options = ("--workers", "0:3")
    with Scaled(folder, options=options, module="tests.scaling.cli", idle_s=IDLE_S, lanes=2, drain_s=10) as stack:
        yield stack


@pytest.fixture(autouse=True)
def begin_at_zero(request: pytest.FixtureRequest) -> None:
    if "scaled" in request.fixturenames:
        stack: Scaled = request.getfixturevalue("scaled")
        set_load(stack.data_dir, LOAD_S)
        wait_for(stack.at_zero, 60)


def percents(stream: Any) -> list[int]:
    """Of the load, as a waiting client was told: whole lines of the raw body, with no blank line behind them."""
    found = re.findall(rb"^: loading (\d+) %\n(?!\n)", stream.raw, flags=re.MULTILINE)
    return [int(percent) for percent in found]


def test_the_first_request_waits_for_a_worker_and_is_told_how_far_it_is(scaled: Scaled) -> None:
    """So is the next one, once the worker has gone again."""
    for _ in range(2):
        wait_for(scaled.at_zero, 60)
        assert scaled.models() == [SCRIPTED], "known and listed without a worker"
        stream = scaled.stream(script("a", "b"))
        assert (stream.status, stream.text, stream.error, stream.done) == (200, "ab", None, 1)
        assert stream.raw.startswith(b": queued position=1")
        told = percents(stream)
        assert len(told) >= 2 and told == sorted(told) and 0 <= told[0] < 100
        assert stream.raw.rfind(b": loading") < stream.raw.find(b"data:")


def test_who_does_not_stream_waits_too(scaled: Scaled) -> None:
    answer = scaled.complete(script("w", "h", "o", "l", "e"))
    assert answer.text == "whole"


@pytest.mark.slow
def test_background_work_wakes_a_worker(scaled: Scaled) -> None:
    asked = {"model": SCRIPTED, "prompt": script("l", "ate"), "background": True}
    answer = scaled.call("POST", "/v1/completions", asked)
    assert answer.status == 202
    wait_for(lambda: scaled.job(answer.json["id"]).json["status"] == "completed", 60)


@pytest.mark.slow
def test_a_batch_wakes_a_worker(scaled: Scaled) -> None:
    batch = batches.ended(scaled, batches.started(scaled, batches.lines(3)))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 3)


@pytest.mark.slow
def test_a_burst_brings_one_worker_after_the_other_and_they_go_again(scaled: Scaled) -> None:
    """Never more than the most are there, and none goes that has work."""
    set_load(scaled.data_dir, 0.2)
    gone = scaled.log().count(GOES)
    with ExitStack() as opened:
        streams = [opened.enter_context(scaled.open(endless(delay_ms=100))) for _ in range(7)]
        wait_for(lambda: scaled.live() == 3 and scaled.queue()[1] == 6, 120)
        assert scaled.at_work() == 7, "what waits and what runs"
        running = [stream for stream in streams if scaled.job(stream.id).json["status"] == "running"]
        until = time.monotonic() + 2 * IDLE_S
        while time.monotonic() < until:
            assert len(scaled.workers()) == 3
            time.sleep(0.1)
        assert len(running) == 6 and all(stream.goes_on().error is None for stream in running)
        assert scaled.log().count(GOES) == gone
    wait_for(lambda: scaled.at_work() == 0)
    wait_for(scaled.at_zero, 60)
    assert scaled.log().count(GOES) == gone + 3


@pytest.mark.slow
def test_a_request_that_comes_while_the_last_worker_goes_is_served(scaled: Scaled) -> None:
    """By that one if it took it, else by the next; nobody is told of it."""
    for delay in (0.0, 0.05, 0.2):
        wait_for(scaled.at_zero, 60)
        count = scaled.log().count(GOES)
        assert scaled.complete(script("a")).text == "a"
        wait_for(lambda count=count: scaled.log().count(GOES) > count, 60, every=0.005)
        time.sleep(delay)
        stream = scaled.stream(script("still ", "served", delay_ms=50))
        assert (stream.text, stream.error) == ("still served", None)


def test_another_worker_is_started_for_one_that_is_killed_while_it_loads(scaled: Scaled) -> None:
    with scaled.open(script("o", "k")) as stream:
        stream.read(lambda stream: percents(stream))
        [loading] = scaled.workers()
        os.kill(loading, signal.SIGKILL)
        stream.read()
        assert (stream.text, stream.error) == ("ok", None)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_to_who_waits(scaled: Scaled) -> None:
    """Long before `cold_start_s`, and to who comes then at once; it is tried again for the next after a while."""
    set_load(scaled.data_dir, None)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        plain, streamed = threads.submit(scaled.complete, "x"), threads.submit(scaled.stream, "x")
        answer, stream = plain.result(), streamed.result()
    assert time.monotonic() - began < 60
    assert answer.status == 503 and answer.error["code"] == "no_worker"
    assert "cannot be loaded" in answer.error["message"]
    assert stream.error is not None and stream.error["code"] == "no_worker" and stream.done == 1
    refused = scaled.complete("x")
    assert refused.status == 503 and refused.seconds < 5 and "cannot be loaded" in refused.error["message"]
    assert scaled.models() == [SCRIPTED] and "the model's file is damaged" in scaled.log()
    set_load(scaled.data_dir, 0)
    wait_for(lambda: scaled.complete(script("mended")).status == 200, 60, every=0.5)


@pytest.mark.slow
def test_the_supervisor_s_death_takes_a_loading_worker_along(tmp_path: Path) -> None:
    set_load(tmp_path / "data", 0)
    with Scaled(tmp_path, options=("--workers", "0:1"), module="tests.scaling.cli", idle_s=0.5) as stack:
        wait_for(stack.at_zero, 60)
        set_load(stack.data_dir, 60)
        with stack.ask(script("never")):
            wait_for(stack.workers, 30)
            stack.process.kill()
            wait_for(lambda: not stack.processes(), 10)


@pytest.mark.slow
def test_each_model_has_its_own_range(tmp_path: Path) -> None:
    """The real one comes for a client of its own, with a first token and no error, and the other stays as it is."""
    options = ("--workers", "1:1", "--workers", "0:1")
    with Scaled(tmp_path, (SCRIPTED, "llamacpp"), options=options, idle_s=1) as stack:
        wait_for(lambda: stack.live() == 1 and len(stack.workers()) == 1, 60)
        [standing] = stack.workers()
        for _ in range(2):
            stream = stack.stream("The capital of France is", model=REAL, max_tokens=4, temperature=0)
            assert (stream.text.split()[0].strip("."), stream.error) == ("Paris", None)
            print(f"cold start of {REAL}: first token after {stream.times[0]:.2f} s")
            wait_for(lambda: stack.workers() == [standing], 30)
        assert stack.complete(script("a")).text == "a"


@pytest.mark.slow
def test_a_second_start_knows_the_model_and_loads_nothing(tmp_path: Path) -> None:
    """Unless it is served otherwise than before: an alias, say."""
    options = ("--workers", "0:1")
    for more, loads in ((), True), ((), False), (("--alias", f"other={SCRIPTED}"), True):
        with Scaled(tmp_path, options=(*options, *more), idle_s=60) as stack:
            assert bool(stack.workers()) == loads, more
            assert stack.complete("x", model="other" if more else SCRIPTED).text == "x"
