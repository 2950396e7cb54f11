"""Frames, logs and job hashes that somebody has spoilt: one request fails, no process does.

Whoever can write to the store can do this; so can a bug of a newer version.
"""

from __future__ import annotations

import contextlib
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.lifecycle import Lifecycle
from api.relay import sse
from api.relay.completion_builder import CompletionBuilder
from api.relay.exchange import Exchange
from api.relay.grace import Graces
from api.relay.hub import Hub
from shared import frames, jobs, keys
from shared.errors import LogLost
from shared.frames import Delta, End, Error, Finish, Frame, Name, Prompt, Start, Take
from shared.jobs import Job
from shared.scripts import Taken
from tests.conftest import script, wait_for
from tests.contract.schemas import check_error
from tests.faults import books
from tests.faults.told import of_stream
from tests.stack import Stack, Stream
from tests.unit.fakes import FakeStore
from workers.control import Control
from workers.engines.scripted import ScriptedEngine
from workers.taker import lane_of

small = st.integers(-3, 600)
logprob = st.tuples(st.floats(allow_nan=False), st.lists(st.tuples(small, st.floats(allow_nan=False)), max_size=2))
pieces = st.dictionaries(small, st.text(max_size=4), max_size=2)
frame = st.one_of(
    st.builds(Take, worker=st.text(max_size=4), queued_ms=small),
    st.builds(
        Start, prompt_tokens=small, cached_tokens=small, echo=st.none() | st.lists(st.text(max_size=3), max_size=2)
    ),
    st.builds(
        Prompt,
        from_=small,
        t=st.lists(small, max_size=3),
        lp=st.lists(st.none() | logprob, max_size=3),
        o=st.lists(small, max_size=3),
        p=pieces,
        i=small,
    ),
    st.builds(
        Delta,
        i=st.integers(-1, 3),
        t=st.lists(st.sampled_from([512, 513, 514, 257, 65, -1, 70_000]), max_size=3),
        text=st.sampled_from(["", "a", "ab", "b"]),
        n=st.none() | small,
        lp=st.none() | st.lists(logprob, max_size=3),
        o=st.none() | st.lists(small, max_size=3),
        p=pieces,
        c=small,
    ),
    st.builds(
        Finish, i=st.integers(-1, 3), reason=st.sampled_from(["stop", "length", "?"]), stop_reason=st.none() | small
    ),
    st.just(End({"completion_tokens": 1})),
    st.just(Error({"message": "m"}, 500)),
)
garbage = st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode))


