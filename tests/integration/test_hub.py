"""The hub against a real store: late subscriptions, lost messages, lost connections."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from api.relay import hub
from shared import frames, keys
from shared.errors import SluiceError
from shared.frames import Delta, Name, Take
from shared.scripts import Page, Scripts
from tests.conftest import Node, Store, Stream, Worker, script, wait_for
from workers.emitter import ENTRY_BYTES

Start = Callable[..., Worker]


def test_fb002_two_hundred_fast_streams_in_a_row_lose_nothing(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    for _ in range(200):
        began = time.monotonic()
        stream = node.submit(script("a", "b", "c")).read()
        assert (stream.text, stream.finish) == ("abc", "stop")
        assert time.monotonic() - began < 2, "a stream waited on a timeout"


def test_fb002_a_late_subscription_loses_nothing(
    store: Store, start_worker: Start, open_node: Callable[..., Node]
) -> None:
    start_worker()
    late = open_node(subscribe_delay=0.5)
    streams = [late.submit(script("a", "b", "c")) for _ in range(50)]
    for stream in streams:
        assert stream.read(timeout=3).text == "abc"
    store.client.client_kill_filter(_type="pubsub")  # and again, when it has to come back
    streams = [late.submit(script("a", "b", "c")) for _ in range(50)]
    for stream in streams:
        assert stream.read(timeout=3).text == "abc"


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


def test_what_a_reader_that_lags_holds_is_bounded_in_bytes(
    store: Store, start_worker: Start, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it may take its time: that its request has ended long since, and nothing comes for it, is no fault."""
    monkeypatch.setattr(hub, "IDLE", 0.2)
    monkeypatch.setattr(hub, "SHORT", 0.5)
    looks: list[str] = []
    monkeypatch.setattr(node.hub, "_lost", looks.append)
    start_worker()
    silent = node.submit(script("a", start_delay_ms=60_000))
    piece = "x" * 4000
    stream = node.submit(script(piece, repeat=500))
    wait_for(lambda: store.client.hget(keys.job(stream.job.id), "terminal"), 30)
    looked = len(looks)
    wait_for(lambda: len(looks) >= looked + 3, 30)
    assert stream.subscription.behind and silent.subscription.live
    kept = sum(len(frames.encode_entry(entry[1])) for entry in stream.subscription._entries)
    assert kept < hub.BACKLOG_BYTES + 2 * ENTRY_BYTES
    assert stream.read().text == piece * 500
    silent.hang_up()


def test_each_loss_has_its_own_time() -> None:
    """What was missing came on the channel: when the log lacks something again, an hour later, it gets its six seconds."""
    nowhere = hub.Hub("unix:///nowhere", "p", store_wait=1.0)
    subscription = nowhere.attach("j", pushed=True)
    subscription.feed(Name(5, 1), [Take("w")], 0)
    subscription.fell_short()
    subscription.feed(Name(5, 2), [Delta(0, [1], "a")], 0)
    assert subscription.short_since is None and subscription.live


def test_a_log_is_read_in_pages_of_bounded_size(store: Store) -> None:
    """No more than was asked for, but always something new: the first entry is the one that was seen."""
    scripts = Scripts(store.client)
    store.client.script_flush()
    for s in range(1, 101):
        store.client.xadd(keys.log("j"), {"f": b"x" * (1000 if s <= 50 else 20)}, id=f"7-{s}")
    store.client.set(keys.log("text"), "text")

    def page(last: Name, most: int, size: int) -> tuple[list[int], bool]:
        [page] = scripts.pages([("j", last)], most, size)
        assert page is not None
        return [Name.parse(name.decode()).s for name, _ in page.entries], page.more

    assert page(Name(7, 1), 512, 10_000) == ([*range(1, 11)], True)
    assert page(Name(7, 10), 512, 1) == ([10, 11], True)
    assert page(Name(7, 51), 20, 10_000) == ([*range(51, 71)], True)
    assert page(Name(7, 81), 20, 10_000) == ([*range(81, 101)], False)
    assert page(Name(7, 100), 512, 10_000) == ([100], False)
    assert page(Name(7, 101), 512, 10_000) == ([], False)
    assert scripts.pages([("text", Name(0, 0)), ("none", Name(0, 0))], 9, 9) == [None, Page([], False)]
    store.client.delete(keys.log("j"), keys.log("text"))


def test_broken_keys_of_one_request_keep_nothing_from_the_others(store: Store, start_worker: Start, node: Node) -> None:
    """Whatever somebody wrote over a running request: each client gets its end, and no other waits for it."""
    node.settings.cold_start_s = 1.0
    worker = start_worker(lease_s=2)
    silent = script("a", start_delay_ms=60_000)
    no_log, no_hash, no_number, untouched = streams = [node.submit(silent) for _ in range(4)]
    wait_for(lambda: node.busy() == 4)
    store.client.set(keys.log(no_log.job.id), "text")
    store.client.set(keys.job(no_hash.job.id), "text")
    store.client.hset(keys.job(no_number.job.id), mapping={"dl": "x", "queued": "nan", "a": b"\xff"})
    worker.kill()
    assert [_end(stream) for stream in streams] == ["log_lost", "job_lost", "worker_lost", "worker_lost"]
    assert store.client.hget(keys.job(untouched.job.id), "terminal") in (b"sweep", b"reaper")
    store.client.delete(keys.log(no_log.job.id), keys.job(no_hash.job.id))


def _end(stream: Stream) -> str | None:
    """The code of the error that the client gets, from the request's log or from this side."""
    try:
        stream.read(timeout=60)
    except SluiceError as error:
        return error.code
    assert stream.error is not None
    return str(stream.error["code"])
