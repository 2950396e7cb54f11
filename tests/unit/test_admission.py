"""Refusals of the queue, the wait that clients are asked for, and the deadlines that they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.datastructures import Headers

from api import admission
from api.errors import error_response
from shared.errors import InvalidRequest, QueueFull, StoreUnavailable
from shared.jobs import Placement
from shared.settings import Settings


@given(wait=st.floats(0, 1e9), drawn=st.floats(0, 1))
def test_the_wait_is_the_backlog_s_within_bounds(wait: float, drawn: float) -> None:
    seconds = admission.retry_after_s(wait, drawn)
    assert 1 <= seconds <= 60
    if 1 <= wait <= 48:
        assert wait <= seconds <= 1.25 * wait


def test_waits_are_spread() -> None:
    waits = {round(admission.retry_after_s(100, drawn / 10), 3) for drawn in range(11)}
    assert len(waits) == 11 and max(waits) - min(waits) > 10


def test_a_full_queue_is_a_429_that_says_when_to_come_again() -> None:
    with pytest.raises(QueueFull) as refused:
        admission.judge([b"full", 40, b"8000"], lambda: 0.5)
    response = error_response(refused.value)
    assert response.status_code == 429
    assert response.json is not None
    assert (response.json["error"]["type"], response.json["error"]["code"]) == ("rate_limit_error", "queue_full")
    assert response.headers["retry-after-ms"] == "9000" and response.headers["Retry-After"] == "9"
    assert response.headers["x-should-retry"] == "true"


def test_a_crowd_of_one_s_own_is_a_429_too() -> None:
    with pytest.raises(QueueFull, match="running: 7"):
        admission.judge([b"crowd", 7])


def test_an_almost_full_store_is_a_503() -> None:
    with pytest.raises(StoreUnavailable) as refused:
        admission.judge([b"memory"])
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 10


def test_an_accepted_request_is_no_error() -> None:
    admission.judge([b"ok", b"1", b"2"])


def test_limits_are_those_of_the_class() -> None:
    settings = Settings(max_waiting=5, max_wait_s=1.5, max_waiting_batch=7, batch_timeout_s=9, max_tenant_requests=3)
    assert admission.limits(settings, Placement()) == "5 1500 3"
    assert admission.limits(settings, Placement(klass="batch")) == "7 9000 3"


def test_the_earlier_deadline_counts() -> None:
    settings = Settings(request_timeout_s=10, batch_timeout_s=100)
    assert admission.timeout_s(settings, Placement()) == 10
    assert admission.timeout_s(settings, Placement(klass="batch")) == 100
    assert admission.timeout_s(settings, Placement(deadline_s=4)) == 4
    assert admission.timeout_s(settings, Placement(deadline_s=40)) == 10
    assert admission.timeout_s(settings, Placement(background=True)) == settings.background_timeout_s


def deadline(stream: bool = False, **headers: str) -> float | None:
    return admission.read_deadline(Headers({k.replace("_", "-"): v for k, v in headers.items()}), waits=not stream)


def test_deadlines_out_of_headers() -> None:
    assert deadline() is None
    assert deadline(x_request_deadline_ms="1500") == 1.5
    assert deadline(x_stainless_read_timeout="600") == deadline(x_stainless_read_timeout="600.0") == 600
    assert deadline(x_stainless_read_timeout="2.5", x_request_deadline_ms="3000") == 2.5
    assert deadline(x_stainless_read_timeout="4", x_request_deadline_ms="3000") == 3
    assert deadline(stream=True, x_stainless_read_timeout="4") is None, "of a stream it is about the first byte only"
    assert deadline(stream=True, x_request_deadline_ms="3000") == 3


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "1e3", "soon", "９", "nan", "9" * 40])
def test_deadlines_that_are_none(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        deadline(x_request_deadline_ms=value)
    assert refused.value.param == "X-Request-Deadline-Ms"


@pytest.mark.parametrize("value", ["", "0", "-5", "soon", "nan", "inf"])
def test_read_timeouts_that_are_none(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        deadline(x_stainless_read_timeout=value)
    assert refused.value.param == "X-Stainless-Read-Timeout"
