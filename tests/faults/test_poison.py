"""Requests that kill the workers that run them: they are ended, and nobody else is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared import keys
from tests.conftest import script, wait_for
from tests.faults import books
from tests.faults.told import of_answer, of_stream
from tests.integration.test_http_completions import refused
from tests.stack import Stack

WORDS = [f"w{number} " for number in range(60)]
TEXT = "".join(WORDS)


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """New for each test: who dies often is started again later and later."""
    with (
        Stack(tmp_path_factory.mktemp("poisoned"), options=("--workers", "2:2"), stall_s=3) as stack,
        stack.store() as store,
    ):
        wait_for(lambda: len(stack.status()["workers"]) == 2, 40)
        yield stack
        wait_for(lambda: len(stack.status()["workers"]) == 2, 40)
        assert stack.complete(script("o", "k")).text == "ok", "the fleet goes on"
        wait_for(stack.idle, 20)
        wait_for(lambda: not books.left_behind(store), 20)


def by_code(store: Any, code: str) -> list[str]:
    """Ids of the requests that ended with an error."""
    ids = [key.decode().removeprefix(keys.log("")) for key in store.scan_iter(keys.log("*"))]
    return [job_id for job_id in ids if getattr(books.logged(store, job_id)[-1], "error", {}).get("code") == code]


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_request_that_kills_two_workers_is_ended_and_its_neighbours_go_on(pair: Stack, streamed: bool) -> None:
    with ThreadPoolExecutor(9) as threads, pair.store() as store:
        neighbours = [threads.submit(pair.stream, script(*WORDS, delay_ms=80)) for _ in range(8)]
        wait_for(lambda: len(found := books.running(store)) == 8 and all(tokens(store, job_id) for job_id in found))
        innocent = list(books.running(store))
        prompt = script("a", "b", fatal_after=0, start_delay_ms=50)
        if streamed:
            bad = pair.stream(prompt, timeout=60)
            assert bad.answer is not None or bad.done == 1
            error = bad.answer.error if bad.answer is not None else bad.error
        else:
            answer = pair.complete(prompt)
            refused(answer, 503, code="poison_request")
            assert answer.headers["x-should-retry"] == "false"
            error = answer.error
        assert error is not None and error["code"] == "poison_request" and error["type"] == "server_error"
        for neighbour in neighbours:
            assert of_stream(neighbour.result(60)).choices[0].text == TEXT
        assert [store.hget(keys.job(job_id), "kills") for job_id in innocent] == [b"0"] * 8
        [job_id] = by_code(store, "poison_request")
        kills, tries, crash = store.hmget(keys.job(job_id), "kills", "tries", "crash")
        assert (kills, tries) == (b"2", b"2")
        reports = crash.decode().split("; ")
        assert len(reports) == 2 and all("ended with signal SIGKILL" in report for report in reports), crash
        assert all(
            f" {worker}: process" in report for worker, report in zip(takers(store, job_id), reports, strict=True)
        )


def tokens(store: Any, job_id: str) -> list[int]:
    return books.ids(books.logged(store, job_id))


def takers(store: Any, job_id: str) -> list[str]:
    return [frame.worker for frame in books.logged(store, job_id) if isinstance(frame, books.Take)]


def test_a_request_that_hangs_workers_is_ended_and_its_neighbours_go_on(pair: Stack) -> None:
    """They are in the same worker, and have no token when it hangs for the first time."""
    with pair.store() as store, pair.open(script("a", "b", "c", "d", delay_ms=200, hang_after=2)) as bad:
        bad.goes_on(1)
        victim = books.owner(store, bad.id)
        others = [pid for pid in pair.workers() if pid != victim]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        with pair.open(script(*WORDS, start_delay_ms=500, delay_ms=20)) as neighbour:
            wait_for(lambda: books.running(store).get(neighbour.id), every=0.005)
            for pid in others:
                os.kill(pid, signal.SIGCONT)
            assert of_stream(neighbour.read()).choices[0].text == TEXT
        bad.read(timeout=60)
        assert bad.text == "ab" and bad.error is not None and bad.error["code"] == "poison_request"
        assert "no progress" in store.hget(keys.job(bad.id), "crash").decode()


@pytest.mark.slow
def test_neighbours_that_had_no_token_yet_are_tried_apart(pair: Stack) -> None:
    """Any of them may be the killer, until each has run without the others."""
    with ThreadPoolExecutor(5) as threads:
        quiet = [threads.submit(pair.complete, script("a", "b", start_delay_ms=700)) for _ in range(4)]
        wait_for(lambda: pair.busy() == 4)
        refused(pair.complete(script("a", fatal_after=0)), 503, code="poison_request")
        for answer in quiet:
            assert of_answer(answer.result(60)).choices[0].text == "ab"


@pytest.mark.slow
def test_a_request_whose_workers_die_at_other_tokens_each_time_is_tried_as_often_as_allowed(pair: Stack) -> None:
    """It gets on each time, so it is not what kills them; but five deaths are enough."""
    with pair.store() as store, pair.open(script(*WORDS, delay_ms=100)) as stream:
        for attempt in range(1, 6):
            wait_for(lambda attempt=attempt: len(takers(store, stream.id)) == attempt, 40)
            before = len(tokens(store, stream.id))
            wait_for(lambda before=before: len(tokens(store, stream.id)) > before + 1, 20)
            os.kill(books.owner(store, stream.id), signal.SIGKILL)
        stream.read(timeout=40)
        assert stream.error is not None and stream.error["code"] == "worker_lost" and stream.done == 1
        assert TEXT.startswith(stream.text) and len(stream.text) > len("w0 ") * 8
        kills, tries, crash = store.hmget(keys.job(stream.id), "kills", "tries", "crash")
        assert (kills, tries, crash.count(b";")) == (b"0", b"5", 4)
