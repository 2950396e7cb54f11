"""Stop strings: however the text is cut, the same text goes out, and nothing that must not."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.generation.stops import StopScanner, StopStrings

#: Two letters make borders, overlaps and stops inside stops; the others make text between them.
TEXTS = st.text("ab", max_size=30) | st.text("abc \n🌍", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6) | st.text("abc🌍", min_size=1, max_size=4), max_size=5)
CUTS = st.lists(st.integers(0, 1000), max_size=12)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, word by word: the match that ends first, of those the longest; the text before it."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held(text: str, stops: list[str]) -> str:
    """The longest end of the text that is the beginning of a stop string."""
    ends = [text[len(text) - n :] for n in range(len(text) + 1)]
    return max((end for end in ends if any(s.startswith(end) and s != end for s in stops)), key=len, default="")


def scan(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(StopStrings(stops))
    text = "".join(scanner.feed(piece) for piece in pieces)
    return text + scanner.flush(), scanner.matched


@given(TEXTS, STOPS, CUTS)
@example("xabcy", ["b", "abc"], [])
@example("aabaabaaa", ["aabaaa"], [3, 4])
@example("aaab", ["aab", "aaab"], [])
def test_any_cut_gives_what_the_rule_says(text: str, stops: list[str], cuts: list[int]) -> None:
    assert scan(in_pieces(text, cuts), stops) == reference(text, stops)


@given(TEXTS, STOPS, CUTS)
def test_what_is_held_is_what_can_still_be_a_stop_and_no_more(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(StopStrings(stops))
    out, fed = "", ""
    for piece in in_pieces(text, cuts):
        out += scanner.feed(piece)
        fed += piece
        before, stop = reference(fed, stops)
        assert scanner.matched == stop
        if stop is not None:
            assert (out, scanner.held) == (before, "")
            break
        assert out + scanner.held == fed
        assert scanner.held == held(fed, stops)


def test_fb001_a_prefix_of_a_stop_is_not_sent_before_the_stop_completes() -> None:
    scanner = StopScanner(StopStrings(["DEFGHIJ"]))
    assert [scanner.feed(piece) for piece in ("ABC", " DEF", "G", "HI", "J", "K")] == ["ABC", " ", "", "", "", ""]
    assert scanner.matched == "DEFGHIJ"
    assert scanner.flush() == ""


def test_fb001_a_refuted_prefix_comes_out_complete() -> None:
    scanner = StopScanner(StopStrings(["DEFGHIJ"]))
    assert [scanner.feed(piece) for piece in ("ABC", " DEF", "G", "HI", "Z")] == ["ABC", " ", "", "", "DEFGHIZ"]


def test_fb032_a_held_tail_comes_out_at_the_end() -> None:
    scanner = StopScanner(StopStrings(["</stop>"]))
    assert scanner.feed("almost") + scanner.feed(" </sto") == "almost "
    assert scanner.flush() == "</sto"


def test_fb033_a_stop_inside_a_token_drops_the_rest_of_the_token() -> None:
    assert scan(["Hel", "lo wor", "ld. Next"], ["world."]) == ("Hello ", "world.")


@pytest.mark.parametrize("cuts", list(itertools.product((False, True), repeat=4)))
def test_fb033_of_two_stops_the_one_that_ends_first_wins_however_cut(cuts: tuple[bool, ...]) -> None:
    pieces = [""]
    for char, cut in zip("xabcy", (*cuts, False), strict=True):
        pieces[-1] += char
        if cut:
            pieces.append("")
    assert scan(pieces, ["b", "abc"]) == ("xa", "b")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert scan(["xabcy"], ["c", "abc", "bc"]) == ("x", "abc")
    assert scan(["xaaab"], ["aab", "aaab"]) == ("x", "aaab")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_64_stops_of_1000_characters_are_prepared_and_matched_in_linear_time() -> None:
    """The worst there is: every stop has begun all the time, and none ends. A quadratic scan takes minutes."""
    began = time.monotonic()
    scanner = StopScanner(StopStrings(["e" * 999 + chr(0x100 + n) for n in range(64)]))
    text = "e" * 20_000
    out = "".join(scanner.feed(text[i : i + 4]) for i in range(0, len(text), 4))
    assert out == "e" * (20_000 - 999)
    assert time.monotonic() - began < 15
