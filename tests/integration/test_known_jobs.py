"""The store's side of coming back to a request: races, tenants, bounds, and what other hands have put into the store."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest

from api.relay.hub import BACKLOG
from shared import keys, results
from shared.errors import Cancelled, IdempotencyConflict, InternalError, NotFound, SluiceError, WorkerLost
from shared.frames import Delta, Error, ending_with
from shared.jobs import Job, Placement, new_id
from shared.scripts import Scripts
from tests.conftest import Node, Store, Worker, script, wait_for


def log_of(store: Store, job_id: str) -> list[Any]:
    return store.client.xrange(keys.log(job_id))


def test_cancelled_while_being_taken(store: Store, start_worker: Any, node: Node) -> None:
    """FB-019: what was answered `cancelled` says nothing afterwards and has no other result."""
    workers: list[Worker] = [start_worker(lanes=64), start_worker(lanes=64)]
    dice, ended = random.Random(19), {}
    for _ in range(500):
        stream = node.submit(script("x", repeat=0, delay_ms=1))
        time.sleep(dice.uniform(0, 0.005))  # the race itself
        node.gateway.known.cancel(stream.job.id)
        ended[stream.job.id] = log_of(store, stream.job.id)
        stream.subscription.close()
    wait_for(lambda: node.busy() == 0)
    told = 0
    for job_id, log in ended.items():
        frames = [frame for _, entry in results.entries(log) for frame in entry]
        assert log_of(store, job_id) == log, "nothing is said after the answer"
        assert store.client.hget(keys.job(job_id), "status") == b"canceled"
        assert isinstance(frames[-1], Error) and frames[-1].error["code"] == "cancelled"
        kept = store.client.xrange(keys.results(job_id))
        assert len(kept) == 1 and results.read(kept)[-1] == frames[-1]
        told += any(isinstance(frame, Delta) for frame in frames)
    assert 0 < told < 500, "some were cancelled before their first token and some after"
    assert all(worker.process.poll() is None for worker in workers)
    assert not any(store.client.exists(keys.lanes(worker.name)) for worker in workers)


def test_another_tenant_finds_nothing(store: Store, start_worker: Any, node: Node) -> None:
    start_worker()
    job_id = node.submit(script("a"), tenant="one").read().job.id
    known = node.gateway.known
    assert known.find(job_id, "one").status == "completed"
    with pytest.raises(NotFound):
        known.find(job_id, "other", follow=True)
    key = Placement(tenant="one", idempotency=("k", "body"))
    first, second, third = (
        Job(id=new_id(), model="scripted", prompts=[script("a")], seed=1, created=1) for _ in range(3)
    )
    assert node.gateway.submit(first, key) == first.id == node.gateway.submit(first, key)
    assert node.gateway.submit(second, key) == first.id
    assert node.gateway.submit(third, msgspec.structs.replace(key, tenant="other")) == third.id
    with pytest.raises(IdempotencyConflict):
        node.gateway.submit(second, msgspec.structs.replace(key, idempotency=("k", "other body")))
    assert store.client.ttl(keys.idempotency("one", "k")) > 86_000
    store.client.delete(keys.job(first.id))
    assert node.gateway.submit(second, key) == second.id, "the key of a request that is gone is free"


def test_fb043_a_result_whose_time_is_over(store: Store, start_worker: Any, node: Node) -> None:
    """It is not found, whatever RQ's registries still name, and what is told of all requests is told without it."""
    start_worker()
    over = node.submit(script("a"), placement={"result_ttl_s": 1}).read().job.id
    finished = "rq:finished:scripted:interactive:default"
    wait_for(lambda: not store.client.exists(keys.job(over)))
    assert store.client.zscore(finished, over)
    with pytest.raises(NotFound):
        node.gateway.known.find(over, "default")
    node.gateway.status()
    node.submit(script("b")).read()
    assert store.client.zscore(finished, over) is None, "the next end takes it off"


