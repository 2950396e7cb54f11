"""Graces: who does not come back in time is let go of, no earlier."""

from __future__ import annotations

import queue
import time

from api.relay.grace import Graces


def test_requests_are_let_go_of_in_the_order_of_their_times() -> None:
    over: queue.Queue[tuple[str, float]] = queue.Queue()
    graces = Graces(lambda job_id: over.put((job_id, time.monotonic())))
    began = time.monotonic()
    graces.keep("late", 0.3)
    graces.keep("early", 0.1)
    graces.keep("late", 0.0)  # never shortened
    assert graces.kept() == {"late", "early"}
    first, second = over.get(timeout=5), over.get(timeout=5)
    assert (first[0], second[0]) == ("early", "late")
    assert first[1] - began >= 0.1 and second[1] - began >= 0.3
    assert graces.kept() == set()


def test_one_that_fails_holds_up_no_other() -> None:
    over: queue.Queue[str] = queue.Queue()

    def let_go(job_id: str) -> None:
        over.put(job_id)
        if job_id == "bad":
            raise ValueError("no")

    graces = Graces(let_go)
    graces.keep("bad", 0.0)
    assert over.get(timeout=5) == "bad"
    graces.keep("good", 0.0)
    assert over.get(timeout=5) == "good"
