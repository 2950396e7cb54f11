"""Kills parts of the running product and looks at it as a client does: one end for every request, and it serves again."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import script, wait_for
from tests.contract.schemas import check_error
from tests.faults.processes import alive
from tests.integration.test_http_completions import whole
from tests.stack import ROOT, Stack, Stream, endless, free_port

#: Everything is gone this soon after a kill -9 of `up`, s.
GONE_S = 5.0
#: It serves again this soon after a part of it was killed, s: a lease, a start, and room for a slow machine.
AGAIN_S = 40.0
WORDS = [f"w{number} " for number in range(60)]

Start = Callable[..., Stack]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Private stacks of the scripted engine."""
    stacks: list[Stack] = []

    def start(**settings: object) -> Stack:
        stacks.append(Stack(tmp_path_factory.mktemp("private"), **settings))
        return stacks[-1].__enter__()

    yield start
    for stack in stacks:
        stack.close()


@pytest.fixture(scope="module")
def wounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for all tests that kill a part which is started again. Two API processes, one worker."""
    with Stack(tmp_path_factory.mktemp("wounded"), api_workers=2) as stack:
        yield stack


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def serves_again(stack: Stack) -> None:
    """A new request gets its whole answer; until then only errors that may be repeated."""

    def served() -> bool:
        try:
            answer = stack.complete(script("o", "k"), timeout=20)
        except (OSError, http.client.HTTPException):
            return False
        if answer.status != 200:
            assert answer.status == 503, answer
            check_error(answer.json)
            return False
        assert answer.text == "ok"
        return True

    wait_for(served, AGAIN_S, every=0.2)
    wait_for(stack.idle, AGAIN_S)


def one_end(stream: Stream, want: str) -> str | None:
    """The stream has come to its one end: whole, or what was sent is a beginning and one error follows. Returns the
    error's code."""
    assert stream.ended and stream.done == 1 and stream.raw.endswith(b"data: [DONE]\n\n"), stream
    assert b"HTTP/1" not in stream.raw
    if stream.error is None:
        assert whole(stream).text == want
        return None
    check_error({"error": stream.error})
    assert stream.raw.count(b'"error"') == 1 and stream.finish is None
    assert want.startswith(stream.text), f"a silent gap: {stream.text}"
    return stream.error["code"]


@pytest.mark.parametrize("reaped", [True, False])
def test_kill_9_of_up_leaves_nothing(start: Start, reaped: bool) -> None:
    stack = start(api_workers=2)
    wait_for(lambda: len(stack.processes()) == 7)  # the second API process may still be coming up
    with stack.open(endless(delay_ms=30)) as stream:
        stream.goes_on()
        with ThreadPoolExecutor(1) as threads:
            # Not waited for, `up` stays a zombie, as under a container's pid 1 that does not reap.
            reaper = threads.submit(stack.process.wait, 20) if reaped else None
            kill(stack.process.pid)
            wait_for(lambda: not stack.processes(), GONE_S)
            if reaper is not None:
                assert reaper.result(20) == -signal.SIGKILL
    assert not alive(stack.process.pid)
    if not reaped:
        assert stack.process.returncode is None


def test_a_killed_worker_is_started_again(wounded: Stack) -> None:
    """What it ran waits for it, and goes on."""
    [worker] = wounded.workers()
    with wounded.open(script(*WORDS, delay_ms=100)) as stream, ThreadPoolExecutor(1) as threads:
        stream.goes_on(3)
        plain = threads.submit(wounded.complete, script(*WORDS, delay_ms=90))
        wait_for(lambda: wounded.busy() == 2)
        kill(worker)
        stream.read(timeout=40)
        assert one_end(stream, "".join(WORDS)) is None
        assert stream.same_connection() == 200
        assert plain.result(40).text == "".join(WORDS)
    serves_again(wounded)
    assert worker not in wounded.workers() and len(wounded.workers()) == 1


