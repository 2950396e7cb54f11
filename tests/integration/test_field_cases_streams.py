"""Field cases of streaming, from outside, on the whole product.

FB-004, FB-005 and FB-007 are in test_field_cases.py, FB-100 is in test_websocket.py. Not applicable yet: the part of FB-095
with nginx in between (its configuration does not come with the product yet).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from api.server import STUCK
from tests.conftest import script, wait_for
from tests.contract.schemas import check_chunk, check_error
from tests.integration.test_http_completions import FRANCE, STORY, refused, whole
from tests.stack import REAL, ROOT, Stack, Stream, endless, hexes, strict_json

GREEDY: dict[str, Any] = {"temperature": 0, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack without comments in its streams, that gives a store up soon."""
    folder = tmp_path_factory.mktemp("quiet")
    with Stack(folder, sse_heartbeat="off", sse_heartbeat_s=0.5, store_wait_s=1, drain_s=1) as stack:
        yield stack


def lines_of(stream: Stream) -> list[bytes]:
    """The lines of a body, each of which must be one of the few that our streams have."""
    lines = stream.raw.split(b"\n")
    for line in lines:
        field, _, value = line.partition(b": ")
        assert b"\r" not in line
        if field == b"data":
            assert value == b"[DONE]" or isinstance(strict_json(value), dict)
        elif field == b"id":
            assert re.fullmatch(rb"\d+-\d+(\.\d+)?", value)
        else:
            assert line == b"" or line.startswith(b": "), line
    return lines


@pytest.mark.parametrize("asked", [None, True, False])
def test_fb029_usage_of_several_choices(stack: Stack, model: str, asked: bool | None) -> None:
    fields = {"model": model, "n": 2, "max_tokens": 3, **GREEDY}
    plain = stack.complete(["a", "b c"], **fields)
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    with stack.open(["a", "b c"], **fields, **options) as stream:
        stream.read()
    with_usage = [chunk for chunk in stream.data if chunk.get("usage") is not None]
    if asked is True:
        assert with_usage == [stream.data[-1]] and stream.data[-1]["choices"] == []
        assert all("usage" in chunk for chunk in stream.data), "null on all others"
    elif asked is None:
        assert with_usage == [stream.data[-1]] and stream.data[-1]["choices"][0]["finish_reason"]
    else:
        assert not any("usage" in chunk for chunk in stream.data)
    assert [chunk["usage"] for chunk in with_usage] == ([] if asked is False else [plain.usage])


def test_fb089_every_line_is_one_that_clients_know(narrow: Stack) -> None:
    """Keep-alives, the place in the queue, odd text, an error: comments begin with a colon, data is strict JSON."""
    wait_for(narrow.idle)
    odd = "\r\n\n data: x\x85\u2028\u2029\x0b\x0c\x1e\0 : ping"
    with (
        narrow.open(script("a", odd, "b", start_delay_ms=2500, error_after=3)) as first,
        narrow.open(script(odd), echo=True) as second,
    ):
        first.read()
        second.read()
    assert first.text == f"a{odd}b" and first.error is not None
    assert second.text == script(odd) + odd
    for stream in (first, second):
        assert stream.comments and any(line.startswith(b":") for line in lines_of(stream))
        assert not any(line.startswith((b": ping", b"data: :")) for line in lines_of(stream))
        assert stream.raw.endswith(b"data: [DONE]\n\n")


def test_fb090_no_comments_where_they_are_switched_off(quiet: Stack) -> None:
    """For clients that cannot even read legal comments. The default is documented."""
    stream = whole(quiet.stream(script("a", "b", start_delay_ms=1800)))
    assert stream.text == "ab" and not stream.comments
    assert not any(line.startswith(b":") for line in lines_of(stream))
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    [row] = [row for row in settings.splitlines() if "| `sse_heartbeat` |" in row]
    assert "`comment`" in row and "off" in row


def test_fb092_every_choice_ends_once(stack: Stack, model: str) -> None:
    for n, prompts, options in ((1, ["a"], None), (2, ["a b", "c"], {"include_usage": True})):
        fields = {"model": model, "n": n, "max_tokens": 3, "stream_options": options, **GREEDY}
        with stack.open(prompts, **fields) as stream:
            stream.read()
            assert stream.same_connection() == 200
        for index in range(n * len(prompts)):
            mine = [piece for piece in stream.pieces if piece["index"] == index]
            assert [piece["finish_reason"] is not None for piece in mine] == [False] * (len(mine) - 1) + [True]
            assert mine[-1]["text"] == ""
        last = stream.data[-1] if options is None else stream.data[-2]
        assert last["choices"][0]["finish_reason"], "only the usage comes behind the last one"
        assert stream.done == 1 and stream.raw.endswith(b"data: [DONE]\n\n")


def test_fb093_every_chunk_is_one_of_the_contract(stack: Stack, model: str) -> None:
    fields = {"model": model, "n": 2, "max_tokens": 4, "echo": True, "logprobs": 1, **GREEDY}
    for options in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        with stack.open([STORY, FRANCE], **fields, stream_options=options) as stream:
            stream.read()
        for chunk in stream.data:
            check_chunk(chunk)
        assert {chunk["object"] for chunk in stream.data} == {"text_completion"}
        assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in stream.data}) == 1
        assert stream.data[0]["id"].startswith("cmpl-") and stream.data[0]["model"] == model
        empty = [chunk for chunk in stream.data if not chunk["choices"]]
        assert empty == (stream.data[-1:] if options else [])


