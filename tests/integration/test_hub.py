"""The hub against a real store: late subscriptions, lost messages, lost connections."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared import frames, keys
from shared.frames import Delta, Name
from tests.conftest import Node, Store, Worker, script, wait_for

Start = Callable[..., Worker]


def test_fb002_two_hundred_fast_streams_in_a_row_lose_nothing(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    for _ in range(200):
        began = time.monotonic()
        stream = node.submit(script("a", "b", "c")).read()
        assert (stream.text, stream.finish) == ("abc", "stop")
        assert time.monotonic() - began < 2, "a stream waited on a timeout"


def test_fb002_a_late_subscription_loses_nothing(store: Store, start_worker: Start) -> None:
    start_worker()
    late = Node(store.url, subscribe_delay=0.5)
    streams = [late.submit(script("a", "b", "c")) for _ in range(50)]
    for stream in streams:
        assert stream.read(timeout=3).text == "abc"
    store.client.client_kill_filter(_type="pubsub")  # and again, when it has to come back
    streams = [late.submit(script("a", "b", "c")) for _ in range(50)]
    for stream in streams:
        assert stream.read(timeout=3).text == "abc"
    late.hub.stop()


def test_fb022_killing_the_subscription_in_mid_stream_loses_nothing(
    store: Store, start_worker: Start, node: Node
) -> None:
    start_worker()
    words = [f"w{i} " for i in range(50)]
    stream = node.submit(script(*words, delay_ms=20))
    for cut in (5, 20, 40):
        stream.read(lambda stream, cut=cut: len(stream.tokens) >= cut)
        store.client.client_kill_filter(_type="pubsub")
    assert stream.read().text == "".join(words)


def test_a_message_that_never_came_is_read_from_the_log(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    stream = node.submit(script(*"abc", delay_ms=30))
    stream.read(lambda stream: len(stream.tokens) >= 1)
    node.hub._channel = b"nowhere"  # the next subscription hears nothing: only the look at the log helps
    store.client.client_kill_filter(_type="pubsub")
    assert stream.read(timeout=15).text == "abc"


def test_garbage_on_the_channel_harms_nobody(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script(*"abcdefgh", delay_ms=20))
    stream.read(lambda stream: stream.tokens)
    channel = keys.node_channel(node.gateway.proc)
    for payload in (
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"v":1,"x":["1-x",[]]}',
        b'{"v":1,"%b":["9",[{"k":"odd"}]]}' % stream.job.id.encode(),
    ):
        store.client.publish(channel, payload)
    assert stream.read().text == "abcdefgh"


def test_a_repeated_message_is_delivered_once(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script(*"abcd", delay_ms=30))
    stream.read(lambda stream: len(stream.tokens) >= 2)
    for name, fields in store.client.xrange(keys.log(stream.job.id)):
        store.client.publish(
            keys.node_channel(node.gateway.proc),
            frames.message([(stream.job.id, Name.parse(name.decode()), fields[b"f"])]),
        )
    assert stream.read().text == "abcd"
    assert sum(isinstance(frame, Delta) for frame in stream.frames) == 5


def test_a_job_that_vanished_ends_its_stream(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    blocker = node.submit(script("x", repeat=0, delay_ms=50))
    blocker.read(lambda stream: stream.tokens)
    stream = node.submit(script("a"))
    store.client.delete(keys.job(stream.job.id))
    subscription = stream.subscription
    wait_for(lambda: subscription._error is not None, 15)
    assert subscription._error is not None and subscription._error.code == "job_lost"
    blocker.hang_up()


def test_a_reader_that_lags_gets_the_rest_from_the_log(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(script("x", repeat=3000))
    wait_for(lambda: stream.subscription._behind or stream.subscription.order.ended, 20)
    assert len(stream.subscription._entries) <= 512
    assert stream.read().text == "x" * 3000
