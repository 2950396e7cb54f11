"""`sluice complete` as a program among others in a pipe: who leaves it, or interrupts it, cancels the request."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.conftest import ROOT, script, wait_for
from tests.stack import SCRIPTED, Stack, endless


@contextmanager
def started(stack: Stack, prompt: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command with the prompt on its standard input."""
    url = f"http://127.0.0.1:{stack.port}"
    command = [sys.executable, "-m", "scripts.cli", "complete", "--model", SCRIPTED, "--url", url]
    pipe = subprocess.PIPE
    # A shell starts what it runs in the background with interrupts ignored, and this may be run by one.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=heard) as process:
        assert process.stdin is not None
        process.stdin.write(prompt.encode())
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def test_it_is_all_text_and_comes_as_it_is_made(stack: Stack) -> None:
    with started(stack, script("café\n", "\U0001f600")) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == "café\n\U0001f600".encode()
        assert (process.wait(30), process.stderr.read()) == (0, b"")


def test_a_reader_that_leaves_cancels_the_request(stack: Stack) -> None:
    with started(stack, endless(delay_ms=20)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10) == b"tick tick "
        process.stdout.close()
        assert process.wait(30) == -signal.SIGPIPE
        assert process.stderr.read() == b""
    wait_for(stack.idle)


def test_an_interrupt_cancels_the_request(stack: Stack) -> None:
    with started(stack, endless(delay_ms=20)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10) == b"tick tick "
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""
    wait_for(stack.idle)