def test_a_request_that_kills_its_worker_at_the_same_token_each_time(wounded: Stack) -> None:
    """No attempt gets beyond what the first one has sent."""
    with wounded.open(script("a", "b", "c", "d", delay_ms=100, fatal_after=3)) as stream:
        stream.read(timeout=60)
        assert one_end(stream, "abcd") == "poison_request" and stream.text == "abc"
    serves_again(wounded)


def test_a_killed_api_process_is_started_again(wounded: Stack) -> None:
    before = wait_for(lambda: (pids := wounded.api_processes()) and len(pids) == 2 and pids)
    streams = [wounded.open(script(*WORDS, delay_ms=50)) for _ in range(6)]
    for stream in streams:
        stream.goes_on(2)
    kill(before[0])
    broken = 0
    for stream in streams:
        try:
            stream.read(timeout=30)
            whole_one = stream.done == 1
        except (OSError, http.client.HTTPException):
            whole_one = False  # the connection broke: the client can see that it is not whole
        broken += not whole_one
        if whole_one:
            assert one_end(stream, "".join(WORDS)) is None
        else:
            assert "".join(WORDS).startswith(stream.text) and stream.finish is None
        stream.close()
    wait_for(lambda: len(pids := wounded.api_processes()) == 2 and before[0] not in pids, AGAIN_S)
    wait_for(lambda: wounded.queue() == (0, 0), 60)  # those of the dead process end after orphan_grace
    for _ in range(10):
        assert wounded.complete(script("o", "k")).text == "ok"


def test_a_killed_store_is_started_again(wounded: Stack) -> None:
    [store] = wounded.stores()
    with wounded.open(script(*WORDS, delay_ms=60)) as stream:
        stream.goes_on(5)
        kill(store)
        stream.read(timeout=60)
        assert one_end(stream, "".join(WORDS)) is None
    serves_again(wounded)
    assert store not in wounded.stores() and len(wounded.stores()) == 1


def test_a_second_up_on_the_same_folder_is_refused(wounded: Stack) -> None:
    command = [*wounded.command]
    command[command.index("--port") + 1] = str(free_port())
    second = subprocess.run(command, cwd=ROOT, env=wounded.env, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"pid {wounded.process.pid}" in second.stderr and "SLUICE_DATA_DIR" in second.stderr
    assert "Traceback" not in second.stderr
    assert wounded.complete(script("o", "k")).text == "ok"


def test_sigterm_lets_running_streams_finish(start: Start, tmp_path: Path) -> None:
    stack = start(drain_s=20)
    with stack.open(script(*WORDS, delay_ms=50)) as stream, ThreadPoolExecutor(1) as threads:
        stream.goes_on(3)
        plain = threads.submit(stack.complete, script(*WORDS, delay_ms=40))
        wait_for(lambda: stack.busy() == 2)
        stack.process.send_signal(signal.SIGTERM)
        wait_for(lambda: stack.call("GET", "/ready").status == 503, 5)
        refused = stack.complete("new")
        assert refused.status == 503 and refused.seconds < 2, refused
        assert refused.error["code"] == "worker_shutdown" and refused.headers["x-should-retry"] == "true"
        assert one_end(stream.read(timeout=20), "".join(WORDS)) is None
        assert plain.result(20).text == "".join(WORDS)
    assert stack.process.wait(20) == 0
    ends = [
        line.split("|")[1].split(":")[0].strip()
        for line in stack.log().splitlines()
        if "ended with exit status 0" in line
    ]
    assert len(ends) == 4 and ends[-1] == "store", ends
    assert not stack.processes()


def test_sigterm_ends_what_does_not_finish_in_time(start: Start) -> None:
    stack = start(drain_s=1)
    with stack.open(endless(delay_ms=30)) as stream:
        stream.goes_on(3)
        stack.process.send_signal(signal.SIGTERM)
        stream.read(timeout=15)
        assert one_end(stream, stream.text + "...") == "worker_shutdown"
    assert stack.process.wait(20) == 0
    assert not stack.processes()
