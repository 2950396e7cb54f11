"""How requests are queued and what is kept of them: class, turn, fanout, store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared import frames, keys
from shared.frames import Delta, Frame
from tests.conftest import Node, Store, Stream, Worker, script, wait_for

Start = Callable[..., Worker]

RUNS = script("r", repeat=30, delay_ms=20)


def taken_in_order(*streams: Stream) -> list[Stream]:
    """The streams as their takes came, read to the end."""
    return sorted(streams, key=lambda stream: stream.read().names[0].a)


def test_interactive_requests_go_before_batch_ones(start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    node.submit(RUNS).read(lambda stream: stream.tokens)
    batch = node.submit(script("b", delay_ms=10), placement={"klass": "batch"})
    waiting = {row["class"]: row["waiting"] for row in node.gateway.status()["queues"]}
    assert waiting["batch"] == 1
    interactive = [node.submit(script("i", delay_ms=10)) for _ in range(2)]
    assert taken_in_order(batch, *interactive) == [*interactive, batch]


def test_a_negative_priority_goes_ahead_of_the_tenants_own(start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    node.submit(RUNS).read(lambda stream: stream.tokens)
    plain = [node.submit(script("p", delay_ms=10)) for _ in range(2)]
    ahead = node.submit(script("a", delay_ms=10), placement={"ahead": True})
    assert taken_in_order(*plain, ahead) == [ahead, *plain]


def test_fanout_publishes_what_the_log_has(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    node.submit(RUNS).read(lambda stream: stream.tokens)
    stream = node.submit(script(*"abc", delay_ms=30), placement={"fanout": True})
    listener: Any = store.client.pubsub()
    listener.subscribe(keys.out_channel(stream.job.id))
    listener.get_message(timeout=2)
    stream.read()
    heard: list[Frame] = []

    def heard_all() -> bool:
        message = listener.get_message(timeout=0.1)
        if message is not None and message["type"] == "message":
            heard.extend(frames.decode_told(frames.decode_message(message["data"])[stream.job.id])[1])
        return len(heard) >= len(stream.frames)

    wait_for(heard_all)
    assert heard == stream.frames
    assert "".join(frame.text for frame in heard if isinstance(frame, Delta)) == "abc"
    listener.close()


def test_what_is_not_to_be_stored_is_gone_soon(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    kept, forgotten = node.submit(script("k")).read(), node.submit(script("f"), placement={"keep": False}).read()
    wait_for(lambda: store.client.exists(f"rq:results:{forgotten.job.id}"))
    for stream, longest in ((kept, 3600), (forgotten, 60)):
        for key in (keys.job(stream.job.id), keys.log(stream.job.id), f"rq:results:{stream.job.id}"):
            assert 0 < store.client.ttl(key) <= longest, key
    assert store.client.ttl(keys.job(kept.job.id)) > 60