def test_fb094_stream_options(stack: Stack, model: str) -> None:
    fields = {"model": model, "max_tokens": 1, "temperature": 0}
    refused(stack.complete("x", stream_options={"include_usage": True}, **fields), 400, param="stream_options")
    for wrong in ({"include_usage": "x"}, {"include_usage": 1}, {"surprise": True}, [], "x", 5, True):
        refused(stack.stream("x", stream_options=wrong, **fields), 400, param="stream_options")
    for fine in ({}, None, {"include_usage": None}, {"include_obfuscation": False}):
        assert whole(stack.stream("x", stream_options=fine, **fields)).text
        if not fine or None in fine.values():
            assert stack.complete("x", stream_options=fine, **fields).status == 200


def test_fb095_nothing_on_the_way_has_a_reason_to_buffer(stack: Stack) -> None:
    prompt = script(*"abcdef", delay_ms=300)
    with stack.open(prompt, headers={"Accept-Encoding": "gzip, br"}) as stream:
        stream.goes_on()
        assert stream.times[0] < 1.3, "the first token came after 0.3 s"
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-cache" and stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["transfer-encoding"] == "chunked"
        assert not {"content-length", "content-encoding", "etag"} & stream.headers.keys()
        whole(stream.read())
    gaps = [after - before for before, after in zip(stream.times[:5], stream.times[1:6], strict=True)]
    assert min(gaps) > 0.05, "one by one"


def test_fb096_many_silent_streams_leave_room_for_others(stack: Stack) -> None:
    """More streams than lanes; no thread or process is taken by one."""
    wait_for(stack.idle)
    with ExitStack() as streams:
        opened = [streams.enter_context(stack.open(endless(delay_ms=200))) for _ in range(72)]
        wait_for(lambda: stack.busy() == 64)
        for path in ("/health", "/ready", "/v1/models"):
            answer = stack.call("GET", path)
            assert answer.status == 200 and answer.seconds < 1
        assert stack.complete("x", model=REAL, max_tokens=1).status == 200
        with stack.open(script("a")) as waiting:
            waiting.read(lambda stream: stream.comments, 15)
            assert waiting.comments[0].startswith(": queued position=")
        for stream in opened:
            stream.leave()
    wait_for(stack.idle)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fb096_a_stream_may_take_longer_than_any_time_out_of_the_server(stack: Stack) -> None:
    pieces = [f"{second} " for second in range(STUCK + 20)]
    stream = whole(stack.stream(script(*pieces, delay_ms=1000), timeout=STUCK + 60))
    assert stream.text == "".join(pieces) and stream.times[-1] > STUCK + 15


def resources(stack: Stack) -> dict[str, int]:
    """What streams could leave behind: connections to the store, descriptors and threads of the processes."""
    with stack.store() as store:
        used = {"store": len(store.client_list())}
    for pid in (*stack.api_processes(), *stack.workers()):
        used[f"{pid} descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        used[f"{pid} threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
    return used


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_fb097_abandoned_streams_leave_nothing_behind(stack: Stack, count: int) -> None:
    for _ in range(20):  # pools fill up
        with stack.open(endless(delay_ms=5)) as stream:
            stream.goes_on()
    wait_for(stack.idle)
    before = resources(stack)
    for number in range(count):
        with stack.open(endless(delay_ms=5)) as stream:
            stream.goes_on()
            stream.leave("reset" if number % 3 == 0 else "half-close" if number % 3 == 1 else "close")
    wait_for(stack.idle)
    wait_for(lambda: all(used <= before.get(what, 0) + 3 for what, used in resources(stack).items()), 15, every=0.5)
    assert whole(stack.stream(script("a"))).text == "a"


def test_fb099_characters_beyond_the_first_plane_are_never_halved(stack: Stack) -> None:
    emoji = "😀".encode()
    pieces = [f"{byte:02x}" for byte in emoji * 2]
    for prompt, delay in ((hexes(*pieces), 0), (hexes(*pieces, delay_ms=10), 10), (script("😀", "a😀"), 0)):
        stream = whole(stack.stream(prompt, logprobs=2, stop=["😀😀😀"]))
        assert stream.text.count("😀") == 2, delay
        assert b"\\ud8" not in stream.raw.lower() and emoji in stream.raw
        for line in lines_of(stream):
            line.decode("utf-8")
    echoed = whole(stack.stream("😀 x😀", echo=True, stop=["😀"]))
    assert (echoed.text, echoed.stop_reason) == ("😀 x😀", "😀") and b"\\ud" not in echoed.raw.lower()


def test_fb091_a_failure_of_the_relay_is_an_event_of_the_stream(quiet: Stack) -> None:
    """The store goes away below running streams, and stays away: all that comes after the headers are events, the error
    among them. Last in this file, since the store begins anew."""

    def killed_and_ended() -> bool:
        for pid in quiet.stores():
            os.kill(pid, signal.SIGKILL)
        return all(read.done() for read in reads)

    with (
        quiet.open(endless(delay_ms=40)) as first,
        quiet.open(endless(delay_ms=50), n=2) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        first.goes_on(3)
        second.goes_on(3)
        reads = [threads.submit(stream.read, timeout=40) for stream in (first, second)]
        wait_for(killed_and_ended, 30, every=0.2)
        for stream in (first, second):
            lines_of(stream)
            check_error({"error": stream.error})
            assert stream.raw.count(b'"error"') == 1 and stream.done == 1
            assert stream.raw.endswith(b"data: [DONE]\n\n")
            assert not any(piece["finish_reason"] for chunk in stream.data for piece in chunk.get("choices", ()))
            for word in (b"HTTP/1", b"<html", b"Traceback", b".py"):
                assert word not in stream.raw
            assert stream.same_connection() == 200
