"""What one API process knows of models and workers is never older than what a client has seen at another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.errors import ModelNotFound, NoWorker
from tests.conftest import Node, Store, Worker, script

Start = Callable[..., Worker]


def test_a_model_that_one_process_shows_is_known_to_all(store: Store, start_worker: Start) -> None:
    one, other = Node(store.url), Node(store.url)
    store.client.delete("sluice:card:scripted", "sluice:cards")
    for node in (one, other):
        with pytest.raises((ModelNotFound, NoWorker)):
            node.gateway.card(None)
    start_worker()
    while not one.gateway.cards():
        with pytest.raises(ModelNotFound):
            other.gateway.card("no-such-model")  # its knowledge is as fresh as can be, and as old
    assert other.gateway.card("scripted").id == other.gateway.card(None).id == "scripted"
    assert other.submit(script("a")).read().text == "a"
    for node in (one, other):
        node.hub.stop()
        node.gateway.leave()
