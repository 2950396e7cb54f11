"""Input files of batches: what is found in them, and the order in which their lines run."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.batches.endpoints import ENDPOINTS
from api.batches.flights import FETCHED, Flights, Waiting
from api.batches.input_file import Checked, Line, LineFault, Plan, check, read_line
from api.batches.order import LEVELS, Prefixes
from api.batches.records import Batch
from api.known_jobs import Ended

URL = "/v1/completions"


def line(custom_id: str, prompt: str = "p", **body: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": prompt, **body}}
    return json.dumps(whole).encode()


def checked(raw: bytes, **limits: int) -> Checked:
    return check(
        io.BytesIO(raw),
        URL,
        beginning=lambda body: body["prompt"],
        **{"max_lines": 100, "max_length": 10_000, **limits},
    )


def read(raw: bytes, plan: Plan) -> list[Line]:
    """The lines in the order in which they run, by where the plan says they are."""
    return [read_line(raw[offset : offset + length], URL) for _, offset, length in plan]


def test_every_line_is_found_where_it_is() -> None:
    raw = b"\xef\xbb\xbf" + line("a") + b"\r\n\n \t\r\n" + line("b\u2028") + b"\n" + line("c")
    found = checked(raw)
    assert not found.errors and found.model is None
    assert [one.custom_id for one in read(raw, found.plan)] == ["a", "b\u2028", "c"]
    again = Plan.decode(found.plan.encode())
    assert list(again) == list(found.plan) and len(again) == 3


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.booleans()), min_size=1, max_size=8, unique_by=lambda x: x[0]
    )
)
def test_any_text_comes_back(items: list[tuple[str, bool]]) -> None:
    raw = b""
    for custom_id, escaped in items:
        whole = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id}}
        raw += json.dumps(whole, ensure_ascii=escaped).encode() + b"\n"
    found = checked(raw)
    assert not found.errors
    assert sorted(one.custom_id for one in read(raw, found.plan)) == sorted(custom_id for custom_id, _ in items)


def test_the_first_hundred_faults_are_told() -> None:
    found = checked(b"x\n" * 500)
    assert len(found.errors) == 100
    assert [error.line for error in found.errors] == list(range(1, 101))


def test_limits_of_lines() -> None:
    assert not checked(b"\n".join(line(f"{n}") for n in range(100))).errors
    [error] = checked(b"\n".join(line(f"{n}") for n in range(101))).errors
    assert (error.code, error.line) == ("too_many_lines", 101)
    [error] = checked(line("a") + b"\n" + line("b", "x" * 20_000) + b"\n" + line("c")).errors
    assert (error.code, error.line) == ("line_too_large", 2)


def test_one_model_a_file() -> None:
    found = checked(line("a", model="m") + b"\n" + line("b", model="m") + b"\n")
    assert (found.model, found.errors) == ("m", [])
    [error] = checked(line("a", model="m") + b"\n" + line("b") + b"\n").errors
    assert (error.code, error.line, error.param) == ("model_mismatch", 2, "body.model")


def test_who_waits_for_a_check_can_end_it() -> None:
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    raw = io.BytesIO(b"\n".join(line(f"{n}") for n in range(1000)))
    with pytest.raises(Enough):
        check(raw, URL, beginning=lambda body: "", max_lines=1000, max_length=1000, going_on=enough)


@pytest.mark.parametrize("raw", [b"[]", b"1", b"null", b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff", b"{", b'"\\ud800"'])
def test_what_is_no_strict_json_object_is_no_line(raw: bytes) -> None:
    with pytest.raises(LineFault) as caught:
        read_line(raw, URL)
    assert caught.value.code == "invalid_json_line" and "body" not in caught.value.message


# -- order


def ordered(texts: list[str]) -> list[str]:
    prefixes = Prefixes()
    for text in texts:
        prefixes.add(text)
    return [texts[index] for index in prefixes.order()]


def test_what_ended_is_fetched_once_at_a_time() -> None:
    """Also if it is looked after again at once, as its text could not be checked: the runner has more to do."""

    class Known:
        def ended(self, job_ids: Sequence[str], most: int) -> list[Ended]:
            return [Ended(job_id, there=False) for job_id in job_ids][:most]

    parts: Any = SimpleNamespace(gateway=SimpleNamespace(known=Known()))
    flights = Flights(Batch({b"secret": b"s"}), ENDPOINTS[URL], parts, lambda: 0.0)
    count = 2 * FETCHED + 10
    for number in range(count):
        flights.adopt(Waiting(number, 0, 0), str(number))
    fetched = []
    for flight, _ in islice(flights.fetch(), 10 * count):
        fetched.append(flight.custom_id)
        flights.adopt(flight.waiting, flight.custom_id)
    assert fetched == [str(number) for number in range(count)] and len(flights) == count


def test_lines_that_begin_alike_run_one_after_the_other() -> None:
    shots = ["one " * 300, "two " * 300]  # two few-shot prompts, which share nothing
    books = ["A" * 2000, "B" * 2000]  # below each, two texts
    texts = [shot + book + f"question {n}" for n in range(5) for book in books for shot in shots]
    random.Random(1).shuffle(texts)
    found = ordered(texts)
    for begin in (*shots, *(shot + book for shot in shots for book in books)):
        places = [index for index, text in enumerate(found) if text.startswith(begin)]
        assert places == list(range(places[0], places[0] + len(places)))
    assert found[0] == texts[0], "whose beginning comes first runs first"


def test_lines_that_share_nothing_stay_as_they_came() -> None:
    texts = [f"{number} and so on" for number in range(50)]
    assert ordered(texts) == texts


@given(st.lists(st.text(alphabet="ab", max_size=LEVELS[0] + 2), max_size=30))
def test_every_line_runs_once(texts: list[str]) -> None:
    assert sorted(ordered(texts)) == sorted(texts)