@pytest.mark.parametrize(
    ("error", "frees"), [(WorkerLost("gone"), True), (Cancelled("no"), True), (InternalError(), False)]
)
def test_an_end_that_may_be_repeated_frees_the_key(
    start_worker: Any, node: Node, error: SluiceError, frees: bool
) -> None:
    start_worker()
    wait_for(node.gateway.cards)
    first, second = (
        Job(id=new_id(), model="scripted", prompts=[script("x", repeat=0, delay_ms=20)], seed=1, created=1)
        for _ in range(2)
    )
    key = Placement(idempotency=(new_id(), "body"))
    assert node.gateway.submit(first, key) == node.gateway.submit(second, key) == first.id
    status = "canceled" if isinstance(error, Cancelled) else "failed"
    assert Scripts(node.store).end(first.id, "test", ending_with(error), status)[0] == 1
    assert node.gateway.submit(second, key) == (second.id if frees else first.id)
    node.gateway.known.cancel(second.id)


@pytest.mark.parametrize("data", [b"", b"{", b"\x80\x04K\x01.", b'["os.system",null,["x"],{}]'])
def test_what_others_put_there_is_not_found(store: Store, node: Node, data: bytes) -> None:
    job_id = new_id()
    store.client.hset(keys.job(job_id), mapping={"status": "queued", "data": data})
    with pytest.raises(NotFound):
        node.gateway.known.find(job_id, "default", follow=True)
    store.client.delete(keys.job(job_id))
    store.client.set(keys.job(job_id), "no hash")
    with pytest.raises(NotFound):
        node.gateway.known.find(job_id, "default")


def test_a_garbled_log_fails_its_own_result_only(store: Store, start_worker: Any, node: Node) -> None:
    start_worker()
    good = node.submit(script("a", "b")).read().job.id
    bad = node.submit(script("a", "b")).read().job.id
    wait_for(lambda: store.client.exists(keys.results(good)) and store.client.exists(keys.results(bad)))
    store.client.delete(keys.results(good), keys.results(bad), keys.log(bad))
    store.client.xadd(keys.log(bad), {"f": b'[{"k":"delta"}]'})
    results.keep(store.client, [bad, good, "cmpl-unknown"])
    assert not store.client.exists(keys.results(bad))
    assert results.value(results.read(store.client.xrange(keys.results(good))))["choices"][0]["text"] == "ab"


def test_a_log_of_another_type_is_put_back_and_harms_nobody_else(store: Store, start_worker: Any, node: Node) -> None:
    start_worker()
    streams = [node.submit(script("x", repeat=40, delay_ms=50)) for _ in range(2)]
    for stream in streams:
        stream.read(lambda stream: stream.tokens)
        stream.subscription.close()
        stream.subscription = node.hub.attach(stream.job.id, pushed=False)
        stream.frames.clear()
        stream.read(lambda stream: stream.tokens)
    bad, good = streams
    store.client.delete(keys.log(bad.job.id))
    store.client.set(keys.log(bad.job.id), "no stream")
    assert bad.read().finish == "stop", "it is put back"
    assert good.read().text == "x" * 40
    store.client.delete(keys.log(bad.job.id), keys.results(good.job.id))
    store.client.set(keys.results(good.job.id), "no result")
    known = node.gateway.known.find(good.job.id, "default")
    assert results.value(node.gateway.known.told(known)[1])["choices"][0]["text"] == "x" * 40
    results.keep(store.client, [good.job.id])


def test_a_client_that_does_not_read_is_kept_a_bounded_backlog(store: Store, start_worker: Any, node: Node) -> None:
    """Streams that are pushed and streams that are looked at; each gets all of it in the end."""
    start_worker()
    pieces = 4 * BACKLOG
    stream = node.submit(script("x", repeat=pieces, delay_ms=1))
    attached = node.hub.attach(stream.job.id, pushed=False)
    status = lambda: store.client.hget(keys.job(stream.job.id), "status")  # noqa: E731
    wait_for(lambda: status() == b"finished", 60)
    for subscription in (stream.subscription, attached):
        wait_for(lambda: subscription.behind)  # noqa: B023 - called at once
        assert subscription.waiting == BACKLOG
    assert stream.read().text == "x" * pieces
    stream.subscription = attached
    stream.frames.clear()
    assert stream.read().text == "x" * pieces
