"""`sluice up` keeps its children alive, ends them in order, and leaves nothing behind however it ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_for
from tests.faults.processes import alive, end, in_session

#: Everything is gone this soon after a kill -9 of the supervisor, s.
GONE_S = 5.0


class StubStack:
    """`tests/faults/stub_stack.py` in a session of its own. Never reaped before the test ends, unless it is waited for."""

    def __init__(self, *kinds: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.stub_stack", *kinds],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.partition(" ")[2].rstrip())

    def said(self, text: str) -> bool:
        return any(text in line for line in list(self.lines))

    def count(self, text: str) -> int:
        return sum(text in line for line in list(self.lines))

    def place(self, text: str) -> int:
        return next(i for i, line in enumerate(self.lines) if text in line)

    def children(self) -> dict[int, str]:
        return {pid: command for pid, command in in_session(self.process.pid).items() if pid != self.process.pid}

    def child(self, kind: str) -> int | None:
        return next((pid for pid, command in self.children().items() if f" stub {kind} " in command), None)

    def kill(self, number: int) -> None:
        """A signal to the supervisor alone."""
        os.kill(self.process.pid, number)


@pytest.fixture
def start() -> Iterator[Callable[..., StubStack]]:
    stacks: list[StubStack] = []

    def start(*kinds: str, **env: str) -> StubStack:
        stacks.append(StubStack(*kinds, **env))
        return stacks[-1]

    yield start
    for stack in stacks:
        end(stack.process.pid)
        stack.process.wait(10)


@pytest.mark.parametrize("kind", ["plain", "deaf", "forking", "pipe-only", "pipe-only-gevent"])
def test_kill_9_leaves_nothing_although_nobody_reaps(start: Callable[..., StubStack], kind: str) -> None:
    stack = start(kind, "store")
    processes = 3 if kind == "forking" else 2
    wait_for(lambda: stack.count(": up") == processes)
    assert len(stack.children()) == processes
    stack.kill(signal.SIGKILL)
    # Not waited for: the killed supervisor stays a zombie, as under a container's pid 1 that does not reap.
    wait_for(lambda: not stack.children(), GONE_S)
    assert not alive(stack.process.pid)
    assert stack.process.returncode is None


def test_children_stay_in_the_session_of_the_supervisor(start: Callable[..., StubStack]) -> None:
    stack = start("plain", "store")
    wait_for(lambda: stack.child("plain") and stack.child("store"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_workers_first_and_the_store_last(start: Callable[..., StubStack], number: int) -> None:
    stack = start("store", "slow", "plain")
    wait_for(lambda: stack.count(": up") == 3)
    stack.kill(number)
    assert stack.process.wait(60) == 0
    wait_for(lambda: stack.said("store: pid"))
    assert stack.place("plain: pid") < stack.place("slow: pid") < stack.place("store: pid"), stack.lines
    assert stack.said("slow: drained")
    assert not stack.children()


def test_a_signal_to_the_whole_group_does_not_end_the_store_early(start: Callable[..., StubStack]) -> None:
    """Ctrl-C in a terminal."""
    stack = start("store", "slow")
    wait_for(lambda: stack.count(": up") == 2)
    os.killpg(stack.process.pid, signal.SIGINT)
    assert stack.process.wait(60) == 0
    wait_for(lambda: stack.said("store: pid"))
    assert stack.place("slow: drained") < stack.place("store: pid")


def test_one_that_does_not_end_is_killed_after_its_time(start: Callable[..., StubStack]) -> None:
    # the five seconds for handing over come on top
    stack = start("deaf", STUB_DRAIN_S="-4")
    wait_for(lambda: stack.said("deaf: up"))
    stack.kill(signal.SIGTERM)
    assert stack.process.wait(60) == 0
    wait_for(lambda: stack.said("SIGKILL"))
    assert not stack.children()


def test_a_second_signal_ends_the_wait(start: Callable[..., StubStack]) -> None:
    stack = start("deaf", STUB_DRAIN_S="600")
    wait_for(lambda: stack.said("deaf: up"))
    stack.kill(signal.SIGINT)
    wait_for(lambda: stack.said("stopping"))
    stack.kill(signal.SIGINT)
    assert stack.process.wait(60) == 0


def test_a_killed_child_is_started_again_and_reported(start: Callable[..., StubStack]) -> None:
    stack = start("plain")
    first = wait_for(lambda: stack.said("plain: up") and stack.child("plain"))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: stack.count("plain: up") == 2)
    assert stack.child("plain") not in (None, first)
    assert stack.said(f"pid {first} ended with signal SIGKILL")
    [dead] = [line for line in stack.lines if line.startswith("up dead plain-")]
    assert dead.endswith(f" {first}")
    runs = {line.split()[2] for line in stack.lines if line.startswith("up dead")} | {
        command.split()[-1] for command in stack.children().values()
    }
    assert len(runs) == 2, "each run has a name of its own"


def test_what_a_dead_child_leaves_behind_goes_with_it(start: Callable[..., StubStack]) -> None:
    """The workers of a killed API master would keep its port."""
    stack = start("forking-left-alone")
    wait_for(lambda: stack.said("exit status 3"))
    wait_for(lambda: stack.count("exit status 3") >= 2)
    assert len(stack.children()) <= 2


def test_one_that_keeps_ending_is_retried_later_and_later_and_quoted(start: Callable[..., StubStack]) -> None:
    stack = start("failing", "plain")
    wait_for(lambda: stack.said("in 1.6 s"), 20)
    waits = [line.rpartition(" in ")[2] for line in stack.lines if "failing: pid" in line]
    assert waits[:4] == ["0.2 s", "0.4 s", "0.8 s", "1.6 s"]
    assert stack.said("!!! failing has ended 3 times")
    assert stack.said("!!!   no such model")
    assert stack.count("plain started") == 1


def test_one_that_failed_once_comes_up(start: Callable[..., StubStack], tmp_path: Path) -> None:
    stack = start("failing-once", STUB_FILE=str(tmp_path / "there"))
    wait_for(lambda: stack.said("failing-once: up"))
    assert stack.said("exit status 7")
    assert not stack.said("!!!")


def test_a_command_that_does_not_exist_is_said_and_retried(start: Callable[..., StubStack]) -> None:
    stack = start("missing")
    wait_for(lambda: stack.count("cannot be started") >= 2)
    stack.kill(signal.SIGTERM)
    assert stack.process.wait(10) == 0
