"""How many workers a model should have, as a function of what is seen."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.scaling import FAILING_S, SETTLE_S, TRIES, Change, Loads, Range, Scale, Seen
from shared.scripts import Busy

START = Change(start=True)
IDLE_S = 60.0


def busy(*used: int, lanes: int = 4, name: str = "own") -> list[Busy]:
    return [Busy(f"{name}-{number}", lanes, count) for number, count in enumerate(used)]


class Pool:
    """A scale and its clock."""

    def __init__(self, low: int, high: int, idle_s: float = IDLE_S) -> None:
        self.scale, self.now = Scale(Range(low, high), idle_s), 100.0

    def after(self, seconds: float, *, known: bool = True, **seen: Any) -> Change | None:
        self.now += seconds
        return self.scale.decide(Seen(self.now, **seen), known=known)


def test_nothing_waits_and_nothing_runs() -> None:
    assert Pool(0, 4).after(0) is None


def test_the_first_request_starts_one_and_others_wait_for_it() -> None:
    pool = Pool(0, 4)
    assert pool.after(0, waiting=1) == START
    assert pool.after(0.25, waiting=50, starting=1) is None
    assert pool.after(500, waiting=50, starting=1) is None


def test_a_model_that_is_not_known_is_loaded_once() -> None:
    pool = Pool(0, 4)
    assert pool.after(0, known=False) == START
    assert pool.after(0, known=False, starting=1) is None


def test_the_fewest_always_run() -> None:
    pool = Pool(2, 4)
    assert pool.after(0, own=busy(0)) == START
    assert pool.after(IDLE_S * 9, own=busy(0, 0)) is None
    assert pool.after(IDLE_S * 9, own=busy(0, 0)) is None


def test_one_at_a_time_up_to_the_most_while_requests_wait() -> None:
    pool = Pool(0, 2)
    assert pool.after(0, waiting=1, own=busy(4)) is None, "it may be about to be taken"
    assert pool.after(SETTLE_S, waiting=1, own=busy(4)) == START
    assert pool.after(0.25, waiting=9, own=busy(4), starting=1) is None
    assert pool.after(SETTLE_S * 9, waiting=9, own=busy(4, 4)) is None
    assert pool.after(SETTLE_S * 9, waiting=9, own=busy(4, 4)) is None


def test_a_load_that_takes_longer_than_the_wait_is_not_begun() -> None:
    pool = Pool(1, 4)
    pool.scale.load_s = 20.0
    assert pool.after(0, waiting=3, wait_s=5.0, own=busy(4)) is None
    assert pool.after(SETTLE_S, waiting=3, wait_s=5.0, own=busy(4)) is None
    assert pool.after(0.25, waiting=3, wait_s=30.0, own=busy(4)) == START
    pool.after(0, waiting=3, wait_s=5.0, own=busy(4, 4))
    assert pool.after(20.5, waiting=3, wait_s=5.0, own=busy(4, 4)) == START, (
        "the wait has been that long, whatever the rate says"
    )


def test_workers_of_other_machines_count_for_who_serves_and_not_as_ours() -> None:
    pool = Pool(0, 1)
    assert pool.after(0, waiting=1, others=busy(4, name="there")) is None
    assert pool.after(SETTLE_S, waiting=1, others=busy(4, name="there")) == START
    assert pool.after(IDLE_S, own=busy(0), others=busy(4, name="there")) is None
    assert pool.after(IDLE_S, own=busy(0), others=busy(4, name="there")) == Change(end="own-0")


def test_the_last_one_goes_after_the_idle_time_and_only_then() -> None:
    pool = Pool(0, 1)
    assert pool.after(0, own=busy(0)) is None
    assert pool.after(IDLE_S - 1, own=busy(0)) is None
    assert pool.after(0.5, own=busy(1)) is None, "this starts the time anew"
    assert pool.after(0, own=busy(0)) is None
    assert pool.after(IDLE_S - 1, own=busy(0)) is None
    assert pool.after(1, own=busy(0)) == Change(end="own-0")


def test_one_after_the_other_and_none_that_has_work() -> None:
    pool = Pool(0, 3)
    assert pool.after(0, own=busy(1, 1, 1)) is None
    assert pool.after(IDLE_S, own=busy(1, 1, 1)) is None, "two would do, and none is idle"
    assert pool.after(1, own=busy(1, 0, 1)) == Change(end="own-1")
    assert pool.after(1, own=busy(1, 0)) is None
    assert pool.after(IDLE_S, own=busy(1, 0)) == Change(end="own-1")
    assert pool.after(IDLE_S * 9, own=busy(1)) is None
    assert pool.after(IDLE_S * 9, own=busy(1)) is None


@pytest.mark.parametrize("seen", [{"waiting": 1}, {"starting": 1}])
def test_nobody_goes_while_requests_wait_or_another_is_coming(seen: dict[str, int]) -> None:
    pool = Pool(0, 2)
    for _ in range(3):
        change = pool.after(IDLE_S, own=busy(0), **seen)
        assert change in (None, START)


def test_a_model_that_fails_to_load_counts_as_such_for_a_while() -> None:
    loads = Loads()
    for _ in range(TRIES - 1):
        loads.failed(0.0)
    assert not loads.failing(0.0)
    loads.failed(1.0)
    assert loads.failing(1.0 + FAILING_S - 0.1) and not loads.failing(1.0 + FAILING_S)
    loads.failed(60.0)
    assert loads.failing(60.0), "the next try decides"
    loads.succeeded()
    assert not loads.failing(60.0)
