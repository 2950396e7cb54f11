"""Requests that a fault hits in the middle: what their clients get is what they would have got without it.

All cases run at once, in step, streamed and not; first undisturbed, then with one blow to the whole. Texts, ids, logprobs,
reasons and usage must be the same, whatever the blow and whenever it comes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared import frames, keys
from shared.frames import Name, Prompt
from tests.conftest import Worker, script, wait_for
from tests.faults import books
from tests.faults.told import Told, of_answer, of_stream
from tests.stack import Answer, Stack, Stream, hexes, said

#: Between two tokens of each request, s: wide enough for a blow between them.
STEP = 0.4
DELAY = {"delay_ms": STEP * 1000}
#: Longest pause where the supervisor has seen the death, and where a lease must run out, s.
SEEN, LEASED = 2.0, 12.0

WORDS = [f"w{number} " for number in range(7)]
PLAIN = script(*WORDS, **DELAY)
CAKE = [f"{byte:02x}" for byte in "🍰é🍰".encode()]
SCORES = {"logprobs": [-0.25, -3.5, -0.125, -2.0, -1.5, -0.75]}
CHOICES = [
    {"pieces": ["one ", "two ", "three ", "four ", "five "], "logprobs": [-1.0] * 6},
    {"pieces": ["a", "b"], "logprobs": [-0.5] * 3},  # it is finished when the blow comes
    {"hex": CAKE[:8], "logprobs": [-2.0] * 9},
]
FORKED = json.dumps({"choices": CHOICES, **DELAY})


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


#: Tags cut over tokens; the blow comes inside the reasoning, or before its end.
THOUGHT = ["<thi", "nk>w", "hy </th", "at> so", "</thi", "nk>\n", "42"]

#: A call; the blow comes inside its tag, or inside its arguments.
CALL = ["So.<tool", '_call>{"name": "f", ', '"arguments": {"a"', ': "b', 'c"}}', "</tool_", "call>"]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
#: One that masks write, a character a token; the first 38 are those before its arguments.
MASKED = said(json.dumps({"prefer": ["x"], "delay_ms": 20}))
FORCED = {
    "parallel_tool_calls": False,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"const": "abc" * 25}}, "required": ["a"]},
            },
        }
    ],
}

#: Prompt and fields of each case. The blow comes, as a rule, after the second token.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "echo": (PLAIN, {"echo": True}),
    "logprobs": (script(*WORDS, **SCORES, **DELAY), {"logprobs": 3}),
    "echo and logprobs": (script(*WORDS, **SCORES, **DELAY), {"echo": True, "logprobs": 2}),
    "ids": (script(*WORDS, **SCORES, **DELAY), {"logprobs": 1, "return_tokens_as_token_ids": True}),
    "n": (FORKED, {"n": 3}),
    "n and logprobs": (FORKED, {"n": 3, "logprobs": 2, "echo": True}),
    "best of": (FORKED, {"best_of": 3, "n": 2}),
    "best of and logprobs": (FORKED, {"best_of": 3, "logprobs": 1}),
    "a stop string half matched": (script("a", " EN", "DX", " EN", "D!", "b", **DELAY), {"stop": ["END!"]}),
    "a stop string refuted": (script("a", " EN", "DX", "y", **DELAY), {"stop": ["END!"]}),
    "a stop string that cuts logprobs": (script("ab", "cS", "TOP", "d", **DELAY), {"stop": ["STOP"], "logprobs": 1}),
    "stop token": (script(*WORDS, **DELAY), {"stop_token_ids": [515]}),
    "a character cut": (hexes(*CAKE, **DELAY), {}),
    "a character cut, with logprobs": (hexes(*CAKE, **DELAY), {"logprobs": 2}),
    "seeded": (PLAIN, {"temperature": 1.2, "seed": 7, "top_p": 0.9}),
    "several prompts": ([PLAIN, script("x", "y", "z", **DELAY), PLAIN], {"echo": True}),
    "several prompts, forked": ([FORKED, script("x", "y", "z", **DELAY)], {"n": 2, "logprobs": 0}),
    "token prompt": (list(PLAIN.encode()), {"echo": True, "logprobs": 1}),
    "limit at the blow": (PLAIN, {"max_tokens": 3}),
    "limit behind the blow": (PLAIN, {"max_tokens": 5, "logprobs": 0}),
    "running usage": (PLAIN, {"stream_options": {"continuous_usage_stats": True}}),
    "fanout": (PLAIN, {"fanout": True}),
    "no end token": (script(*WORDS, finish="length", **DELAY), {}),
    "a schema half satisfied": (
        script(*['{"a"', ":", "[1", "]", "}"], **DELAY),
        {"response_format": of_schema({"type": "object"})},
    ),
    "a schema by masks": (json.dumps({"prefer": ["x"], **DELAY}), {"response_format": of_schema({"enum": ["abcde"]})}),
    "a choice by masks, scored": (json.dumps({"prefer": ["x"], **DELAY}), {"choice": ["vwxyz"], "logprobs": 1, "n": 2}),
    "chat": (said(PLAIN), {}),
    "chat that thinks": (said(script(*THOUGHT, **DELAY)), {}),
    "chat that thinks, with logprobs": (said(script(*THOUGHT, **DELAY)), {"logprobs": True, "top_logprobs": 2}),
    "chat with choices": (said(FORKED), {"n": 3, "stream_options": {"continuous_usage_stats": True}}),
    "chat that calls a tool": (said(script(*CALL, **DELAY)), TOOLS),
    "chat that thinks and calls, with logprobs": (
        said(script("<think>x</think>", *CALL, **DELAY)),
        {**TOOLS, "logprobs": True},
    ),
    "chat that has to call": (MASKED, {**FORCED, "tool_choice": "required"}),
    "chat that has to call this, with logprobs": (
        MASKED,
        {**FORCED, "tool_choice": {"type": "function", "function": {"name": "f"}}, "logprobs": True},
    ),
    "chat with a call cut off": (said(script(*CALL, **DELAY)), {**TOOLS, "max_tokens": 4}),
    "chat with a stop string": (
        said(script("<think>", "a EN", "D</th", "ink>x", " EN", "D!", **DELAY)),
        {"stop": "END!"},
    ),
}
#: Lanes that all of it takes, streamed and not, and some more.
LANES = 128


def is_streamed(fields: dict[str, Any]) -> bool:
    return fields.get("best_of", 1) <= fields.get("n", 1)


def is_plain(fields: dict[str, Any]) -> bool:
    return "stream_options" not in fields


STREAMED = [name for name, (_, fields) in CASES.items() if is_streamed(fields)]
NOT_STREAMED = [name for name, (_, fields) in CASES.items() if is_plain(fields)]
NAMES = [f"{name}, streamed" for name in STREAMED] + NOT_STREAMED


class Wave:
    """All cases at once, streamed and not, on one worker of two, `first`."""

    def __init__(self, stack: Stack, resources: ExitStack) -> None:
        self.stack = stack
        self.store: Any = resources.enter_context(stack.store())
        self.first, self.second = wait_for(lambda: two_workers(stack, self.store), 60)
        wait_for(stack.idle, 20)
        self._threads = resources.enter_context(ThreadPoolExecutor(2 * len(CASES)))
        self._listening = self.store.pubsub()
        resources.enter_context(self._listening)
        self._listening.psubscribe(keys.out_channel("*"))
        self._streams: dict[str, Future[Stream]] = {}
        self._answers: dict[str, Future[Answer]] = {}
        os.kill(self.second, signal.SIGSTOP)
        try:
            for name in STREAMED:
                self._streams[name] = self._threads.submit(self._stream, *CASES[name])
            for name in NOT_STREAMED:
                prompt, fields = CASES[name]
                self._answers[name] = self._threads.submit(stack.complete, prompt, **fields)
            self.ids = wait_for(self._all_taken, 20)
        finally:
            os.kill(self.second, signal.SIGCONT)

    def _stream(self, prompt: Any, fields: dict[str, Any]) -> Stream:
        with self.stack.open(prompt, **fields) as stream:
            return stream.read(timeout=60)

    def _all_taken(self) -> list[str] | None:
        taken = sorted(books.running(self.store))
        return taken if len(taken) == len(NAMES) else None

    def wait(self, tokens: int) -> None:
        """Until each request has so many tokens, or its end."""
        wait_for(
            lambda: all(
                isinstance(told[-1], frames.TERMINAL) or len(books.ids(told)) >= tokens
                for told in (books.logged(self.store, job_id) for job_id in self.ids)
            ),
            20,
        )

    def read(self) -> dict[str, Told]:
        """What all clients were told."""
        streams = {name: future.result(90) for name, future in self._streams.items()}
        answers = {name: future.result(90) for name, future in self._answers.items()}
        self.pause = max(later - earlier for earlier, later in pairwise(streams["plain"].times)) - STEP
        told = {f"{name}, streamed": of_stream(stream) for name, stream in streams.items()}
        return told | {name: of_answer(answer) for name, answer in answers.items()}

    def fanned_out(self) -> dict[str, list[tuple[Name, list[frames.Frame]]]]:
        """What came on the channels of single requests, by id."""
        found: dict[str, list[tuple[Name, list[frames.Frame]]]] = {}
        while (message := self._listening.get_message(timeout=0.2)) is not None:
            if message["type"] == "pmessage":
                for job_id, told in frames.decode_message(message["data"]).items():
                    found.setdefault(job_id, []).append(frames.decode_told(told))
        return found


def two_workers(stack: Stack, store: books.Store) -> list[int] | None:
    pids = stack.workers()
    return pids if len(pids) == 2 and all(books.worker_of(store, pid) for pid in pids) else None


def killed(wave: Wave) -> None:
    wave.wait(2)
    os.kill(wave.first, signal.SIGKILL)


def killed_later(wave: Wave) -> None:
    wave.wait(4)
    os.kill(wave.first, signal.SIGKILL)


def both_killed(wave: Wave) -> None:
    """One after the other: what the first one ran is hit twice."""
    wave.wait(1)
    os.kill(wave.first, signal.SIGKILL)
    wave.wait(4)
    os.kill(wave.second, signal.SIGKILL)


def told_to_stop(wave: Wave) -> None:
    """The drain is over before the requests are: the rest is handed over."""
    wave.wait(1)
    os.kill(wave.first, signal.SIGTERM)


def frozen(wave: Wave) -> None:
    """It wakes up when everybody has his answer, and finds that it was overtaken."""
    wave.wait(2)
    os.kill(wave.first, signal.SIGSTOP)


def cut_off(wave: Wave) -> None:
    """All connections to the store break, three times."""
    for tokens in (1, 2, 4):
        wave.wait(tokens)
        for kind in ("pubsub", "normal"):
            wave.store.client_kill_filter(_type=kind, skipme=True)


def store_killed(wave: Wave) -> None:
    wave.wait(2)
    [store] = wave.stack.stores()
    os.kill(store, signal.SIGKILL)


def store_lost_something(wave: Wave) -> None:
    """It comes back with the data of a token before: the workers put back what they have."""
    up, [store] = wave.stack.process.pid, wave.stack.stores()
    data = wave.stack.folder / "data" / "appendonlydir"
    wave.wait(2)
    shutil.copytree(data, older := wave.stack.folder / "older")
    wave.wait(3)
    os.kill(up, signal.SIGSTOP)  # it would start the store before the files are exchanged
    os.kill(store, signal.SIGKILL)
    wait_for(lambda: store not in wave.stack.stores())
    shutil.rmtree(data)
    shutil.move(older, data)
    os.kill(up, signal.SIGCONT)


@dataclass(frozen=True)
class Blow:
    """`attempts`: how often requests were begun that take longer than the blow. `pause`: the longest one, s."""

    strike: Callable[[Wave], None]
    attempts: int
    pause: float


BLOWS = [
    Blow(killed, 2, SEEN),
    Blow(told_to_stop, 2, SEEN),
    Blow(frozen, 2, LEASED),
    Blow(store_killed, 1, LEASED),
    Blow(killed_later, 2, SEEN),
    Blow(both_killed, 3, LEASED),
    Blow(cut_off, 1, SEEN),
    Blow(store_lost_something, 1, LEASED),
]
#: These run everywhere, the others with --slow.
SAMPLE = (killed, store_killed)


@dataclass
class Struck:
    blow: Blow
    wave: Wave
    told: dict[str, Told]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with two workers."""
    with Stack(tmp_path_factory.mktemp("pair"), options=("--workers", "2:2"), lanes=LANES, drain_s=1) as stack:
        # The first schema starts the processes that check them; all cases are to begin together.
        assert stack.complete("true", response_format=of_schema({"type": "boolean"})).status == 200
        yield stack


