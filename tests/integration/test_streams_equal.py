"""Promise 1 over HTTP: a stream's text is what the plain call returns, whatever the tokens are.

Random texts (emoji, halves of characters, bytes that are no text) are cut into random tokens; stop strings lie inside.
What has to come out is worked out by the rule of the contract and not by the product's code (tests/references.py).
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, NamedTuple

import pytest

from tests.integration.test_http_completions import whole
from tests.references import Expected, completion, pending
from tests.stack import Stack

CASES = 200
BATCHES = 8
PARTS = [
    "a",
    "b",
    "ab",
    "xabcy",
    " ",
    "\n",
    "END",
    "EN",
    "ä",
    "é",
    "e\u0301",
    "你好",
    "🌍",
    "👩‍👩‍👧",
    "🇩🇪",
    "\ufeff",
    "\0",
    "\u2028",
    '"\\',
    "\ufffd",
]
#: Halves of characters, an overlong form, half a surrogate, bytes that never occur.
BROKEN = [
    b"\xf0\x9f",
    b"\xe4\xbd",
    b"\xc3",
    b"\x8c",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xff",
    b"\xf5\x80",
    b"\xf0\x9f\x8c",
]


class Case(NamedTuple):
    pieces: list[bytes]
    stops: list[str]
    limit: int | None
    echo: bool

    @property
    def fields(self) -> dict[str, Any]:
        return {"stop": self.stops, "max_tokens": self.limit, "echo": self.echo}

    @property
    def prompt(self) -> str:
        return json.dumps({"pieces": [{"hex": piece.hex()} for piece in self.pieces]})


def expected(case: Case) -> Expected:
    return completion(case.pieces, case.stops, case.limit)


def random_case(number: int) -> Case:
    dice = random.Random(f"streams equal {number}")
    parts = [part.encode() for part in dice.choices(PARTS, k=dice.randint(1, 25))]
    if dice.random() < 0.4:
        for _ in range(dice.randint(1, 4)):
            parts.insert(dice.randint(0, len(parts)), dice.choice(BROKEN))
    data = b"".join(parts)
    borders = sorted(dice.choices(range(len(data) + 1), k=dice.randint(0, len(data))))
    pieces = [data[begin:end] for begin, end in itertools.pairwise([0, *borders, len(data)])]
    text = data.decode(errors="replace")
    stops = []
    for _ in range(dice.choice([0, 1, 1, 2, 5])):
        begin = dice.randrange(len(text))
        stop = text[begin : begin + dice.randint(1, 6)]
        # one in three is not in the text, or only its beginning is
        stops.append(stop if dice.random() < 0.67 else stop + "\u2603")
    limit = dice.choice([None, None, None, dice.randint(1, len(pieces)), len(pieces), len(pieces) + 1])
    return Case(pieces, stops, limit, dice.random() < 0.5)


def test_the_reference_itself() -> None:
    """Examples from the contract, so that two wrongs make no right."""
    assert expected(Case([b"x", b"ab", b"cy"], ["b", "abc"], None, False)) == ("xa", "stop", "b", 2)
    assert expected(Case([b"ABC", b" DEF", b"G", b"HI", b"J"], ["DEFGHIJ"], None, False)) == (
        "ABC ",
        "stop",
        "DEFGHIJ",
        5,
    )
    assert expected(Case([b"almost", b" </sto"], ["</stop>"], None, False)) == ("almost </sto", "stop", None, 3)
    assert expected(Case([b"a", b"STO"], ["STOP"], 2, False)) == ("aSTO", "length", None, 2)
    assert expected(Case([b"\xf0\x9f", b"\x8c\x8d"], [], 1, False)) == ("\ufffd", "length", None, 1)
    assert [pending(data) for data in (b"a", b"a\xf0\x9f\x8c", b"\xf0\x9f\x8c\x8d", b"\xed\xa0", b"\xc0", b"\xe0")] == [
        0,
        3,
        0,
        0,
        0,
        1,
    ]
    cases = [random_case(number) for number in range(CASES)]
    results = [expected(case) for case in cases]
    assert sum(result.stop_reason is not None for result in results) > 50
    assert sum(result.finish == "length" for result in results) > 20
    assert sum("\ufffd" in result.text for result in results) > 20


@pytest.mark.parametrize("batch", range(BATCHES))
def test_streamed_and_plain_are_one_text(stack: Stack, batch: int) -> None:
    for number in range(batch, CASES, BATCHES):
        case = random_case(number)
        want = expected(case)
        text = case.prompt + want.text if case.echo else want.text
        plain = stack.complete(case.prompt, **case.fields)
        got = (plain.text, plain.finish, plain.choice["stop_reason"], plain.usage["completion_tokens"])
        assert got == (text, *want[1:]), (number, case)
        stream = whole(stack.stream(case.prompt, **case.fields))
        assert stream.text == text, (number, case)
        assert (stream.finish, stream.stop_reason, stream.usage) == (*want[1:3], plain.usage), (number, case)
        if case.echo:
            assert stream.pieces[0]["text"] == case.prompt, "once, at the beginning"
