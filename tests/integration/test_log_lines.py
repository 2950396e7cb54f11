"""What a running system logs: JSON lines in which a request can be followed by its ids, and nothing that a client sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import script, wait_for
from tests.stack import Stack, said

CANARY = "canary-Zq7"
KEY = "sk-canary-key-Xw3"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("chatty"), log_level="DEBUG", log_format="json") as stack:
        yield stack


def lines(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    """Those that have these fields; fails for a line that is no object."""
    every = [json.loads(line) for line in stack.log().rpartition("\n")[0].splitlines()]
    return [line for line in every if fields.items() <= line.items()]


def test_a_request_is_followed_by_its_ids_through_api_and_worker(chatty: Stack) -> None:
    stream = chatty.stream(script("a", "b"), headers={"X-Request-Id": "mine-1"})
    assert stream.headers["x-request-id"] == "mine-1"
    [request] = wait_for(lambda: lines(chatty, event="request", request_id="mine-1"))
    assert (request["process"], request["job"], request["status"]) == ("api", stream.id, 200)
    assert (request["method"], request["route"]) == ("POST", "/v1/completions")
    [attempt] = wait_for(lambda: lines(chatty, event="attempt", job=stream.id))
    assert (attempt["process"], attempt["request_id"], attempt["outcome"]) == ("worker", "mine-1", "completed")
    assert attempt["tokens"] == stream.usage["completion_tokens"]  # type: ignore[index]


def test_ids_do_not_stay_with_the_connection(chatty: Stack) -> None:
    with chatty.open(script("a"), headers={"X-Request-Id": "mine-2"}) as stream:
        stream.read()
        assert stream.same_connection("/v1/models") == 200
    [models] = wait_for(lambda: lines(chatty, event="request", route="/v1/models", level="info"))[-1:]
    assert models["request_id"] != "mine-2" and "job" not in models


def test_nothing_that_a_client_sent_is_logged(chatty: Stack) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    bodies: list[Any] = [
        {"prompt": script(CANARY)},
        {"prompt": CANARY},  # the scripted engine cannot read it
        {"prompt": script(CANARY), "stop": 7, CANARY: 1},
        {"messages": said(script(CANARY))},
        {"prompt": script(CANARY), "response_format": {"type": "json_schema", "json_schema": {CANARY: 1}}},
        {"prompt": script(CANARY), "user": CANARY, "model": CANARY},
    ]
    for body in bodies:
        for path in ("/v1/completions", "/v1/chat/completions", f"/{CANARY}", f"/v1/completions/{CANARY}?q={CANARY}"):
            chatty.call("POST", path, body, headers=headers)
    for raw in (b'{"prompt": "%b' % CANARY.encode(), CANARY.encode()):
        chatty.call("POST", "/v1/completions", raw=raw, headers=headers)
    chatty.stream(script(CANARY), headers={**headers, "X-Request-Id": "the-last"})
    wait_for(lambda: lines(chatty, event="request", request_id="the-last"))
    assert CANARY not in chatty.log() and KEY not in chatty.log()


def test_text_on_demand(tmp_path: Path) -> None:
    with Stack(tmp_path, log_format="text") as stack:
        stack.complete(script("a"))
        line = wait_for(lambda: [line for line in stack.log().splitlines() if "route=/v1/completions" in line])[0]
        assert line.startswith("api ") and "status=200" in line and "\x1b" not in line
