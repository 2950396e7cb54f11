"""FB-118: batches while their runner, workers and the API are killed: every line once, none twice, the counts right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batches import OVER, line, look, rows, started, texts
from tests.conftest import script, wait_for
from tests.faults.processes import alive
from tests.stack import Stack

#: Work of a line: pieces, and the time of each, ms.
PIECES, DELAY_MS = 10, 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("batches"), options=("--workers", "2:2"), lanes=8) as stack:
        yield stack


def runner(stack: Stack) -> int:
    return wait_for(lambda: stack.pids("scripts.batch_runner"), 60)[0]


def kill(stack: Stack, part: str) -> None:
    """One process of a kind, and sees it die."""
    pid = {"runner": lambda: runner(stack), "worker": lambda: wait_for(stack.workers, 60)[0]}[part]()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid), 10)


def batch_of(stack: Stack, count: int, window: str = "24h") -> str:
    return started(
        stack,
        b"".join(line(f"line-{n}", script(f"{n} ", *["x"] * (PIECES - 1), delay_ms=DELAY_MS)) for n in range(count)),
        window,
    )


def whole(stack: Stack, batch_id: str, count: int, timeout: float) -> None:
    """The batch has come to its end: each line once, with its own text.

    A line whose worker was killed twice before its first token is refused as poison: a few lines may meet that."""
    wait_for(lambda: look(stack, batch_id)["status"] in OVER, timeout, every=0.5)
    batch = look(stack, batch_id)
    assert batch["status"] == "completed", batch
    refused = {}
    if batch["error_file_id"]:
        refused = {row["custom_id"]: row["response"]["body"]["error"] for row in rows(stack, batch["error_file_id"])}
    assert len(refused) <= 2 and all(error["code"] == "poison_request" for error in refused.values()), refused
    done = count - len(refused)
    assert batch["request_counts"] == {"total": count, "completed": done, "failed": len(refused)}
    found = texts(rows(stack, batch["output_file_id"]))
    assert found == {f"line-{n}": f"{n} " + "x" * (PIECES - 1) for n in range(count) if f"line-{n}" not in refused}
    usage = batch["usage"]
    assert usage["output_tokens"] == done * (PIECES + 1), "none was counted twice"
    with stack.store() as store:
        left = [name for pattern in ("rq:job:*", "sluice:log:*", "rq:results:*") for name in store.keys(pattern)]
        assert not left, "every request is forgotten"
    assert not list((stack.folder / "data" / "files" / "batches").glob("*/*"))


def blows(stack: Stack, batch_id: str, count: int, seed: int) -> None:
    """Kills the runner three times and a worker three times, at random moments of the batch."""
    draw = random.Random(seed)
    for at in sorted(draw.uniform(0.05, 0.7) for _ in range(3)):
        wait_for(lambda at=at: look(stack, batch_id)["request_counts"]["completed"] >= at * count, 300, every=0.1)
        time.sleep(draw.uniform(0, 0.5))  # anywhere between two pieces of the results
        kill(stack, "runner")
        kill(stack, "worker")
        assert look(stack, batch_id)["status"] == "in_progress"


@pytest.mark.timeout(240)
def test_fb118_three_hundred_lines(pair: Stack) -> None:
    batch_id = batch_of(pair, 300)
    blows(pair, batch_id, 300, seed=118)
    whole(pair, batch_id, 300, 150)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_thousand_lines(pair: Stack) -> None:
    batch_id = batch_of(pair, 10_000)
    blows(pair, batch_id, 10_000, seed=time.time_ns())
    whole(pair, batch_id, 10_000, 1200)


@pytest.mark.timeout(240)
def test_fb118_everything_is_killed_and_starts_again(tmp_path: Path) -> None:
    """`up` dies with all it has, in the middle, and once more when the results are being put together."""
    folder = tmp_path / "stack"
    folder.mkdir()
    with Stack(folder, lanes=8) as first:
        batch_id = batch_of(first, 200)
        wait_for(lambda: look(first, batch_id)["request_counts"]["completed"] >= 40, 60, every=0.05)
        assert look(first, batch_id)["status"] == "in_progress"
        first.process.kill()
        first.process.wait(10)
        wait_for(lambda: not first.processes(), 20)
    with Stack(folder, lanes=8) as second:
        wait_for(lambda: look(second, batch_id)["status"] in ("finalizing", *OVER), 90, every=0.01)
        second.process.kill()
        second.process.wait(10)
        wait_for(lambda: not second.processes(), 20)
    with Stack(folder, lanes=8) as third:
        whole(third, batch_id, 200, 90)
