"""Batch work has the lanes that nobody else wants, and gives them back at once; it does not starve for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from scripts import carried_model
from shared import keys
from shared.frames import Take
from shared.scripts import Scripts
from shared.settings import Settings
from tests.conftest import Node, Store, Stream, Worker, script, wait_for

Start = Callable[..., Worker]
Open = Callable[..., Node]

BATCH = {"klass": "batch"}
#: One look for waiting requests, a step of the engine, release and take, on a machine that does other things too, s.
SOON = 1.5


def count(first: int, last: int, **more: object) -> tuple[str, str]:
    """A script that counts, so that what is missing or doubled shows, and its text."""
    pieces = [f"{number} " for number in range(first, last)]
    return script(*pieces, **more), "".join(pieces)


def takes(stream: Stream) -> int:
    return sum(isinstance(frame, Take) for frame in stream.frames)


def first_token_s(stream: Stream, since: float) -> float:
    stream.read(lambda stream: stream.tokens)
    return time.monotonic() - since


def test_an_interactive_request_gets_a_lane_that_batch_work_had(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=4)
    prompt, text = count(0, 150, delay_ms=20)
    batch = [node.submit(prompt, placement=BATCH, logprobs=0, echo=False) for _ in range(4)]
    for stream in batch:
        stream.read(lambda stream: len(stream.tokens) > 5)
    began = time.monotonic()
    interactive = node.submit(script("i", delay_ms=20, repeat=20))
    assert first_token_s(interactive, began) < SOON
    assert interactive.read().finish == "stop"
    for stream in batch:
        stream.read()
    assert [stream.text for stream in batch] == [text] * 4
    assert all(len(stream.tokens) == 151 and stream.end.usage["completion_tokens"] == 151 for stream in batch)
    assert [takes(stream) for stream in batch] == [1, 1, 1, 2], "the youngest, and only one"
    assert store.client.hget(keys.job(batch[3].job.id), "kills") == b"0"
    assert store.client.hget(keys.job(batch[3].job.id), "tries") == b"0"


def test_a_wide_request_gets_all_the_lanes_it_needs(start_worker: Start, node: Node) -> None:
    start_worker(lanes=4)
    prompt, text = count(0, 80, delay_ms=20)
    batch = [node.submit(prompt, placement=BATCH) for _ in range(4)]
    for stream in batch:
        stream.read(lambda stream: stream.tokens)
    began = time.monotonic()
    assert first_token_s(node.submit(script("w"), n=3), began) < SOON
    for stream in batch:
        assert stream.read().text == text
    assert sorted(takes(stream) for stream in batch) == [1, 2, 2, 2]


def test_interactive_work_is_not_preempted(start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    prompt, text = count(0, 40, delay_ms=20)
    first = node.submit(prompt).read(lambda stream: stream.tokens)
    second = node.submit(script("s"))
    assert first.read().text == text and takes(first) == 1
    second.read()


def test_batch_work_stays_where_another_worker_has_room(start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    prompt, text = count(0, 60, delay_ms=20)
    batch = node.submit(prompt, placement=BATCH).read(lambda stream: stream.tokens)
    start_worker(lanes=1)
    for _ in range(5):
        node.submit(script("i")).read()
    assert batch.read().text == text and takes(batch) == 1


def test_only_lanes_that_are_missing_are_wanted(store: Store) -> None:
    """Two workers of two lanes, full of batch work, and three requests that wait."""
    scripts = Scripts(store.client)
    stats = {name: {"model": "m", "lanes": 2, "free": 0, "draining": 0} for name in ("one", "two")}

    def figures(name: str, **more: int) -> None:
        store.client.hset(keys.stat(name), mapping={**stats[name], **more})

    def wanted(worker: str, *, free: int = 0, batch: int = 2, yielding: int = 0) -> int:
        return scripts.wanted(worker, "m", "f", free=free, batch=batch, yielding=yielding, lanes=2)

    def submit(name: str, needs: int = 1) -> None:
        args = ("", "t", "interactive", "m", 60_000, 60, 60, needs, "", "", "", "", "", "", 0, "", "", 1, "0 0 0")
        assert scripts.call("submit", f"waits-{name}", *args)[0] == b"ok"

    for name in stats:
        scripts.beat("worker", name, 60_000, register=True)
        figures(name)
    try:
        assert wanted("one") == 0, "nothing waits"
        submit("a")
        figures("two", free=1)
        assert wanted("one") == 0, "another one has room"
        figures("two", free=1, draining=1)
        assert wanted("one") == 1, "but takes nothing any more"
        figures("two")
        assert wanted("two") == 0, "one is being given up elsewhere"
        assert wanted("one", batch=1, yielding=1) == 0, "it is still on its way out"
        submit("b", needs=2)
        assert wanted("two") == 2
        store.client.delete("sluice:yield:m")
        assert wanted("one", batch=1) == 1, "less than the second needs is no use to it"
    finally:
        for name in stats:
            scripts.leave("worker", name)
        for key in store.client.keys("*:m:*"):
            store.client.delete(key)


def test_two_workers_give_up_one_lane_for_one_request(start_worker: Start, node: Node) -> None:
    for _ in range(2):
        start_worker(lanes=1)
    prompt, text = count(0, 100, delay_ms=20)
    batch = [node.submit(prompt, placement=BATCH) for _ in range(2)]
    for stream in batch:
        stream.read(lambda stream: stream.tokens)
    node.submit(script("i", delay_ms=20, repeat=20)).read()
    for stream in batch:
        assert stream.read().text == text
    assert sorted(takes(stream) for stream in batch) == [1, 2]


def test_nothing_gives_way_to_a_request_that_may_not_be_taken_yet(
    store: Store, start_worker: Start, node: Node
) -> None:
    """One of a later version waits for a worker that knows it. Batch work would be thrown about for nothing."""
    start_worker(lanes=1)
    prompt, text = count(0, 60, delay_ms=20)
    batch = node.submit(prompt, placement=BATCH).read(lambda stream: stream.tokens)
    store.client.hset(keys.job("later"), mapping={"v": "99", "status": "queued", "model": "scripted", "needs": "1"})
    store.client.lpush("rq:queue:scripted", "later")
    try:
        assert batch.read().text == text and takes(batch) == 1
    finally:
        store.client.delete("rq:queue:scripted", keys.job("later"))


def test_fb076_old_batch_work_becomes_interactive(start_worker: Start, open_node: Open) -> None:
    """The case: a strict order of queues starves the later one. Interactive requests fill the one lane all the time
    here, and the batch request is served all the same, once it has waited for `batch_age_s`, and is not preempted then."""
    start_worker(lanes=1, batch_age_s=1)
    node = open_node(batch_age_s=1)
    prompt, text = count(0, 30, delay_ms=20)
    flood = [node.submit(script("i", delay_ms=30)) for _ in range(3)]
    batch = node.submit(prompt, placement=BATCH, tenant="night")
    served = 0
    deadline = time.monotonic() + 20
    while not batch.taken() and time.monotonic() < deadline:
        flood.append(node.submit(script("i", delay_ms=30)))
        flood.append(node.submit(script("i", delay_ms=30)))
        flood.pop(0).read()
        served += 1
        if batch.subscription is not None and (got := batch.subscription.get(0)) is not None:
            batch.names.append(got[0])
            batch.frames += got[1]
    assert batch.taken() and len(flood) > 3 and served > 5, "interactive requests were waiting all the time"
    assert batch.read().text == text and takes(batch) == 1
    for stream in flood:
        stream.read()


def test_fb076_a_flood_of_batch_work_holds_up_no_interactive_request(start_worker: Start, node: Node) -> None:
    start_worker(lanes=2)
    batch = [node.submit(script("b", delay_ms=40, repeat=5), placement=BATCH) for _ in range(40)]
    waits = []
    for _ in range(5):
        began = time.monotonic()
        waits.append(first_token_s(node.submit(script("i")), began))
    assert max(waits) < SOON, waits
    waiting = {row["class"]: row["waiting"] for row in node.gateway.status()["queues"]}
    assert waiting["batch"] > 0, "and it shows what waits"
    for stream in batch:
        assert stream.read().text == "b" * 5


def test_a_real_engine_goes_on_as_if_nothing_had_been(store: Store, start_worker: Start, open_node: Open) -> None:
    """Greedy text of the CPU engine, cut by a preemption, is that of an undisturbed run."""
    model = carried_model.ensure(Settings().cache_dir)
    start_worker("--engine", "llamacpp", "--model", f"{model}=cut", lanes=1, context_length=512)
    node = open_node()
    wait_for(lambda: [card.id for card in node.gateway.cards()].count("cut"))
    asked = {"model": "cut", "max_tokens": 60}
    whole = node.submit("The sea is", **asked).read()
    batch = node.submit("The sea is", placement=BATCH, **asked).read(lambda stream: len(stream.tokens) > 10)
    interactive = node.submit("Two and two", model="cut", max_tokens=5)
    interactive.read()
    batch.read()
    assert takes(batch) == 2
    assert (batch.tokens, batch.text) == (whole.tokens, whole.text)
    assert batch.end.usage["completion_tokens"] == whole.end.usage["completion_tokens"]


@pytest.fixture(autouse=True)
def quiet(store: Store) -> None:
    store.client.delete(keys.pace("scripted"))