@pytest.fixture(scope="module")
def undisturbed(pair: Stack) -> dict[str, Told]:
    with ExitStack() as resources:
        return Wave(pair, resources).read()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(blow, id=blow.strike.__name__, marks=() if blow.strike in SAMPLE else pytest.mark.slow)
        for blow in BLOWS
    ],
)
def struck(request: pytest.FixtureRequest, pair: Stack, undisturbed: dict[str, Told]) -> Iterator[Struck]:
    with ExitStack() as resources:
        wave = Wave(pair, resources)
        request.param.strike(wave)
        told = wave.read()
        for pid in pair.workers():  # one may be frozen
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: two_workers(pair, wave.store), 30)
        yield Struck(request.param, wave, told)


@pytest.mark.parametrize("name", NAMES)
def test_the_client_gets_what_it_would_have_got(name: str, struck: Struck, undisturbed: dict[str, Told]) -> None:
    assert struck.told[name] == undisturbed[name]


def test_the_pause_is_short_and_the_books_are_in_order(struck: Struck, pair: Stack) -> None:
    store = struck.wave.store
    assert struck.wave.pause <= struck.blow.pause
    fields = [store.hmget(keys.job(job_id), "kills", "terminal") for job_id in struck.wave.ids]
    assert all(kills == b"0" and terminal for kills, terminal in fields), "all had tokens: none is suspected"
    attempts = [len(books.attempts(books.logged(store, job_id))) for job_id in struck.wave.ids]
    assert max(attempts) == struck.blow.attempts, "the blow has hit what it was to hit"
    wait_for(pair.idle, 20)
    wait_for(lambda: not books.left_behind(store), 20)


