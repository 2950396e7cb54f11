"""The batch runner on a real store with real workers: what is taken over, what is counted, and what may be damaged."""

from __future__ import annotations

import base64
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from api.batches.records import COMPLETED, FAILED, Batch, BatchRecords, Fields, Held, Lost, Usage
from api.batches.runner import Runner
from api.file_records import FileRecords, Part, new_id
from api.file_store import FileStore
from shared import keys
from shared.errors import (
    EngineOverloaded,
    FileInUse,
    InternalError,
    InvalidRequest,
    NotFound,
    QueueFull,
    StoreUnavailable,
)
from shared.jobs import from_rq
from shared.settings import Settings
from shared.structured import Constraint
from tests.batches import codes, line, lines, texts
from tests.conftest import Node, Store, Worker, script, wait_for
from tests.integration.test_field_cases_templates import OFF
from tests.integration.test_tokens_and_tails import give_template
from tests.stack import endless, strict_json
from tests.unit.test_thinking import EMPTY, FAMILIES

Start = Callable[..., Worker]
DAY = 86_400


class Place:
    """A store, a folder for files, and runners in this process."""

    def __init__(self, store: Store, folder: Path, **settings: Any) -> None:
        self.store = store.client
        self.settings = Settings(redis_url=store.url, data_dir=folder, **settings)
        self.files = FileStore.of(self.settings)
        self.file_records = FileRecords(self.store, self.files)
        self.records = BatchRecords(self.store, self.settings.lease_s)
        self.runners: list[tuple[Runner, threading.Event, threading.Thread]] = []

    def upload(self, raw: bytes, tenant: str = "default") -> str:
        file_id = new_id()
        self.files.put(f"files/{file_id}", raw)
        self.file_records.add(file_id, tenant, size=len(raw), filename="x", path=f"files/{file_id}", ttl_s=DAY)
        return file_id

    def create(self, raw: bytes | str, *, window_s: int = DAY, tenant: str = "default", **more: Any) -> Batch:
        file_id = raw if isinstance(raw, str) else self.upload(raw, tenant)
        most = more.pop("most", 0)
        fields = Fields(tenant, "/v1/completions", file_id, f"{window_s}s", window_s, None, DAY, **more)
        return self.records.create(fields, most)

    def start(self) -> threading.Event:
        """A runner; set the event to stop it."""
        stopping = threading.Event()
        runner = Runner(self.store, self.settings, stopping)
        thread = threading.Thread(target=runner.run, daemon=True)
        thread.start()
        self.runners.append((runner, stopping, thread))
        return stopping

    def stop(self) -> None:
        for _, stopping, thread in self.runners:
            stopping.set()
            thread.join(20)
            assert not thread.is_alive()
        self.runners.clear()

    def die(self) -> None:
        """The runners end without a word to the store."""
        for runner, stopping, thread in self.runners:
            runner._records.beat = lambda held, leave=False: (time.time(), ["in_progress"] * len(held))  # type: ignore[method-assign]
            stopping.set()
            thread.join(20)
        self.runners.clear()

    def shown(self, batch: Batch) -> dict[str, Any]:
        return self.records.find(batch.id, "*").shown()

    def ended(self, batch: Batch, timeout: float = 60.0) -> dict[str, Any]:
        return wait_for(lambda: self.shown(batch) if self.records.find(batch.id, "*").over else None, timeout)

    def rows(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        raw = b"".join(self.file_records.content(self.file_records.find(file_id, "*")))
        return [strict_json(row) for row in raw.split(b"\n")[:-1]]

    def jobs(self) -> list[str]:
        return [name.decode().removeprefix("rq:job:") for name in self.store.keys("rq:job:cmpl-*")]


@pytest.fixture
def place(store: Store, tmp_path: Path) -> Iterator[Place]:
    place = Place(store, tmp_path)
    yield place
    place.stop()
    for name in store.client.keys("sluice:batch*"):
        store.client.delete(name)


def test_a_batch_is_run_and_nothing_is_left_of_its_requests(place: Place, start_worker: Start) -> None:
    start_worker(lanes=8)
    batch = place.create(lines(100) + line("bad", temperature=9))
    place.start()
    shown = place.ended(batch)
    assert shown["status"] == "completed"
    assert shown["request_counts"] == {"total": 101, "completed": 100, "failed": 1}
    assert texts(place.rows(shown["output_file_id"])) == {f"line-{n}": f"line-{n}" for n in range(100)}
    assert codes(place.rows(shown["error_file_id"])) == {"bad": "invalid_value"}
    assert shown["usage"]["output_tokens"] == 200 and shown["usage"]["input_tokens"] > 1000
    assert place.jobs() == []
    assert not place.store.zcard("rq:finished:scripted:batch:default")
    assert not place.store.keys("sluice:log:*") and not place.store.keys("rq:results:*")
    assert set(place.files.changed("batches")) == set()
    assert not place.store.exists(keys.BATCHES_OPEN)


def test_a_runner_that_comes_later_repeats_nothing(place: Place, start_worker: Start) -> None:
    """The first one is gone without a word; what it had sent runs on, and is found."""
    start_worker(lanes=8)
    raw = b"".join(line(f"line-{n}", script(f"line-{n}", *["x"] * 20, delay_ms=20)) for n in range(30))
    place.store.delete(keys.pace("scripted"))
    batch = place.create(raw)
    place.start()
    wait_for(lambda: place.shown(batch)["request_counts"]["completed"] >= 8, 30)
    place.die()
    known = {job_id: place.store.hget(f"rq:job:{job_id}", "created_at") for job_id in place.jobs()}
    assert known, "some ran, or had ended and were not written down"
    place.start()
    shown = place.ended(batch)
    assert shown["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    found = place.rows(shown["output_file_id"])
    assert texts(found) == {f"line-{n}": f"line-{n}" + "x" * 20 for n in range(30)}
    assert known.keys() <= {row["response"]["request_id"] for row in found}
    assert int(place.store.hget(keys.pace("scripted"), "seen")) == 30, "each was taken by a worker once"


def test_what_a_dead_runner_had_sent_is_ended_with_its_batch(place: Place, start_worker: Start, node: Node) -> None:
    """Whoever takes over a batch that is being cancelled finds what still runs, and what had completed unnoticed."""
    start_worker(lanes=4)
    batch = place.create(line("endless", endless(delay_ms=20)) + line("done", script("done", start_delay_ms=300)))
    place.start()
    wait_for(lambda: len(place.jobs()) == 2, 30)
    place.die()
    place.records.cancel(batch.id, "*")
    wait_for(lambda: node.busy() == 1, 30)
    place.start()
    shown = place.ended(batch)
    assert (shown["status"], shown["request_counts"]) == ("cancelled", {"total": 2, "completed": 1, "failed": 1})
    assert texts(place.rows(shown["output_file_id"])) == {"done": "done"}
    wait_for(lambda: node.busy() == 0, 10)
    assert place.jobs() == []


def test_a_runner_that_stops_gives_its_batch_back(place: Place, start_worker: Start) -> None:
    start_worker(lanes=2)
    batch = place.create(line("endless", endless(delay_ms=20)))
    stopping = place.start()
    wait_for(lambda: place.shown(batch)["status"] == "in_progress", 20)
    stopping.set()
    wait_for(lambda: not place.store.exists(keys.batch_lease(batch.id)), 5)
    place.start()
    wait_for(lambda: place.store.exists(keys.batch_lease(batch.id)), 5)
    place.records.cancel(batch.id, "default")
    assert place.ended(batch)["status"] == "cancelled"


def test_who_was_taken_for_dead_changes_nothing(place: Place) -> None:
    batch = place.create(lines(3))
    [old] = place.records.take(1)
    assert old == Held(batch.id, 1) and place.records.take(1) == []
    place.store.delete(keys.batch_lease(batch.id))
    [new] = place.records.take(1)
    assert new.fence == 2
    assert place.records.beat([old, new])[1] == ["lost", "validating"]
    place.records.begin(new, 3, "scripted")
    part = Part("out", "x", 5)
    for step in (
        lambda: place.records.begin(old, 3, "scripted"),
        lambda: place.records.commit(old, [part], {0: COMPLETED}, Usage()),
        lambda: place.records.finalize(old),
        lambda: place.records.end(old, "completed", ttl_s=DAY, output_ttl_s=DAY),
    ):
        with pytest.raises(Lost):
            step()
    place.records.beat([old], leave=True)
    assert place.store.exists(keys.batch_lease(batch.id)), "nor does its farewell"
    assert place.shown(batch)["request_counts"] == {"total": 3, "completed": 0, "failed": 0}


def test_a_line_counts_once(place: Place) -> None:
    batch = place.create(lines(3))
    [held] = place.records.take(1)
    place.records.begin(held, 3, "scripted")
    place.records.commit(held, [Part("out", "x", 5)], {0: COMPLETED, 1: COMPLETED}, Usage(1, 2, 3, 4))
    place.records.commit(held, [Part("out", "x", 5)], {0: COMPLETED, 1: COMPLETED}, Usage(1, 2, 3, 4))
    with pytest.raises(Lost):
        place.records.commit(held, [Part("err", "y", 5)], {1: FAILED, 2: FAILED}, Usage())
    shown = place.shown(batch)
    assert shown["request_counts"] == {"total": 3, "completed": 2, "failed": 0}
    assert shown["usage"]["input_tokens"] == 1 and shown["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert place.file_records.parts(batch.id) == [Part("out", "x", 5)]
    assert bytes(place.records.lines(held)) == b"cc0"


def test_a_batch_is_made_once_if_the_answer_is_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    call, lost = place.records._scripts.call, iter([True])

    def unheard(*arguments: Any) -> Any:
        answer = call(*arguments)
        if next(lost, False):
            raise redis.ConnectionError("cut off")
        return answer

    monkeypatch.setattr(place.records._scripts, "call", unheard)
    batch = place.create(lines(1), tenant="unheard")
    assert next(lost, None) is None, "it was lost"
    assert [one.id for one in place.records.listed("unheard", after=None, limit=9)[0]] == [batch.id]


def test_tenants_take_turns(place: Place) -> None:
    for number in range(6):
        place.create(lines(1), tenant="many" if number < 5 else "few")
    held = place.records.take(3)
    tenants = [place.records.find(batch.id, "*").tenant for batch in held]
    assert tenants == ["many", "few", "many"]
    assert len(place.records.take(9)) == 2, "not more than so many of one tenant"
    with pytest.raises(QueueFull):
        place.create(lines(1), tenant="many", most=5)


def test_the_input_of_an_unfinished_batch_stays(place: Place) -> None:
    file_id = place.upload(lines(1))
    batch = place.create(file_id)
    with pytest.raises(FileInUse):
        place.file_records.delete(file_id, "default")
    [held] = place.records.take(1)
    place.records.end(held, "failed", ttl_s=DAY, output_ttl_s=DAY)
    place.records.end(held, "failed", ttl_s=DAY, output_ttl_s=DAY)
    assert place.shown(batch)["status"] == "failed"
    again = place.create(file_id)
    with pytest.raises(FileInUse):
        place.file_records.delete(file_id, "default")
    [held] = place.records.take(1)
    place.records.end(held, "failed", ttl_s=DAY, output_ttl_s=DAY)
    place.file_records.delete(file_id, "default")
    with pytest.raises(NotFound):
        place.create(file_id)
    assert again.input == file_id and not place.files.changed("files")


def test_a_batch_whose_time_is_over(place: Place, start_worker: Start) -> None:
    """Windows may be short. What was completed stays so; the rest has a row each that says why."""
    start_worker(lanes=2)
    raw = line("short") + b"".join(line(f"endless-{n}", endless(delay_ms=20)) for n in range(5))
    batch = place.create(raw, window_s=5)
    place.start()
    shown = place.ended(batch)
    assert shown["status"] == "expired" and shown["expired_at"] >= shown["expires_at"] == shown["created_at"] + 5
    assert texts(place.rows(shown["output_file_id"])) == {"short": "short"}
    assert codes(place.rows(shown["error_file_id"])) == {f"endless-{n}": "batch_expired" for n in range(5)}
    assert shown["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    assert place.jobs() == []


def test_a_batch_waits_for_a_worker(place: Place, start_worker: Start) -> None:
    start_worker(lanes=4).stop()  # the model is known, and nobody serves it
    batch = place.create(lines(3))
    place.start()
    wait_for(lambda: place.shown(batch)["status"] == "in_progress", 20)
    start_worker(lanes=4)
    assert place.ended(batch)["request_counts"]["completed"] == 3


def test_what_did_not_complete_is_run_again(place: Place, start_worker: Start) -> None:
    start_worker(lanes=4)
    batch = place.create(lines(4) + line("fails", script("x", error_after=0)) + line("bad", temperature=9))
    place.start()
    first = place.ended(batch)
    assert first["request_counts"] == {"total": 6, "completed": 4, "failed": 2}
    again = place.create(batch.input, replay_of=batch.id)
    shown = place.ended(again)
    assert shown["replay_of"] == batch.id
    assert shown["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    assert codes(place.rows(shown["error_file_id"])) == {"fails": "internal_error", "bad": "invalid_value"}
    whole = place.create(lines(2))
    place.ended(whole)
    with pytest.raises(InvalidRequest):
        place.create(whole.input, replay_of=whole.id)


def test_lines_that_begin_alike_are_sent_together(place: Place, start_worker: Start) -> None:
    raw = b"".join(line(f"{kind}-{n}", json.dumps({"pieces": [kind * 600, f"{n}"]})) for n in range(6) for kind in "ab")
    start_worker(lanes=1)
    batch = place.create(raw)
    place.start()
    shown = place.ended(batch)
    kinds = [row["custom_id"][0] for row in place.rows(shown["output_file_id"])]
    assert "".join(kinds) == "a" * 6 + "b" * 6


def test_a_request_that_is_lost_is_sent_again(place: Place, start_worker: Start) -> None:
    """As after a store that came back without its last seconds."""
    start_worker(lanes=1)
    batch = place.create(line("first", script("a", delay_ms=2000)) + lines(3))
    place.start()
    waiting = wait_for(lambda: place.store.lrange("rq:queue:scripted:batch:default", 0, -1), 20)
    for job_id in waiting:
        place.store.delete(f"rq:job:{job_id.decode()}")
        place.store.lrem("rq:queue:scripted:batch:default", 0, job_id)
    assert place.ended(batch)["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


def test_a_text_that_cannot_be_checked_now_stops_no_other_line(place: Place, start_worker: Start) -> None:
    """It is checked once there is room for it; a check that fails is that line's own end."""
    start_worker(lanes=8)
    place.start()
    runner = place.runners[0][0]
    holds, busy = runner.constraints.holds, threading.Event()
    busy.set()

    def overloaded(constraint: Constraint, text: str) -> bool:
        if "later" in text and busy.is_set():
            raise EngineOverloaded("Too many texts are being checked.")
        if "never" in text:
            raise InternalError
        return holds(constraint, text)

    runner.constraints.holds = overloaded  # type: ignore[method-assign]
    batch = place.create(
        b"".join(
            line(name, script(json.dumps({name: 1})), response_format={"type": "json_object"})
            for name in ("later", "never", "a", "b")
        )
    )
    counts = wait_for(lambda: found if (found := place.shown(batch)["request_counts"])["completed"] else None, 30)
    assert counts == {"total": 4, "completed": 2, "failed": 1}, "the others are written down"
    busy.clear()
    shown = place.ended(batch)
    assert shown["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert texts(place.rows(shown["output_file_id"])) == {n: json.dumps({n: 1}) for n in ("later", "a", "b")}
    assert codes(place.rows(shown["error_file_id"])) == {"never": "internal_error"}
    assert place.jobs() == []


def test_a_runner_that_waits_for_checks_can_be_stopped(place: Place, start_worker: Start) -> None:
    """Also while it ends a batch that was cancelled."""
    start_worker(lanes=8)
    place.start()
    runner, stopping, _ = place.runners[0]
    asked = threading.Event()

    def overloaded(constraint: Constraint, text: str) -> bool:
        asked.set()
        raise EngineOverloaded("Too many texts are being checked.")

    runner.constraints.holds = overloaded  # type: ignore[method-assign]
    batch = place.create(line("later", script("{}"), response_format={"type": "json_object"}))
    assert asked.wait(30)
    thread = runner._threads[batch.id]
    place.records.cancel(batch.id, "*")
    wait_for(lambda: runner._runs[batch.id].status == "cancelling", 10)
    asked.clear()
    assert asked.wait(10)
    stopping.set()
    thread.join(10)
    assert not thread.is_alive()
    place.stop()
    place.start()  # another one, whose checks have room
    shown = place.ended(batch)
    assert shown["status"] == "cancelled" and shown["request_counts"]["completed"] == 1, "its text was there"
    assert place.jobs() == []


def test_nothing_is_left_of_lines_whose_counting_was_not_confirmed(place: Place, start_worker: Start) -> None:
    """The store counted them, and its answer was lost: they are done, and their requests are forgotten all the same."""
    start_worker(lanes=8)
    place.start()
    records = place.runners[0][0]._records
    commit, lost = records.commit, iter([True])

    def unheard(*arguments: Any) -> None:
        commit(*arguments)
        if next(lost, False):
            raise StoreUnavailable("The store does not answer.")

    records.commit = unheard  # type: ignore[method-assign]
    shown = place.ended(place.create(lines(20)))
    assert next(lost, None) is None, "it was lost"
    assert shown["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert place.jobs() == [] and not place.store.keys("rq:results:*")


def test_fb121_damaged_results(place: Place, start_worker: Start) -> None:
    """One that cannot be read is a failed request; the totals of the others are right, and every look is answered."""
    worker = start_worker(lanes=8)
    worker.process.send_signal(signal.SIGSTOP)
    batch = place.create(lines(6))
    place.start()
    ids = wait_for(lambda: ids if len(ids := place.jobs()) == 6 else None, 30)
    frame = {"k": "end", "usage": {}}
    for job_id, result in zip(
        sorted(ids)[:4],
        (b"\xff\xfe", base64.b64encode(b"{}"), base64.b64encode(json.dumps({"frames": [frame]}).encode()), b""),
        strict=True,
    ):
        place.store.hset(f"rq:job:{job_id}", mapping={"terminal": "test", "status": "finished", "end": "{"})
        place.store.xadd(f"rq:results:{job_id}", {"return_value": result})
    worker.process.send_signal(signal.SIGCONT)
    shown = place.ended(batch)
    assert shown["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
    assert set(codes(place.rows(shown["error_file_id"])).values()) == {"internal_error"}
    assert len(texts(place.rows(shown["output_file_id"]))) == 2
    place.store.hset(
        keys.batch(batch.id), mapping={"completed": "many", "errors": "{", "metadata": b"\xff", "failed_at": "-"}
    )
    shown = place.shown(batch)
    assert shown["request_counts"] == {"total": 6, "completed": 0, "failed": 4}
    assert shown["errors"] is shown["metadata"] is shown["failed_at"] is None


def test_files_go_when_their_time_is_over(place: Place) -> None:
    kept, old, used = (place.upload(b"x") for _ in range(3))
    place.create(used)
    for file_id in (old, used):
        place.store.zadd(keys.FILES_EXPIRE, {file_id: 1})
    assert place.file_records.delete_expired() == 1
    assert place.file_records.exists(kept) and place.file_records.exists(used) and not place.file_records.exists(old)
    assert set(place.files.changed("files")) == {f"files/{kept}", f"files/{used}"}


def test_what_nobody_knows_is_removed(place: Place) -> None:
    known = place.upload(b"x")
    batch = place.create(known)
    place.files.put("files/file-0123", b"an upload that broke off")
    place.files.put(f"files/{known}-7", b"of a runner that died")
    place.files.put(f"batches/{batch.id}/plan", b"of a batch that runs")
    place.files.put("batches/batch_0123/plan", b"of one that does not")
    runner = Runner(place.store, place.settings, threading.Event())
    assert runner.scour(3600) == 0, "they are young"
    assert runner.scour(-60) == 3
    left = {*place.files.changed("files"), *place.files.changed("batches")}
    assert left == {f"files/{known}", f"batches/{batch.id}/plan"}


def test_lists_go_on_behind_what_is_gone(place: Place) -> None:
    ids = [place.upload(b"x", "lister") for _ in range(5)]
    place.store.delete(keys.file(ids[2]))
    files, more = place.file_records.listed("lister", after=None, limit=2, ascending=True, purpose=None)
    assert [file.id for file in files] == ids[:2] and more
    files, more = place.file_records.listed("lister", after=ids[1], limit=9, ascending=True, purpose="batch")
    assert [file.id for file in files] == ids[3:] and not more
    files, _ = place.file_records.listed("lister", after=None, limit=9, ascending=False, purpose=None)
    assert [file.id for file in files] == [ids[4], ids[3], ids[1], ids[0]]
    with pytest.raises(InvalidRequest):
        place.file_records.listed("lister", after="file-x", limit=9, ascending=False, purpose=None)


@pytest.mark.parametrize("off", OFF)
def test_fb061_thinking_off_in_a_line(place: Place, store: Store, start_worker: Start, off: dict[str, Any]) -> None:
    """The prompt of a line ends as the same request's over HTTP: with the closed empty think block."""
    start_worker(lanes=2)
    give_template(store, FAMILIES["qwen3"][0])
    place.start()
    batch = place.create(line("endless", endless(delay_ms=20), **off))
    [job_id] = wait_for(place.jobs, 30)
    assert from_rq(place.store.hget(f"rq:job:{job_id}", "data")).tail == EMPTY
    place.records.cancel(batch.id, "*")
    place.ended(batch)
    wrong = place.ended(place.create(line("wrong", "x", reasoning_effort="banana")))
    assert codes(place.rows(wrong["error_file_id"])) == {"wrong": "invalid_value"}


def test_batch_work_leaves_a_lane_free(place: Place, start_worker: Start, node: Node) -> None:
    """An interactive request begins at once, and does not need a lane to be given up."""
    start_worker(lanes=16)
    batch = place.create(b"".join(line(f"line-{n}", endless(delay_ms=20)) for n in range(40)))
    place.start()
    wait_for(lambda: node.busy() == 15, 30)
    stream = node.submit(script("a", "b", delay_ms=20)).read()
    assert stream.text == "ab"
    handed_over = [job_id for job_id in place.jobs() if int(place.store.hget(f"rq:job:{job_id}", "tries") or 0)]
    takes = sum(
        entry.count(b'"k":"take"')
        for job_id in place.jobs()
        for _, fields in place.store.xrange(keys.log(job_id))
        for entry in fields.values()
    )
    assert not handed_over and takes == 16, "15 of the batch's, once each, and the other one"
    place.records.cancel(batch.id, "*")
    place.ended(batch)
