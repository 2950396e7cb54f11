"""Clients that read streams from the store: the one of docs/protocol.md, held against what the API is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from shared import frames, keys
from tests.conftest import ROOT, Node, Store, Stream, Worker, script, wait_for

Start = Callable[..., Worker]
Told = tuple[str, dict[str, Any]]
WORDS = [f"w{number} " for number in range(30)]
NAME = "reader-of-the-docs"


@pytest.fixture(scope="module")
def frames_of() -> Callable[..., Iterator[Told]]:
    """The client as the page has it."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], namespace)
    found: Callable[..., Iterator[Told]] = namespace["frames_of"]
    return found


@pytest.fixture
def reader(store: Store) -> Iterator[Any]:
    client = redis.Redis.from_url(store.url, protocol=2, decode_responses=True, client_name=NAME)
    yield client
    client.close()


def told(stream: Stream) -> list[Told]:
    """The frames as they came on the API's way."""
    every = [json.loads(frames.encode_frame(frame)) for frame in stream.frames]
    attempts = {name.s: name.a for name in stream.names}
    named, attempt = [], 0
    for number in range(len(every), 0, -1):
        attempt = attempts.get(number, attempt)
        named.append((f"{attempt}-{number}", every[number - 1]))
    return named[::-1]


def cut_off(store: Store) -> int:
    """Ends the reader's connections; how many."""
    ids = [client["id"] for client in store.client.client_list() if client["name"] == NAME]
    return sum(store.client.client_kill_filter(_id=client_id) for client_id in ids)


def test_a_client_of_the_log_gets_what_the_api_is_told(
    store: Store, start_worker: Start, node: Node, reader: Any, frames_of: Callable[..., Iterator[Told]]
) -> None:
    """One that came before the first frame and loses its connection on the way, one that comes late, and those that go on
    from any frame."""
    start_worker(lanes=1)
    first = node.submit(script(*["x"] * 20, delay_ms=20))
    stream = node.submit(script(*WORDS, delay_ms=30))
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(lambda: list(frames_of(reader, stream.job.id)))
        wait_for(lambda: cut_off(store))
        first.read()
        stream.read(lambda stream: len(stream.tokens) > 5)
        late = threads.submit(lambda: list(frames_of(reader, stream.job.id)))
        stream.read(lambda stream: len(stream.tokens) > 15)
        assert cut_off(store)
        expected = told(stream.read())
        assert early.result(30) == expected and late.result(30) == expected
    assert "".join(frame.get("text", "") for _, frame in expected if frame["k"] == "delta") == "".join(WORDS)
    for place in range(len(expected) - 1):
        assert list(frames_of(reader, stream.job.id, expected[place][0])) == expected[place + 1 :]


def test_a_request_that_fails_ends_with_its_error(
    start_worker: Start, node: Node, reader: Any, frames_of: Callable[..., Iterator[Told]]
) -> None:
    start_worker()
    stream = node.submit(script("a", "b", error_after=1)).read()
    [*_, (name, last)] = frames_of(reader, stream.job.id)
    assert last["k"] == "error" and last["error"]["code"] == "internal_error"
    assert name == told(stream)[-1][0]


def test_what_the_store_has_lost_is_noticed(
    store: Store, reader: Any, frames_of: Callable[..., Iterator[Told]]
) -> None:
    """A hole; and another run in the place of what was seen."""
    for entry in ("5-1", "5-2", "5-4"):
        store.client.xadd(keys.log("cmpl-hole"), {"f": '[{"k":"delta","i":0,"t":[1]}]'}, id=entry)
    read = frames_of(reader, "cmpl-hole")
    assert [next(read)[0], next(read)[0]] == ["5-1", "5-2"]
    with pytest.raises(LookupError):
        next(read)
    store.client.xadd(keys.log("cmpl-fork"), {"f": '[{"k":"delta","i":0,"t":[1]}]'}, id="7-2")
    with pytest.raises(LookupError):
        next(frames_of(reader, "cmpl-fork", "5-3"))


def test_every_request_is_published_where_the_setting_says_so(
    store: Store, start_worker: Start, open_node: Callable[..., Node]
) -> None:
    start_worker()
    stream = open_node(fanout_all=True).submit(script("a")).read()
    assert store.client.hget(keys.job(stream.job.id), "fanout") == b"1"
