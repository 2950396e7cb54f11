"""What may wait: the end of the queue, its place and rate, a store that fills up, and clients that wait no longer."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from shared import keys
from shared.errors import DeadlineExceeded, QueueFull, StoreUnavailable
from shared.frames import Error, ending_with
from shared.scripts import Scripts, Taken
from tests.conftest import Node, Store, Stream, Worker, script, wait_for
from tests.stack import SCRIPTED, Stack, endless

Start = Callable[..., Worker]
Open = Callable[..., Node]

RUNS = script("r", repeat=0, delay_ms=20)
QUICK = script("q")
LATE = ending_with(DeadlineExceeded("late"))


@pytest.fixture(autouse=True)
def clean(store: Store) -> Iterator[None]:
    """Rates of earlier tests say nothing here."""
    yield
    store.client.delete(keys.pace("scripted"), "sluice:full")


def busy_with(node: Node, count: int = 1) -> list[Stream]:
    """Requests that run until they are hung up."""
    return [node.submit(RUNS).read(lambda stream: stream.tokens) for _ in range(count)]


def test_the_queue_has_an_end(store: Store, start_worker: Start, open_node: Open) -> None:
    start_worker(lanes=1)
    node = open_node(max_waiting=2, max_waiting_batch=4)
    [running] = busy_with(node)
    waiting = [node.submit(QUICK, tenant=tenant) for tenant in "ab"]
    before = set(store.client.keys("*"))
    with pytest.raises(QueueFull) as refused:
        node.submit(QUICK, tenant="c")
    assert refused.value.message == "The queue is full (waiting: 2)."
    assert set(store.client.keys("*")) <= before, "what is refused leaves nothing"
    waiting += [node.submit(QUICK, placement={"klass": "batch"}) for _ in range(2)]
    with pytest.raises(QueueFull):
        node.submit(QUICK, placement={"klass": "batch"})
    running.hang_up()
    for stream in waiting:
        assert stream.read().finish == "stop"
    assert node.submit(QUICK).read().finish == "stop", "there is room again"


def test_a_request_is_refused_that_would_wait_too_long(start_worker: Start, open_node: Open) -> None:
    """Ten requests of 0.3 s have shown what the one lane does: seven that wait are 2.1 s, and not less by how fast
    they came."""
    start_worker(lanes=1)
    node = open_node(max_wait_s=2.0)
    took = script("t", "t", delay_ms=150)
    for _ in range(10):
        node.submit(took).read()
    [running] = busy_with(node)
    accepted, refused = [], None
    while refused is None and len(accepted) < 30:
        try:
            accepted.append(node.submit(took))
        except QueueFull as error:
            refused = error
    assert refused is not None and refused.retry_after_s is not None
    assert 4 <= len(accepted) <= 8
    assert 1.8 <= refused.retry_after_s <= 4.5
    for stream in (running, *accepted):
        stream.hang_up()


def test_an_idle_model_accepts_a_crowd(start_worker: Start, open_node: Open) -> None:
    """The rate is what the lanes could do, not how seldom somebody came."""
    start_worker(lanes=8)
    node = open_node(max_wait_s=5.0)
    node.submit(script("t", delay_ms=100)).read()
    streams = [node.submit(script("t", delay_ms=100)) for _ in range(40)]
    for stream in streams:
        assert stream.read().finish == "stop"


def test_a_tenant_has_so_many_and_no_more(start_worker: Start, open_node: Open) -> None:
    start_worker(lanes=1)
    node = open_node(max_tenant_requests=3)
    running = node.submit(RUNS, tenant="a").read(lambda stream: stream.tokens)
    waiting = [node.submit(QUICK, tenant="a") for _ in range(2)]
    with pytest.raises(QueueFull, match="waiting and running: 3"):
        node.submit(QUICK, tenant="a")
    waiting.append(node.submit(QUICK, tenant="b"))
    running.hang_up()
    for stream in waiting:
        stream.read()
    assert node.submit(QUICK, tenant="a").read().finish == "stop"


# -- place


def test_the_place_counts_all_tenants_and_the_time_is_the_rate_s(store: Store, start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    took = script("t", delay_ms=200)
    for tenant in "abc":
        node.submit(took, tenant=tenant).read()
    [running] = busy_with(node)
    streams = [node.submit(took, tenant=tenant) for tenant in "aaabc"]
    batch = node.submit(took, placement={"klass": "batch"})
    places = [node.gateway.position(stream.job.id) for stream in (*streams, batch)]
    numbers = [place.position for place in places if place is not None]
    assert len(set(numbers)) == 6, "each has a place of its own"
    assert sorted(numbers[i] for i in (0, 3, 4)) == [1, 2, 3], "each tenant's first comes before any second"
    assert (numbers[1], numbers[2], numbers[5]) == (4, 5, 6)
    etas = [place.eta_s for place in places if place is not None]
    assert all(eta is not None and 0.2 * number <= eta <= 3 * number for number, eta in zip(numbers, etas, strict=True))
    running.hang_up()
    order = sorted((*streams, batch), key=lambda stream: stream.read().names[0].a)
    expected = [stream for _, stream in sorted(zip(numbers, (*streams, batch), strict=True), key=lambda pair: pair[0])]
    assert order == expected, "and that is how they were served"
    assert node.gateway.position(batch.job.id) is None


# -- a store that fills up


def test_an_almost_full_store_takes_no_new_work_and_ends_what_runs(
    store: Store, start_worker: Start, node: Node
) -> None:
    start_worker()
    running = node.submit(script("r", repeat=40, delay_ms=20)).read(lambda stream: stream.tokens)
    try:
        fill(store, 0.85)
        with pytest.raises(StoreUnavailable) as refused:
            node.submit(QUICK)
        assert refused.value.retry_after_s is not None
        assert running.read().text == "r" * 40
        assert 0 < store.client.ttl(keys.log(running.job.id)) <= 60, "its log makes room"
        fill(store, 0.7)
        stream = node.submit(QUICK).read()
        assert 0 < store.client.ttl(keys.log(stream.job.id)) <= 60
    finally:
        store.client.config_set("maxmemory", "0")
    store.client.delete("sluice:full")
    stream = node.submit(QUICK).read()
    assert store.client.ttl(keys.log(stream.job.id)) > 60


def fill(store: Store, share: float) -> None:
    """So much of its memory the store has used, as the scripts see it."""
    used = store.client.info("memory")["used_memory"]
    store.client.config_set("maxmemory", str(int(used / share)))
    store.client.delete("sluice:full")


# -- clients that wait no longer


def test_what_nobody_waits_for_any_more_never_reaches_the_engine(start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    [running] = busy_with(node)
    stream = node.submit(QUICK, placement={"deadline_s": 0.3})
    stream.read()
    assert [type(frame) for frame in stream.frames] == [Error], "it was not taken"
    assert stream.error is not None and stream.error["code"] == "deadline_exceeded"
    running.hang_up()


def test_a_deadline_ends_what_runs(start_worker: Start, node: Node) -> None:
    start_worker(lanes=1)
    stream = node.submit(RUNS, placement={"deadline_s": 0.6}).read()
    assert stream.tokens and stream.error is not None and stream.error["code"] == "deadline_exceeded"


def test_batch_work_has_a_day(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    stream = node.submit(QUICK, placement={"klass": "batch"}).read()
    job = store.client.hgetall(keys.job(stream.job.id))
    assert int(job[b"dl"]) - int(job[b"queued"]) == 86_400_000
    assert job[b"timeout"] == b"86400"


# -- tenants by tokens, with a worker that is none: the scripts alone decide


class Counter:
    """Takes as a worker does. Its requests last as long as their tokens, and a round is a token."""

    def __init__(self, store: Store, lanes: int) -> None:
        self.scripts, self.store, self.lanes = Scripts(store.client), store, lanes
        self.name = secrets.token_hex(4)
        self.running: dict[str, tuple[Taken, int]] = {}
        self.tokens: dict[str, int] = {}
        self.scripts.beat("worker", "counter", 60_000, register=True)
        store.client.hset(keys.stat("counter"), mapping={"model": "count", "lanes": lanes, "free": 0})

    def submit(self, tenant: str, size: int, number: int) -> None:
        args = (
            "default",
            "interactive",
            "count",
            60_000,
            60,
            60,
            1,
            "",
            f"{size}",
            "",
            "",
            "",
            "",
            0,
            "",
            "",
            1,
            "0 0 0",
        )
        assert self.scripts.call("submit", f"{tenant}-{self.name}-{number}", "", tenant, *args[1:])[0] == b"ok"

    def round(self) -> None:
        free = self.lanes - len(self.running)
        for taken in self.scripts.take("counter", free, self.lanes, "count", "f", LATE, 60_000, LATE).jobs:
            self.running[taken.id] = (taken, int(taken.data))
        for job_id, (taken, left) in list(self.running.items()):
            tenant = taken.text("tenant")
            self.tokens[tenant] = self.tokens.get(tenant, 0) + 1
            self.running[job_id] = (taken, left - 1)
            if left == 1:
                usage = f'{{"k":"end","usage":{{"prompt_tokens":0,"completion_tokens":{int(taken.data)}}}}}'
                self.scripts.call("end", job_id, taken.name.a, taken.name.s, "counter", usage, "finished")
                self.scripts.book("counter", job_id, taken.name.a)
                del self.running[job_id]

    def waiting(self, tenant: str) -> int:
        return int(self.store.client.llen(f"rq:queue:count:interactive:{tenant}"))


@pytest.fixture
def counter(store: Store) -> Iterator[Callable[[int], Counter]]:
    yield lambda lanes: Counter(store, lanes)
    store.client.srem(keys.WORKERS, "counter")
    for key in (*store.client.keys("*count:*"), keys.pace("count"), keys.stat("counter"), keys.lanes("counter")):
        store.client.delete(key)


@pytest.mark.parametrize("lanes", [1, 4])
def test_tenants_get_equal_tokens_whatever_their_requests_are(counter: Callable[[int], Counter], lanes: int) -> None:
    """One tenant's requests are twenty times as long. What they got differs by no more than what runs at a time."""
    worker = counter(lanes)
    for number in range(40):
        worker.submit("huge", 100, number)
    for number in range(800):
        worker.submit("small", 5, number)
    while worker.waiting("huge") and worker.waiting("small"):
        worker.round()
    huge, small = worker.tokens["huge"], worker.tokens["small"]
    assert huge + small > 3000
    assert abs(huge - small) <= 100 * (lanes + 1), worker.tokens