def test_the_log_has_each_frame_once_and_so_have_those_who_listen(struck: Struck) -> None:
    store = struck.wave.store
    cut = struck.blow.strike in (store_killed, store_lost_something, cut_off)  # channels are not repaired, logs are
    heard = {} if cut else struck.wave.fanned_out()
    for job_id in struck.wave.ids:
        entries = [
            (Name.parse(name.decode()), frames.decode_entry(fields[b"f"]))
            for name, fields in store.xrange(keys.log(job_id))
        ]
        told = [frame for _, entry in entries for frame in entry]
        assert [name.s for name, _ in entries][-1] == len(told), "no hole"
        assert sum(isinstance(frame, frames.TERMINAL) for frame in told) == 1 == isinstance(told[-1], frames.TERMINAL)
        if store.hget(keys.job(job_id), "fanout") == b"1" and not cut:
            assert list(dict(heard[job_id]).items()) == entries, "in order; one may come twice"


#: Prompts that take a while to score; the spaces behind a script are no part of it.
SCORED = {"echo": True, "logprobs": 2, "max_tokens": 3}
LONG = [script("a", "b", "c", "d") + " " * 12_000 for _ in range(4)]


def test_a_kill_while_prompts_are_scored(pair: Stack) -> None:
    undisturbed = of_stream(pair.stream(LONG, **SCORED))
    with pair.store() as store:
        for _ in range(5):  # the moment is short: the log tells whether it was hit
            wait_for(lambda: two_workers(pair, store), 60)
            with pair.open(LONG, **SCORED) as stream:
                wait_for(lambda: any(isinstance(f, Prompt) for f in books.logged(store, stream.id)), every=0.002)
                os.kill(books.owner(store, stream.id), signal.SIGKILL)
                assert of_stream(stream.read(timeout=60)) == undisturbed
            parts = books.attempts(books.logged(store, stream.id))
            scored = [sum(isinstance(frame, Prompt) for frame in part) for part in parts]
            if len(parts) == 2 and all(scored):
                break
        assert len(parts) == 2 and all(scored), "never killed between two pieces of prompts' logprobs"
        assert store.hget(keys.job(stream.id), "kills") == b"1", "no token had come"


