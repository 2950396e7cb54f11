"""Webhooks of background requests and batches: from the request to a receiver that verifies them with the official
client."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from shared import keys
from tests import batches
from tests.conftest import script, wait_for
from tests.stack import SCRIPTED, Stack, endless, said

SECRET = "whsec_" + base64.b64encode(b"for the tests alone").decode()


class Receiver:
    """A client's server. `answers`: the statuses it gives, the last one from then on; `events`: those that it took."""

    def __init__(self) -> None:
        self.answers = [200]
        self.seen: list[Any] = []
        self.events: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                """Silent."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
                event = client.webhooks.unwrap(body, dict(self.headers))
                status = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                receiver.seen.append((self.path, self.headers["webhook-id"], event))
                self.send_response(status)
                self.end_headers()
                if status == 200:
                    receiver.events.append(event)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def has(self, about: str) -> str | None:
        """The type of the event about it."""
        return next((event.type for event in self.events if event.data.id == about), None)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("hooked"),
        (SCRIPTED,),
        webhook_targets=f'["{receiver.origin}", "http://*.invalid"]',
        webhook_secret=SECRET,
        webhook_private=True,
    ) as hooked:
        yield hooked


def arrived(receiver: Receiver, about: str) -> str:
    found: Callable[[], str | None] = lambda: receiver.has(about)  # noqa: E731
    return wait_for(found, 30)


def test_the_end_of_a_background_request(hooked: Stack, receiver: Receiver) -> None:
    url = f"{receiver.origin}/in?who=me"
    done = hooked.complete(script("a"), background=True, webhook_url=url).json["id"]
    failed = hooked.complete(script("a", error_after=0), background=True, webhook_url=url).json["id"]
    chat = hooked.complete(said(script("a")), background=True, webhook_url=url).json["id"]
    cancelled = hooked.complete(endless(delay_ms=20), background=True, webhook_url=url).json["id"]
    hooked.cancel(cancelled)
    assert arrived(receiver, done) == arrived(receiver, chat) == "response.completed"
    assert arrived(receiver, failed) == "response.failed"
    assert arrived(receiver, cancelled) == "response.cancelled"
    assert {path for path, _, _ in receiver.seen} == {"/in?who=me"}
    assert hooked.job(done).json["status"] == "completed", "it is readable by the id that the event names"
    with hooked.store() as store:
        wait_for(lambda: not store.exists(keys.HOOKS))
        assert not store.keys("sluice:hook:*")


def test_the_end_of_a_batch(hooked: Stack, receiver: Receiver) -> None:
    whole = batches.ran(hooked, batches.lines(2), webhook_url=receiver.origin)
    wrong = batches.ran(hooked, b"{bad\n", webhook_url=receiver.origin)
    late = batches.ran(hooked, batches.line("a", endless(delay_ms=20)), window="2s", webhook_url=receiver.origin)
    assert arrived(receiver, whole["id"]) == "batch.completed"
    assert arrived(receiver, wrong["id"]) == "batch.failed"
    assert arrived(receiver, late["id"]) == "batch.expired"


def test_it_is_sent_again_until_it_is_taken(hooked: Stack, receiver: Receiver) -> None:
    """With the same id each time, so that a receiver can tell."""
    receiver.answers[:] = [500, 302, 200]
    receiver.seen.clear()
    job_id = hooked.complete(script("a"), background=True, webhook_url=receiver.origin).json["id"]
    with hooked.store() as store:
        for tries in (1, 2):
            [event] = wait_for(lambda: store.zrange(keys.HOOKS, 0, -1), 30)
            wait_for(lambda tries=tries: len(receiver.seen) == tries, 30)
            due = wait_for(
                lambda event=event: (
                    s if (s := store.zscore(keys.HOOKS, event) - int(store.time()[0]) * 1000) < 50_000 else 0
                ),
                30,
            )
            assert due > 1000 * (4 if tries == 1 else 15) - 2000, "later each time"
            store.zadd(keys.HOOKS, {event: 1})  # its time has come
        assert arrived(receiver, job_id) == "response.completed"
        assert len({event_id for _, event_id, _ in receiver.seen}) == 1 and len(receiver.seen) == 3
        wait_for(lambda: not store.exists(keys.HOOKS))


def test_who_wants_no_more_of_it_gets_no_more(hooked: Stack, receiver: Receiver) -> None:
    receiver.answers[:] = [410, 200]
    receiver.seen.clear()
    hooked.complete(script("a"), background=True, webhook_url=receiver.origin)
    wait_for(lambda: receiver.seen, 30)
    with hooked.store() as store:
        wait_for(lambda: not store.exists(keys.HOOKS), 30)
    assert len(receiver.seen) == 1


def test_what_is_not_allowed(hooked: Stack, stack: Stack, receiver: Receiver) -> None:
    for fields in (
        {"webhook_url": receiver.origin},
        {"background": True, "webhook_url": "http://127.0.0.1:1/"},
        {"background": True, "webhook_url": "https://example.com/"},
        {"background": True, "webhook_url": receiver.origin.replace("http", "https")},
        {"background": True, "webhook_url": 5},
    ):
        answer = hooked.complete("x", **fields)
        assert (answer.status, answer.error["param"]) == (400, "webhook_url"), fields
    answer = stack.complete("x", background=True, webhook_url=receiver.origin)
    assert (answer.status, answer.error["param"]) == (400, "webhook_url"), "a server that sends none"
    answer = batches.create(hooked, batches.uploaded(hooked, batches.lines(1)), webhook_url="http://10.0.0.1/")
    assert (answer.status, answer.error["param"]) == (400, "webhook_url")


def test_a_receiver_that_is_not_there_disturbs_nobody(hooked: Stack, receiver: Receiver) -> None:
    receiver.answers[:] = [200]
    lost = hooked.complete(script("a"), background=True, webhook_url="http://nobody.invalid/").json["id"]
    job_id = hooked.complete(script("a"), background=True, webhook_url=receiver.origin).json["id"]
    assert arrived(receiver, job_id) == "response.completed" and receiver.has(lost) is None
