"""Two API nodes, two workers and a store on machines of their own (network namespaces), cut off from each other and healed.

Packets vanish: no connection is closed, nobody is told. Clients come over another network than the store's, so that an API
node can lose either of them. What each client gets must be what it would have got undisturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared import frames, keys
from tests.conftest import script, wait_for
from tests.faults import books
from tests.faults.network import Cut
from tests.faults.site import APIS, BACK, FRONT, STORE_WAIT, WORKERS, Site, built
from tests.faults.told import Told, of_answer, of_stream
from tests.integration.test_http_completions import refused
from tests.stack import SCRIPTED, Stream, body, endless, event_name

#: What is due within seconds has this long, s.
SOON = 30.0
#: How soon a request is refused that cannot reach the store, s: two attempts and a margin.
REFUSED_S = 25.0
#: How soon clients that vanished are given up, s: a minute, some seconds to look, and a margin.
VANISHED_S = 120.0
#: How soon a process ends that is told to, s: its drain, and what it would still tell the store.
STOPPED_S = 60.0

STEP = {"delay_ms": 200}
WORDS = [f"w{number} " for number in range(9)]
SCORES = {"logprobs": [-0.25, -3.5, -0.125, -2.0, -1.5, -0.75]}
CHOICES = [
    {"pieces": ["one ", "two ", "three ", "four ", "five ", "six "], "logprobs": [-1.0] * 7},
    {"pieces": ["a", "b"], "logprobs": [-0.5] * 3},
    {"hex": ["f0", "9f", "8d", "b0", "c3", "a9"], "logprobs": [-2.0] * 7},
]
FORKED = json.dumps({"choices": CHOICES, **STEP})
#: Prompt and fields of each; streamed and not, each over both API nodes.
STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (script(*WORDS, **STEP), {}),
    "echo and logprobs": (script(*WORDS, **SCORES, **STEP), {"echo": True, "logprobs": 2}),
    "n and logprobs": (FORKED, {"n": 3, "logprobs": 1}),
    "a stop string half matched": (script("a", "b", " EN", "DX", "c", " EN", "D!", "d", **STEP), {"stop": ["END!"]}),
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "best of": (FORKED, {"best_of": 3, "n": 2}),
    "running text": (script(*WORDS, **STEP), {"temperature": 1.2, "seed": 7}),
}


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with built(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """Whole at the beginning of a test, and at its end."""
    site = shared_site
    wait_for(site.whole, 60)
    yield site
    for node in (*APIS, *WORKERS):
        site.network.heal(node, *((FRONT, BACK) if node in APIS else (BACK,)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(site.pid(node), signal.SIGCONT)


class Wave:
    """All cases at once over both API nodes."""

    def __init__(self, site: Site, resources: ExitStack) -> None:
        threads = resources.enter_context(ThreadPoolExecutor(16))
        self.site = site
        self.streams: dict[tuple[str, str], Stream] = {}
        for name, api in site.apis.items():
            for case, (prompt, fields) in STREAMED.items():
                self.streams[name, case] = resources.enter_context(api.open(prompt, **fields))
        self._reading = {
            key: threads.submit(lambda stream=stream: of_stream(stream.read(timeout=60)))
            for key, stream in self.streams.items()
        }
        for name, api in site.apis.items():
            for case, (prompt, fields) in PLAIN.items():
                self._reading[name, case] = threads.submit(
                    lambda api=api, prompt=prompt, fields=fields: of_answer(api.complete(prompt, **fields))
                )
        self.owners = wait_for(self._taken, SOON)

    def _taken(self) -> dict[str, str] | None:
        """Id -> worker, once all are taken and have a token."""
        running = books.running(self.site.store)
        if len(running) < len(self._reading):
            return None
        return running if all(books.ids(books.logged(self.site.store, job_id)) for job_id in running) else None

    def told(self) -> dict[tuple[str, str], Told]:
        return {key: reading.result(60) for key, reading in self._reading.items()}


@pytest.fixture(scope="module")
def undisturbed(shared_site: Site) -> dict[tuple[str, str], Told]:
    with ExitStack() as resources:
        return Wave(shared_site, resources).told()


def logs(site: Site, ids: Any) -> dict[str, list[Any]]:
    return {job_id: site.store.xrange(keys.log(job_id)) for job_id in ids}


def ends(site: Site, job_id: str) -> int:
    return sum(isinstance(frame, frames.TERMINAL) for frame in books.logged(site.store, job_id))


def refused_entries(store: Any) -> int:
    """How many entries the store has not taken. What was under way at a cut arrives when it is healed, also from
    connections that were closed meanwhile: the kernel keeps sending."""
    return int(store.info("commandstats")["cmdstat_xadd"]["failed_calls"])


# Workers


@pytest.mark.parametrize(
    "how",
    ["silent", pytest.param("down", marks=pytest.mark.slow), pytest.param("deaf", marks=pytest.mark.slow)],
)
def test_a_worker_is_cut_off_in_the_middle_of_streams(
    how: Cut, site: Site, undisturbed: dict[tuple[str, str], Told]
) -> None:
    with ExitStack() as resources:
        wave = Wave(site, resources)
        cut_off, other = WORKERS
        if site.worker(cut_off) not in wave.owners.values():
            cut_off, other = other, cut_off
        old = site.worker(cut_off)
        site.network.cut(cut_off, BACK, how=how)
        assert wave.told() == undisturbed
    store, ids = site.store, list(wave.owners)
    hit = [job_id for job_id, worker in wave.owners.items() if worker == old]
    assert {store.hget(keys.job(job_id), "owner").decode() for job_id in hit} == {site.worker(other)}
    assert all(len(books.attempts(books.logged(store, job_id))) == 2 for job_id in hit)
    assert all(len(books.attempts(books.logged(store, job_id))) == 1 for job_id in set(ids) - set(hit))
    assert all(ends(site, job_id) == 1 for job_id in ids)
    ended = logs(site, ids)

    refused = refused_entries(store)
    site.network.heal(cut_off, BACK)
    new = wait_for(lambda: site.worker(cut_off), SOON)
    assert new != old and not store.sismember(keys.WORKERS, old) and not store.exists(keys.lanes(old))
    os.kill(site.pid(other), signal.SIGSTOP)  # so that it is the returned one that serves
    stream = site.apis["api1"].open(script("n", "e", "w"))
    with stream:
        assert stream.read().text == "new"
    assert store.hget(keys.job(stream.id), "owner") == new.encode()
    os.kill(site.pid(other), signal.SIGCONT)
    if how != "deaf":  # then the store had got it when it was sent
        wait_for(lambda: refused_entries(store) > refused, SOON)
    wait_for(site.at_rest, SOON)
    assert logs(site, ids) == ended, "nobody who was overtaken wrote on"


# API nodes


LONG = [f"w{number} " for number in range(60)]


@pytest.mark.slow
def test_an_api_node_is_cut_off_from_everybody(site: Site) -> None:
    """Its clients may come back elsewhere; what nobody came back for ends, but for what runs in the background. When it
    is back, whoever still holds a connection to it gets the rest, or the end."""
    here, there, store = site.apis["api1"], site.apis["api2"], site.store
    with ExitStack() as resources:
        threads = resources.enter_context(ThreadPoolExecutor(4))
        followed = resources.enter_context(here.open(script(*LONG, delay_ms=150)))
        left = resources.enter_context(here.open(endless(delay_ms=50)))
        background = resources.enter_context(here.open(script(*LONG, delay_ms=100), background=True))
        elsewhere = resources.enter_context(there.open(script(*LONG, delay_ms=80)))
        for stream in (followed, left, background, elsewhere):
            stream.goes_on(3)
        before = set(books.running(store))
        plain = threads.submit(here.complete, endless(delay_ms=50))
        [plain_id] = wait_for(lambda: set(books.running(store)) - before, SOON)

        site.network.cut("api1", FRONT, BACK)
        with there.resume(followed.id, followed.ids[-1]) as resumed:
            resumed.read()
        assert resumed.done == 1 and resumed.error is None
        assert followed.text + resumed.text == "".join(LONG) and resumed.finish == "stop"
        assert resumed.usage is not None and resumed.usage["completion_tokens"] == len(LONG) + 1
        names = [event_name(event_id or "none") for event_id in followed.ids + resumed.ids]
        assert names == sorted(set(names))
        assert of_stream(elsewhere.read()).choices[0].text == "".join(LONG)

        for job_id in (left.id, plain_id):
            wait_for(lambda job_id=job_id: store.hget(keys.job(job_id), "terminal"), SOON)
            assert there.job(job_id).json["status"] == "cancelled"
        wait_for(lambda: there.job(background.id).json["status"] == "completed", SOON)
        ended = logs(site, [followed.id, left.id, background.id, plain_id])
        assert all(ends(site, job_id) == 1 for job_id in ended)

        site.network.heal("api1", FRONT, BACK)
        for stream in (followed, background):
            assert of_stream(stream.read()).choices[0].text == "".join(LONG)
        left.read()
        assert left.error is not None and left.error["code"] == "cancelled" and left.done == 1
        refused(plain.result(60), 409, code="cancelled")
    wait_for(here.ready, SOON)
    assert here.complete(script("o", "k")).text == "ok"
    wait_for(site.at_rest, SOON)
    assert logs(site, ended) == ended


@pytest.mark.slow
@pytest.mark.parametrize(("how", "tokens"), [("silent", 20), ("deaf", 30), ("down", 130)])
def test_an_api_node_without_the_store_for_a_while(site: Site, how: Cut, tokens: int) -> None:
    """Shorter and longer than connections wait for an answer; its clients notice a pause."""
    api, store = site.apis["api1"], site.store
    count = tokens + 100
    prompt = json.dumps({"pieces": ["tick ", "tock "], "repeat": count // 2, "delay_ms": 80, **SCORES})
    with api.open(prompt, logprobs=1) as stream, ThreadPoolExecutor(1) as threads:
        stream.goes_on(3)
        before = set(books.running(store))
        plain = threads.submit(api.complete, prompt, logprobs=1)
        wait_for(lambda: set(books.running(store)) - before, SOON)
        site.network.cut("api1", BACK, how=how)
        seen = len(books.ids(books.logged(store, stream.id)))
        wait_for(lambda: len(books.ids(books.logged(store, stream.id))) > seen + tokens, 60)
        site.network.heal("api1", BACK)
        told = of_stream(stream.read())
        assert told.choices[0].text == "tick tock " * (count // 2)
        assert of_answer(plain.result(60)) == told
    assert len(books.attempts(books.logged(store, stream.id))) == 1
    assert max(later - earlier for earlier, later in pairwise(stream.times)) > tokens * 0.05, "it was cut off"
    wait_for(site.at_rest, SOON)


@pytest.mark.slow
def test_an_api_node_without_the_store_for_longer_than_a_response_waits(site: Site) -> None:
    """Nobody is left hanging: what runs gets an error, what comes is refused, each in its own time."""
    cut_off, other = site.apis["api2"], site.apis["api1"]
    with cut_off.open(script(*LONG, delay_ms=100), background=True) as stream, ThreadPoolExecutor(32) as threads:
        stream.goes_on(3)
        site.network.cut("api2", BACK)
        asked = [threads.submit(cut_off.complete, script("n", "o")) for _ in range(30)]
        for asking in asked:
            answer = asking.result(60)
            refused(answer, 503, code="store_unavailable")
            assert answer.seconds < REFUSED_S
        assert cut_off.call("GET", "/health", timeout=5).status == 200
        assert cut_off.call("GET", "/ready", timeout=REFUSED_S).status == 503
        stream.read()
        assert stream.error is not None and stream.error["code"] == "store_unavailable" and stream.done == 1
        assert "".join(LONG).startswith(stream.text)
        assert stream.seconds < STORE_WAIT["api2"] + 30
    wait_for(lambda: other.job(stream.id).json["status"] == "completed", SOON)
    site.network.heal("api2", BACK)
    wait_for(cut_off.ready, SOON)
    seen = [event_id for event_id in stream.ids if event_id]  # the error has none
    with cut_off.resume(stream.id, seen[-1]) as resumed:
        assert stream.text + resumed.read().text == "".join(LONG)
    wait_for(site.at_rest, SOON)
    assert ends(site, stream.id) == 1


@pytest.mark.slow
def test_processes_that_are_told_to_stop_without_the_store(tmp_path: Path) -> None:
    """They come to their end, whatever they can no longer tell it."""
    with built(tmp_path) as site, ExitStack() as resources:
        for api in site.apis.values():
            resources.enter_context(api.open(endless(delay_ms=50))).goes_on(3)
        for node in (*APIS, *WORKERS):
            site.network.cut(node, BACK)
            site.processes[node].terminate()
        for node in (*APIS, *WORKERS):
            assert site.processes[node].wait(STOPPED_S) == 0


# Clients


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_clients_that_vanish(site: Site) -> None:
    """They are not there to hang up; what they asked for ends all the same, also where the server has sent what nobody
    acknowledges."""
    api, store = site.apis["api1"], site.store
    with api.open(endless(delay_ms=100)) as stream, contextlib.closing(api.connect(5)) as plain:
        stream.goes_on(3)
        asked = json.dumps(body(endless(delay_ms=100), SCRIPTED, {}))
        plain.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
        ids = wait_for(lambda: (running := books.running(store)) and len(running) == 2 and list(running), SOON)
        site.network.cut("api1", FRONT)
        wait_for(lambda: not books.running(store), VANISHED_S)
    assert {store.hget(keys.job(job_id), "status") for job_id in ids} == {b"canceled"}
    site.network.heal("api1", FRONT)
    wait_for(site.at_rest, SOON)
