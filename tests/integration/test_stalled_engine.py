"""An engine that gets nowhere: in a step that never ends, or in steps that come back and compute nothing.

https://github.com/theroyallab/tabbyAPI/issues/428: generation hung, and the health check said that all was well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shared.frames import Name
from shared.jobs import Job
from shared.reaper import LATE
from shared.scripts import Scripts
from tests.conftest import Node, Store, Stream, Worker, script, wait_for
from workers.engine_loop import EngineLoop
from workers.engines.base import EngineStats, Event
from workers.engines.scripted import ScriptedEngine
from workers.lane import Lane, PromptIds


def test_a_worker_whose_step_never_ends_exits(
    start_worker: Callable[..., Worker], open_node: Callable[..., Node]
) -> None:
    worker, node = start_worker(stall_s=1), open_node(cold_start_s=1)
    stream = node.submit(script("a", repeat=0, hang_after=3), max_tokens=10)
    assert worker.process.wait(30) == 70
    stream.read()
    assert stream.text == "aaa"
    assert stream.error is not None and stream.error["code"] == "worker_lost", "no other came in time"


def test_a_worker_that_was_overtaken_in_a_step_that_never_ends_exits(
    store: Store, start_worker: Callable[..., Worker], open_node: Callable[..., Node]
) -> None:
    """None of what it runs is its own any more; it would take new requests all the same, and run none."""
    worker, node = start_worker(stall_s=1), open_node()
    stream = node.submit(script("a", start_delay_ms=3000, hang_after=1))
    stream.read(Stream.started)
    store.client.client_pause(20_000, all=False)  # whoever writes waits, and is let in in the order of coming
    overtaking = threading.Thread(target=Scripts(store.client).end, args=(stream.job.id, "client", LATE, "failed"))
    overtaking.start()
    wait_for(lambda: any(client["cmd"] == "xadd" and "b" in client["flags"] for client in store.client.client_list()))
    store.client.client_unpause()
    overtaking.join(10)
    assert worker.process.wait(30) == 70
    assert not stream.read().text


class Spinning(ScriptedEngine):
    """Its steps come back at once and do nothing. `computed`: what it says it has done."""

    steps = computed = 0

    def step(self) -> list[Event]:
        threading.Event().wait(0.001)
        self.steps += 1
        return []

    def stats(self) -> EngineStats:
        return EngineStats(1, 0, 0, 1, self.computed)


def test_steps_that_compute_nothing_are_no_progress() -> None:
    engine = Spinning(lanes=1)
    loop = EngineLoop(engine, lambda part, word: None)
    loop.attach(lambda lanes: None, lambda error: None)
    loop.start()
    card = loop.wait_loaded()
    prompt = engine.tokenize(script("a", repeat=0))
    job = Job(id="j", model=card.id, prompts=[prompt], seed=1, created=0, max_tokens=9)
    lane = Lane(
        job,
        Name(1, 0),
        [PromptIds(prompt, 9, sent_as_text=False)],
        end_ids=card.end_ids,
        hidden=card.control_ids,
        pieces=engine.pieces,
    )
    loop.add(lane)
    wait_for(lambda: engine.steps > 1)
    at = loop.progressed_at
    wait_for(lambda: engine.steps > 50)
    assert loop.progressed_at == at
    engine.computed += 1
    wait_for(lambda: loop.progressed_at > at)
    loop.stop()
    loop.join(10)
    assert not loop.is_alive()