def test_a_tenant_that_asks_one_at_a_time_keeps_its_account(counter: Callable[[int], Counter]) -> None:
    """It is off the list of those that wait whenever its one request runs, and begins not anew."""
    worker = counter(1)
    for number in range(400):
        worker.submit("steady", 5, number)
    sent = 0
    for _ in range(6000):
        if not worker.waiting("steady"):
            break
        if not worker.waiting("loop") and not any(job_id.startswith("loop") for job_id in worker.running):
            worker.submit("loop", 100, sent)
            sent += 1
        worker.round()
    assert abs(worker.tokens["loop"] - worker.tokens["steady"]) <= 300, worker.tokens


def test_a_new_tenant_begins_level_with_the_least_served(counter: Callable[[int], Counter]) -> None:
    """Neither behind those who were served long before, nor with all of that to catch up."""
    worker = counter(1)
    for number in range(200):
        worker.submit("old", 10, number)
    for _ in range(1000):
        worker.round()
    for number in range(100):
        worker.submit("new", 10, number)
    seen = dict(worker.tokens)
    for _ in range(600):
        worker.round()
    got = {tenant: worker.tokens[tenant] - seen.get(tenant, 0) for tenant in ("old", "new")}
    assert abs(got["old"] - got["new"]) <= 30, got


