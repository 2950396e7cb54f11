"""What one API process knows of models and workers is never older than what a client has seen at another one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from shared import cards, keys
from shared.cards import ModelCard
from shared.errors import ModelNotFound, NoWorker
from shared.jobs import Job, new_id
from tests.conftest import Node, Store, Worker, script, wait_for


def test_a_model_that_one_process_shows_is_known_to_all(store: Store, node: Node) -> None:
    for number in range(5):
        name = f"late-{number}"
        with pytest.raises(ModelNotFound):
            node.gateway.card(name)  # what it knows is new now, and would do for a while
        card = ModelCard(
            id=name, engine="none", context=8, vocab_size=8, lanes=1, fingerprint="f", aliases=(f"a{number}",)
        )
        store.client.hset(keys.card(name), "card", cards.encode(card))
        store.client.sadd(keys.CARDS, name)
        store.client.set(keys.starter(name), "1", ex=60)
        until = time.monotonic() + 0.15  # sooner than knowledge gets old by itself
        while time.monotonic() < until:
            try:
                assert node.gateway.card(f"a{number}").id == name
                break
            except ModelNotFound:
                continue
        else:
            pytest.fail("not known in time")


def test_names_that_are_no_text_stop_nobody(
    store: Store, node: Node, start_worker: Callable[..., Worker], request: pytest.FixtureRequest
) -> None:
    """Somebody wrote something else where names belong: requests run, the state is told, and the dead are found."""
    sets = (keys.WORKERS, keys.PROCS, keys.CARDS, keys.RQ_QUEUES, keys.RESUMES)
    for name in sets:
        store.client.sadd(name, b"\xff\xfe")
        request.addfinalizer(lambda name=name: store.client.srem(name, b"\xff\xfe"))
    store.client.zadd(keys.UNKEPT, {b"\xff\xfe": 1})
    request.addfinalizer(lambda: store.client.zrem(keys.UNKEPT, b"\xff\xfe"))
    worker = start_worker()
    assert node.submit(script("a")).read().text == "a"
    assert [row["name"] for row in node.gateway.status()["workers"]] == [worker.name]
    store.client.sadd(keys.WORKERS, "gone")
    wait_for(lambda: not store.client.sismember(keys.WORKERS, "gone"), 30)


def test_what_something_else_starts_workers_for_is_served_without_one(
    store: Store, open_node: Callable[..., Node]
) -> None:
    card = ModelCard(id="elsewhere", engine="none", context=8, vocab_size=8, lanes=1, fingerprint="f")
    store.client.hset(keys.card(card.id), "card", cards.encode(card))
    store.client.sadd(keys.CARDS, card.id)
    job = Job(id=new_id(), prompts=["x"], model=card.id, seed=1, created=1)
    with pytest.raises(NoWorker):
        open_node().gateway.submit(job)
    scaled = open_node(scales_from_zero=[card.id, "never-seen"]).gateway
    assert [found.id for found in scaled.cards() if found.id in (card.id, "never-seen")] == [card.id]
    scaled.submit(job)
    assert store.client.scard(keys.work(card.id)) == 1
    scaled.detach(job.id)
    assert not store.client.exists(keys.work(card.id))


def test_a_model_that_cannot_be_loaded_is_refused_at_once_and_stays_listed(store: Store, node: Node) -> None:
    card = ModelCard(id="damaged", engine="none", context=8, vocab_size=8, lanes=1, fingerprint="f")
    store.client.hset(keys.card(card.id), "card", cards.encode(card))
    store.client.sadd(keys.CARDS, card.id)
    store.client.set(keys.starter(card.id), "failed somebody", ex=60)
    with pytest.raises(NoWorker, match="cannot be loaded"):
        node.gateway.submit(Job(id=new_id(), prompts=["x"], model=card.id, seed=1, created=1))
    assert card.id in [found.id for found in node.gateway.cards()]
