"""Requests that the store has got, and whose API process does not know it: what the client was told is what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from api.app import create_app
from api.known_jobs import KnownJobs
from shared import connection, keys, scripts
from shared.errors import StoreUnavailable
from shared.jobs import Job, Placement, new_id
from tests.conftest import Node, Store, Worker, script, wait_for
from tests.faults.proxy import Proxy


@pytest.fixture
def forgetful(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """An API side that never hears that its requests were queued, and does not wait for long."""
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT", 1.0)
    store.client.script_load(scripts.text("submit"))
    proxy = Proxy(store.url.removeprefix("unix://"), forgets=scripts.sha("submit").encode())
    node = Node(proxy.url)
    yield node
    node.hub.stop()
    node.gateway.leave()
    proxy.close()


def job() -> Job:
    prompt = script("a", repeat=0, delay_ms=50)
    return Job(id=new_id(), model="scripted", prompts=[prompt], seed=1, created=1)


def refused(node: Node, placement: Placement) -> str:
    """Id of a request that was queued and refused."""
    wait_for(node.gateway.cards, 30)
    asked = job()
    with pytest.raises(StoreUnavailable):
        node.gateway.submit(asked, placement, followed=not placement.background)
    assert node.gateway.known.find(asked.id, "default")
    return asked.id


@pytest.mark.parametrize("background", [True, False])
def test_what_was_refused_does_not_run_on(
    store: Store, start_worker: Callable[..., Worker], forgetful: Node, background: bool
) -> None:
    start_worker()
    job_id = refused(forgetful, Placement(background=background))
    wait_for(lambda: store.client.hget(keys.job(job_id), "terminal"), 30)


def test_what_was_refused_and_is_repeated_with_its_key_is_the_same(
    store: Store, start_worker: Callable[..., Worker], forgetful: Node, node: Node
) -> None:
    start_worker()
    placement = Placement(background=True, idempotency=("key", "body"))
    job_id = refused(forgetful, placement)
    wait_for(node.gateway.cards)
    assert node.gateway.submit(job(), placement, followed=False) == job_id
    beats = store.client.info("commandstats")["cmdstat_evalsha"]["calls"]
    wait_for(lambda: store.client.info("commandstats")["cmdstat_evalsha"]["calls"] > beats + 40, 30)
    assert not store.client.hget(keys.job(job_id), "terminal")
    node.gateway.known.cancel(job_id)


def test_a_background_request_is_accepted_once_it_is_queued(
    store: Store, start_worker: Callable[..., Worker], node: Node
) -> None:
    """The store goes right after: what it can no longer tell is not told."""
    start_worker()
    wait_for(node.gateway.cards)
    node.gateway.known = KnownJobs(connection.connect("unix:///nowhere"), node.gateway.proc)
    client = create_app(node.settings, gateway=node.gateway, hub=node.hub).test_client()
    body = {"model": "scripted", "prompt": script("a"), "background": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 202 and answer.json["status"] == "queued", answer.data
    job_id = answer.headers["x-sluice-id"]
    assert answer.json["id"] == job_id
    wait_for(lambda: store.client.hget(keys.job(job_id), "status") == b"finished", 30)