@st.composite
def spoilt(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were whole, with a few of them exchanged, cut out, or cut off."""
    raw = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(raw) - 1)))
        raw[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(raw[: draw(st.integers(0, len(raw)))]) if draw(st.booleans()) else bytes(raw)


entries = st.lists(frame, max_size=4).map(frames.encode_entry)
messages = st.lists(st.tuples(st.text(max_size=5), st.tuples(small, small), entries), max_size=3).map(
    lambda told: frames.message([(job_id, Name(a, s), entry) for job_id, (a, s), entry in told])
)


@given(garbage | spoilt(entries))
def test_an_entry_is_decoded_or_refused(raw: bytes) -> None:
    try:
        told = frames.decode_entry(raw)
    except (ValueError, RecursionError):  # what every reader of logs expects
        return
    assert all(isinstance(frame, Frame) for frame in told)


@given(garbage | spoilt(messages))
def test_a_message_is_decoded_or_refused(raw: bytes) -> None:
    try:
        message = frames.decode_message(raw)
    except (ValueError, RecursionError):
        return
    for told in message.values():
        try:
            name, entry = frames.decode_told(told)
        except (ValueError, RecursionError):
            continue
        assert isinstance(name, Name) and all(isinstance(frame, Frame) for frame in entry)


def test_nesting_without_an_end_is_refused() -> None:
    for raw in (b"[" * 100_000, b'[{"k":"end","usage":' + b'{"a":' * 100_000):
        for decode in (frames.decode_entry, frames.decode_message, jobs.from_rq):
            with pytest.raises((ValueError, RecursionError, jobs.InvalidRequest)):
                decode(raw)


json_values = st.recursive(
    st.none() | st.booleans() | small | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
).map(msgspec.json.encode)
#: Entries that stand in a message beside whole ones: JSON, and no frames, or other frames than were said.
odd_entries = entries | json_values | st.sampled_from([b'["\xff"]', b'[{"k":"delta","i":0,"t":[1],"text":"\xff"}]'])


@given(st.lists(st.tuples(garbage | spoilt(messages), odd_entries, small, small), min_size=1, max_size=8))
def test_a_spoilt_message_stops_no_other_stream(told: list[tuple[bytes, bytes, int, int]]) -> None:
    """Of what comes on the channel, between whole messages and in the same ones: the other request gets each of its
    frames once and in order, without looking into its log, and the one that is spoilt comes to an end that can be read."""
    hub = Hub("unix:///nowhere", "p", store_wait=1.0)
    spoilt_one = a_stream(hub, "spoilt")
    other = hub.open("other")
    said: list[Frame] = [Take("w")]
    hub._dispatch(frames.message([("other", Name(5, 1), frames.encode_entry(said))]))
    for number, (raw, odd, a, s) in enumerate(told, 2):
        frame = Delta(0, [number], f"{number} ")
        said.append(frame)
        hub._dispatch(raw)
        whole = ("other", Name(5, number), frames.encode_entry([frame]))
        hub._dispatch(frames.message([("spoilt", Name(abs(a), abs(s)), odd), whole]))
        hub._dispatch(raw[::-1])
    heard: list[Frame] = []
    while (got := other.get(0)) is not None:
        heard += got[1]
    assert heard == said and not any(subscription is other for subscription in hub._repairs)
    spoilt_one._subscription.fail(LogLost("The rest is lost."))
    *events, done = b"".join(sse.stream(spoilt_one, [], heartbeat=None)).split(b"data: ")[1:]
    assert done == b"[DONE]\n\n" and all(msgspec.json.decode(event.split(b"\n", 1)[0]) for event in events)
    assert sum(event.startswith(b'{"error":') for event in events) <= 1


def test_no_choice_is_counted_from_the_last_one() -> None:
    for odd in (b'[{"k":"delta","i":-1,"t":[1],"text":"x"}]', b'[{"k":"finish","i":-1,"reason":"stop"}]'):
        with pytest.raises(ValueError):
            frames.decode_entry(odd)


@given(garbage | json_values | spoilt(json_values) | json_values.map(lambda odd: b'["cancel",%b]' % odd))
@example(b'["cancel","\\ud800"]')
@example(b"[" * 100_000)
def test_a_worker_does_what_it_understands(raw: bytes) -> None:
    told: list[bytes] = []
    control = Control(
        "unix:///nowhere",
        lambda: "w",
        cancelled=lambda job_id: told.append(keys.job(job_id).encode()),
        command=lambda command: told.append(command["command"].encode()),
        resubscribed=lambda: None,
    )
    control._heard(raw)
    control._heard(b'["cancel","j"]')
    assert told[-1] == b"rq:job:j"


def a_stream(hub: Hub, job_id: str) -> Exchange:
    """A client that follows a request."""
    store: Any = FakeStore()
    job = msgspec.structs.replace(JOB, id=job_id)
    exchange = Exchange(
        job,
        CompletionBuilder(job, fingerprint="fp"),
        hub=hub,
        gateway=store,
        lifecycle=Lifecycle(),
        graces=Graces(lambda job_id: None),
        holds=lambda constraint, text: True,
    )
    exchange.submit()
    return exchange


ENGINE = ScriptedEngine()
JOB = Job(id="spoilt", model="scripted", prompts=[script("a", "b", "c")], seed=1, created=0, n=2, best_of=2, logprobs=1)
fields = st.dictionaries(
    st.sampled_from([b"home", b"fanout", b"result_ttl", b"a", b"dl", b"kills", b"data", b"v"]),
    st.binary(max_size=6),
    max_size=4,
)
values = st.none() | st.booleans() | small | st.floats() | st.text(max_size=3) | st.lists(small, max_size=2)
data = st.one_of(
    st.just(jobs.to_rq(JOB)),
    garbage,
    spoilt(st.just(jobs.to_rq(JOB))),
    st.dictionaries(st.sampled_from(Job.__struct_fields__), values, min_size=1, max_size=3).map(
        lambda changed: zlib.compress(
            msgspec.json.encode((jobs.FUNCTION, None, [msgspec.to_builtins(JOB) | changed], {}))
        )
    ),
)


@settings(max_examples=300)
@given(
    data,
    st.dictionaries(st.just(b"home"), st.binary(max_size=6), max_size=1) | fields,
    st.lists(entries | garbage | spoilt(entries), max_size=4),
    st.sampled_from([0, 0, 0, 1]),
    st.floats(-10, 1e9),
)
def test_any_job_makes_a_lane_that_can_at_least_say_what_is_wrong(
    data: bytes, fields: dict[bytes, bytes], log: list[bytes], hole: int, left: float
) -> None:
    """And one that runs, runs: nothing that it carries gets beyond the lane."""
    named, s = [], hole
    for entry in log:
        with contextlib.suppress(ValueError, RecursionError):
            s += len(frames.decode_entry(entry))
        named.append((Name(7, s), entry))
    taken = Taken("spoilt", Name(7, s + 1), left, named, {**fields, b"data": data})
    lane = lane_of(taken, ENGINE.card, ENGINE)
    if lane.terminal is not None:
        assert isinstance(lane.terminal, Error | End)
        return
    assert lane.requests()
    for request in lane.requests():
        assert request.prompt and request.max_new >= 0 and len(request.prompt) + request.max_new <= ENGINE.card.context


# With real processes

WORDS = [f"w{number} " for number in range(50)]
TEXT = "".join(WORDS)
#: When a request ends whose hash tells nobody that it should, s.
DEADLINE = 16.0

Spoil = Callable[[Any, str, int, int], None]


def add(raw: bytes, field: str = "f") -> Spoil:
    return lambda store, job_id, a, s: store.xadd(keys.log(job_id), {field: raw}, id=f"{a}-{s + 1}")


def put(**values: str | bytes) -> Spoil:
    return lambda store, job_id, a, s: store.hset(keys.job(job_id), mapping=values)


def instead(key: Callable[[str], str]) -> Spoil:
    def spoil(store: Any, job_id: str, a: int, s: int) -> None:
        ttl = store.ttl(key(job_id))
        store.delete(key(job_id))
        store.set(key(job_id), "something else", ex=max(1, ttl))

    return spoil


def without_the_middle(store: Any, job_id: str, a: int, s: int) -> None:
    names = [name for name, _ in store.xrange(keys.log(job_id))]
    store.xdel(keys.log(job_id), names[len(names) // 2])


def far_ahead(store: Any, job_id: str, a: int, s: int) -> None:
    store.xadd(keys.log(job_id), {"f": b"[]"}, id=f"{a + 1}-18446744073709551615")


#: What is done to a running request, before its worker dies.
SPOILT: dict[str, Spoil] = {
    "an entry that is no JSON": add(b"\xff{"),
    "an entry of other frames": add(b'[{"k":"delta","i":7,"t":[1]}]'),
    "an entry of other types": add(b'[{"k":"delta","i":"0","t":1}]'),
    "an entry with another text": add(b'[{"k":"delta","i":0,"t":[512],"text":"never"}]'),
    "an entry without frames": add(b"[]"),
    "an entry without its field": add(b"[]", "g"),
    "a second end": add(b'[{"k":"end","usage":{}}]'),
    "a hole": without_the_middle,
    "names far ahead": far_ahead,
    "no log": lambda store, job_id, a, s: store.delete(keys.log(job_id)),
    "a log of another type": instead(keys.log),
    "no job": lambda store, job_id, a, s: store.delete(keys.job(job_id)),
    "a job of another type": instead(keys.job),
    "data that is none": put(data=b"\xff\x00"),
    "another request's data": put(data=jobs.to_rq(JOB)),
    "numbers that are none": put(a="x", dl="nan", kills="-1", tries="1e300", log_ttl="?", result_ttl="0"),
    "a status that is none": put(status="?"),
    "nobody's": put(owner="nobody"),
    "another model": put(model="another", origin="x"),
}


#: A text that may have been sent cannot be continued from these; of the others, "" is a whole text.
LOST = ("an entry that is no JSON", "an entry with another text", "a hole", "names far ahead", "no log")
POSSIBLE = ("", "log_lost", "job_lost", "worker_lost", "internal_error", "invalid_value", "deadline_exceeded")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--workers", "2:2")
    with Stack(tmp_path_factory.mktemp("spoilt"), options=options, request_timeout_s=DEADLINE, cold_start_s=4) as stack:
        yield stack


@pytest.mark.timeout(200)
def test_what_is_spoilt_fails_alone(pair: Stack) -> None:
    """Each kind on a request of its own, all in one worker, which is killed; then the rest is looked at."""
    with pair.store() as store, ThreadPoolExecutor(40) as threads:
        pids = wait_for(lambda: len(found := pair.workers()) == 2 and len(pair.status()["workers"]) == 2 and found, 60)
        os.kill(pids[1], signal.SIGSTOP)
        apis, stores = pair.api_processes(), pair.stores()
        streams = {name: pair.open(script(*WORDS, delay_ms=150)) for name in SPOILT}
        neighbours = [pair.open(script(*WORDS, delay_ms=100)) for _ in range(4)]
        for stream in (*streams.values(), *neighbours):
            wait_for(lambda stream=stream: len(books.ids(books.logged(store, stream.id))) >= 3)
        os.kill(pids[0], signal.SIGSTOP)
        for name, spoil in SPOILT.items():
            top = store.xrevrange(keys.log(streams[name].id), count=1)[0][0].decode()
            spoil(store, streams[name].id, *map(int, top.split("-")))
        os.kill(pids[1], signal.SIGCONT)
        os.kill(pids[0], signal.SIGKILL)
        reads = {name: threads.submit(stream.read, timeout=50) for name, stream in streams.items()}
        for neighbour in neighbours:
            with neighbour:
                assert of_stream(neighbour.read()).choices[0].text == TEXT
        ended: dict[str, str] = {}
        for name, read in reads.items():
            with read.result(90) as stream:
                ended[name] = end_of(stream)
        assert {name: code for name, code in ended.items() if code not in POSSIBLE} == {}
        assert {ended[name] for name in LOST} == {"log_lost"}
        assert pids[1] in pair.workers(), "the other worker lives"
        assert (pair.api_processes(), pair.stores()) == (apis, stores)
        wait_for(lambda: not any(worker["busy"] for worker in pair.status()["workers"]), 30)
    assert pair.complete(script("o", "k")).text == "ok"


def end_of(stream: Stream) -> str:
    """The code of its error, or "" where it is whole. It is never anything else."""
    assert stream.ended and stream.done == 1, stream
    assert TEXT.startswith(stream.text) or stream.text.endswith("never"), stream
    if stream.error is None:
        assert stream.text == TEXT
        return ""
    check_error({"error": stream.error})
    return str(stream.error["code"])