def test_what_is_cancelled_is_charged_by_its_log(store: Store, counter: Callable[[int], Counter]) -> None:
    worker = counter(1)
    worker.submit("t", 50, 1)
    [taken] = worker.scripts.take("counter", 1, 1, "count", "f", LATE, 60_000, LATE).jobs
    entries: list[Any] = ['[{"k":"start","prompt_tokens":7,"cached_tokens":0}]', *['[{"k":"delta"}]'] * 5]
    for number, entry in enumerate(entries, 1):
        store.client.xadd(keys.log(taken.id), {"f": entry}, id=f"{taken.name.a}-{taken.name.s + number}")
    worker.scripts.end(taken.id, "api", LATE, "canceled")
    score = store.client.zscore(keys.served("count", "interactive"), "t")
    assert score == 7 + 5


def test_accounts_that_somebody_wrote_over_end_nobody_s_request(store: Store, start_worker: Start, node: Node) -> None:
    start_worker()
    store.client.set(keys.pace("scripted"), "no hash")
    stream = node.submit(QUICK)
    wait_for(lambda: store.client.hget(keys.job(stream.job.id), "terminal"))
    stream.read()


# -- over HTTP


def test_a_deadline_over_http(narrow: Stack) -> None:
    with narrow.open(endless(delay_ms=20)) as running:
        running.goes_on()
        for headers in ({"X-Request-Deadline-Ms": "300"}, {"X-Stainless-Read-Timeout": "0.3"}):
            began = time.monotonic()
            answer = narrow.call("POST", "/v1/completions", {"model": SCRIPTED, "prompt": "x"}, headers=headers)
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false"
            assert time.monotonic() - began < 8
    wait_for(narrow.idle)
    cut = narrow.call(
        "POST",
        "/v1/completions",
        {"model": SCRIPTED, "prompt": endless(delay_ms=20)},
        headers={"X-Request-Deadline-Ms": "500"},
    )
    assert cut.status == 504
    wait_for(narrow.idle)


