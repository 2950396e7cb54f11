"""Detokenising: cut the bytes anywhere, the text is the same and valid."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.generation.text import Utf8Stream, continues

#: Bytes that meet in real trouble: whole characters of every length, halves of them, surrogates, overlong forms.
AWKWARD = st.lists(
    st.sampled_from([b"a", b" ", b"\n", b"\0", b"\xc3\xa9", b"\xe4\xbd\xa0", b"\xf0\x9f\x8c\x8d", b"\xef\xbf\xbd"])
    | st.sampled_from(
        [b"\xc3", b"\xe4\xbd", b"\xe4", b"\xf0\x9f", b"\xf0\x9f\x8c", b"\x8c", b"\xed\xa0\x80", b"\xc0\x80"]
    )
    | st.sampled_from([b"\xf4\x90", b"\xf0\x80", b"\xff", b"\xfe", b"\xe2\x28\xa1", b"\xe0\x80"])
    | st.binary(max_size=3)
    | st.text(max_size=3).map(str.encode),
    max_size=12,
).map(b"".join)


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def stream(pieces: list[bytes]) -> str:
    utf8 = Utf8Stream()
    return "".join(utf8.feed(piece) for piece in pieces) + utf8.flush()


@given(AWKWARD, st.lists(st.integers(0, 1000), max_size=20))
@example(b"\xf0\x9f\x8c\x8d\xe4\xbd\xa0", [2, 4, 6])
@example(b"\xe2\x28\xa1", [1, 2])
@example(b"\xed\xa0\x80", [1, 2])
def test_any_cut_gives_the_text_of_the_whole(data: bytes, cuts: list[int]) -> None:
    assert stream(in_pieces(data, cuts)) == data.decode("utf-8", "replace")


@given(AWKWARD, st.lists(st.integers(0, 1000), max_size=20))
def test_what_is_out_is_final_and_no_more_than_a_character_is_held(data: bytes, cuts: list[int]) -> None:
    utf8 = Utf8Stream()
    out, fed = "", b""
    for piece in in_pieces(data, cuts):
        out += utf8.feed(piece)
        fed += piece
        out.encode()  # raises for anything that is not valid Unicode
        assert data.decode("utf-8", "replace").startswith(out)
        assert len(utf8.pending) <= 3
        assert fed.endswith(utf8.pending)
        assert out + ("\ufffd" if utf8.pending else "") == fed.decode("utf-8", "replace")


def test_fb003_characters_spread_over_tokens_come_out_whole() -> None:
    utf8 = Utf8Stream()
    assert [utf8.feed(piece) for piece in (b"\xf0\x9f", b"\x8c\x8d", b"\xe4\xbd", b"\xa0")] == ["", "🌍", "", "你"]
    assert utf8.flush() == ""


def test_a_character_that_never_completes_is_one_replacement() -> None:
    assert stream([b"a", b"\xf0\x9f", b"\x8c"]) == "a\ufffd"
    assert stream([b"\xf0\x9f", b"b"]) == "\ufffdb"


def test_fb035_leading_whitespace_stays() -> None:
    assert stream([b"\n\n", b" Paris"]) == "\n\n Paris"


@pytest.mark.parametrize(
    ("pending", "piece", "inside"),
    [
        (b"\xf0\x9f", b"\x8c\x8d", True),
        (b"\xf0\x9f\x8c", b"\x8dabc", True),
        (b"\xf0\x9f", b"\x8c", True),
        (b"\xf0\x9f", b"abc", False),
        (b"\xf0\x9f\x8c", b"\xff", False),
        (b"\xe2", b"\xe2\x82\xac", False),
    ],
)
def test_whether_a_piece_begins_inside_the_character_before(pending: bytes, piece: bytes, inside: bool) -> None:
    assert continues(pending, piece) is inside
