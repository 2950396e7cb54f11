"""FB-019: requests that are cancelled just as they are queued, taken and run. No token comes behind `cancelled`: not in the
log, not in a result, and not on the channel, where an entry from before the end may arrive late, by its name before it."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from shared import frames, keys
from shared.errors import Cancelled
from shared.frames import Error, Frame, Name, Take, ending_with
from shared.jobs import Job, Placement, new_id
from shared.scripts import Scripts
from tests.conftest import Node, Store, Worker, script, wait_for
from tests.faults import books
from tests.stack import SCRIPTED, Stack, body

COUNT = 500
#: Between sending a request and cancelling it, s.
SOON = 0.005
#: Tokens come as fast as they can, until somebody cancels.
RUNNING = script("a", "b", "c", repeat=0, delay_ms=1)
CANCELLED = ending_with(Cancelled("The test has cancelled it."))


class Listener(threading.Thread):
    """Everything that is published of single requests, in its order."""

    def __init__(self, store: Any) -> None:
        super().__init__(daemon=True)
        self.heard: dict[str, list[tuple[Name, list[Frame]]]] = {}
        self._channel = store.pubsub()
        self._channel.psubscribe(keys.out_channel("*"))
        self._done = threading.Event()

    def run(self) -> None:
        with closing(self._channel):
            message = None
            while message is not None or not self._done.is_set():
                message = self._channel.get_message(timeout=0.1)
                if message is not None and message["type"] == "pmessage":
                    for job_id, told in frames.decode_message(message["data"]).items():
                        self.heard.setdefault(job_id, []).append(frames.decode_told(told))

    def stop(self) -> None:
        self._done.set()
        self.join(10)


@pytest.fixture
def listener(store: Store) -> Iterator[Listener]:
    listener = Listener(store.client)
    listener.start()
    yield listener
    listener.stop()


def nothing_after_the_end(told: list[Frame]) -> bool:
    ends = [place for place, frame in enumerate(told) if isinstance(frame, frames.TERMINAL)]
    return ends == [len(told) - 1]


def heard_nothing_else(heard: list[tuple[Name, list[Frame]]], told: list[Frame]) -> bool:
    """Each entry that was heard stands in the log, where its name says; the end is the last of them."""
    return max(name.s for name, _ in heard) == len(told) and all(
        told[name.s - len(entry) : name.s] == entry for name, entry in heard
    )


def is_cancelled(told: list[Frame]) -> bool:
    return bool(told) and isinstance(told[-1], Error) and told[-1].error["code"] == "cancelled"


def test_cancelled_at_the_store(
    store: Store, start_worker: Callable[..., Worker], node: Node, listener: Listener
) -> None:
    workers = [start_worker(), start_worker()]
    wait_for(node.gateway.cards)
    dice, scripts = random.Random(19), Scripts(store.client)

    def once(moment: float) -> tuple[str, bool, bool]:
        job = Job(id=new_id(), model=SCRIPTED, prompts=[RUNNING], seed=1, created=0)
        node.gateway.submit(job, Placement(fanout=True))
        time.sleep(moment)
        code, _ = scripts.end(job.id, "a test", CANCELLED, "canceled")
        again, by = scripts.end(job.id, "a test", CANCELLED, "canceled")
        return job.id, code == 1, again == 0 and bool(by)

    with ThreadPoolExecutor(4) as threads:
        answered = list(threads.map(once, [dice.uniform(0, SOON) for _ in range(COUNT)]))
    wait_for(lambda: not books.running(store.client), 30)
    assert all(again for _, _, again in answered), "the second cancel finds the end"
    assert sum(won for _, won, _ in answered) == COUNT, "nothing of it ends by itself that soon"
    begun = 0
    for job_id, _, _ in answered:
        told = books.logged(store.client, job_id)
        assert nothing_after_the_end(told) and is_cancelled(told), told
        begun += any(isinstance(frame, Take) for frame in told)
        assert heard_nothing_else(listener.heard[job_id], told)
        assert store.client.hget(keys.job(job_id), "status") == b"canceled"
        assert not store.client.exists(f"rq:results:{job_id}")
    print(f"{begun} of {COUNT} were cancelled after they had been taken")
    assert all(worker.process.poll() is None for worker in workers)
    assert node.submit(script("o", "k")).read().text == "ok"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("raced"), options=("--workers", "2:2")) as stack:
        yield stack


@pytest.mark.slow
def test_cancelled_by_hanging_up(pair: Stack) -> None:
    dice = random.Random(20)
    sent = json.dumps(body(RUNNING, SCRIPTED, {"stream": True, "fanout": True})).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n"
    with pair.store() as store:
        listener = Listener(store)
        listener.start()

        def once(moment: float) -> None:
            with socket.create_connection(("127.0.0.1", pair.port), timeout=20) as client:
                client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
                time.sleep(moment)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(once, [dice.uniform(0, SOON) for _ in range(COUNT)]))
        wait_for(pair.idle, 60)
        listener.stop()
        ids = [key.decode().removeprefix(keys.log("")) for key in store.scan_iter(keys.log("*"), count=1000)]
        cancelled = 0
        for job_id in ids:
            told = books.logged(store, job_id)
            assert nothing_after_the_end(told)
            if is_cancelled(told):
                cancelled += 1
                assert heard_nothing_else(listener.heard[job_id], told)
        assert cancelled > COUNT / 2
        wait_for(lambda: not books.left_behind(store), 30)
    assert pair.complete(script("o", "k")).text == "ok"