@pytest.mark.parametrize("header", ["X-Request-Deadline-Ms", "X-Stainless-Read-Timeout"])
def test_a_deadline_that_is_none_is_a_400(narrow: Stack, header: str) -> None:
    for value in ("soon", "0", "-1"):
        answer = narrow.call("POST", "/v1/completions", {"model": SCRIPTED, "prompt": "x"}, headers={header: value})
        assert (answer.status, answer.error["param"]) == (400, header)
        assert "x-sluice-id" not in answer.headers


def test_the_official_client_s_timeout_comes_along(narrow: Stack) -> None:
    """What it sends is what is understood: a request that it would give up is not begun."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{narrow.port}/v1", api_key="none", max_retries=0)
    assert client.with_options(timeout=20).completions.create(model=SCRIPTED, prompt="x").choices[0].text == "x"
    with narrow.open(endless(delay_ms=20)) as running:
        running.goes_on()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(model=SCRIPTED, prompt="x")
        wait_for(lambda: narrow.queue()[0] == 0)


def test_the_queue_s_place_and_time_are_told_while_waiting(narrow: Stack) -> None:
    narrow.complete(script("t", delay_ms=300))
    with narrow.open(endless(delay_ms=20)) as running:
        running.goes_on()
        with narrow.open("x") as first, narrow.open("y") as second:
            for stream in (first, second):
                stream.read(lambda stream: stream.comments, 5)
            assert re.fullmatch(r": queued position=1 eta=\d+s", first.comments[0])
            assert re.fullmatch(r": queued position=2 eta=\d+s", second.comments[0])
            running.close()
            assert (first.read().text, second.read().text) == ("x", "y")