QUICK = {"delay_ms": 30}
MOMENTS = {
    "forked": (json.dumps({"choices": CHOICES, **QUICK}), {"n": 3, "logprobs": 2, "echo": True}),
    "held": (script("a", " EN", "DX", " EN", "D!", "b", **QUICK), {"stop": ["END!"], "logprobs": 0}),
    "cut": (hexes(*CAKE, **QUICK), {"logprobs": 1}),
    "limit": (script(*WORDS, **QUICK), {"max_tokens": 5}),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", MOMENTS)
def test_a_kill_at_any_moment(name: str, tmp_path: Path) -> None:
    """Also between two entries of the log, and between the last one and the end."""
    prompt, fields = MOMENTS[name]
    moments = random.Random(name)
    with Stack(tmp_path, options=("--workers", "3:3")) as stack, stack.store() as store:
        undisturbed = of_stream(stack.stream(prompt, **fields))
        hit = 0
        for _ in range(12):
            wait_for(lambda: len(stack.workers()) >= 2 and len(stack.status()["workers"]) >= 2, 60)
            with stack.open(prompt, **fields) as stream:
                wait_for(lambda: store.hget(keys.job(stream.id), "owner"))
                worker = books.owner(store, stream.id)
                moment = threading.Timer(moments.uniform(0.0, 0.25), os.kill, (worker, signal.SIGKILL))
                moment.start()
                assert of_stream(stream.read(timeout=60)) == undisturbed
                moment.join()
            hit += len(books.attempts(books.logged(store, stream.id))) > 1
        assert hit > 3


@pytest.mark.slow
def test_one_that_nobody_waits_for_is_found_by_its_lease(pair: Stack) -> None:
    """A worker that the supervisor did not start: nobody sees its process end."""
    with pair.store() as store:
        for pid in wait_for(lambda: two_workers(pair, store), 60):
            os.kill(pid, signal.SIGSTOP)
        worker = Worker(pair.url, "stranger", lanes=8)
        try:
            with pair.open(PLAIN) as stream:
                wait_for(lambda: books.running(store).get(stream.id) == "stranger")
                stream.goes_on(2)
                for pid in pair.workers():
                    os.kill(pid, signal.SIGCONT)
                worker.kill()
                told = of_stream(stream.read())
        finally:
            worker.kill()
        assert told.choices[0].text == "".join(WORDS)
        assert max(later - earlier for earlier, later in pairwise(stream.times)) - STEP <= LEASED
