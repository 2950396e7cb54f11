"""A choice: from ids to text, to the count of ids that are out, to its end; and the same again after a replay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.generation.choice import ChoiceState, Finish, Reason, Released
from workers.generation.stops import StopStrings

END = 257
STOP_ID = 9

PIECES = st.lists(
    st.sampled_from(
        [b"", b"a", b"b", b"ab", b"ba ", b"c", b"\xf0\x9f", b"\x8c\x8d", b"\x8c", b"\x8dab", b"\xc3", b"\xa9"]
    )
    | st.sampled_from(
        [b"\xf0\x9f\x8c\x8d", b"a\xf0", b"b\xff", "é".encode(), b"\xef\xbf\xbd", b"\xef", b"\xbf", b"\xbd"]
    ),
    max_size=14,
)
STOPS = st.lists(st.text("abc🌍é�", min_size=1, max_size=4), max_size=4)
LIMITS = st.integers(1, 16)
#: How the ids end: no end, an end token, a stop token id.
ENDS = st.sampled_from([(), (END,), (STOP_ID,)])


def state(stops: list[str], max_new: int = 10_000) -> ChoiceState:
    return ChoiceState(stops=StopStrings(stops), max_new=max_new, end_ids=(END,), stop_token_ids=(STOP_ID,))


def ids_of(pieces: list[bytes], end: tuple[int, ...]) -> list[tuple[int, bytes]]:
    return [*((512 + i, piece) for i, piece in enumerate(pieces)), *((token, b"<end>") for token in end)]


def run(choice: ChoiceState, tokens: list[tuple[int, bytes]]) -> list[Released]:
    """Feeds ids to the end as a worker does, which hears of the end from the state or, failing that, the engine."""
    steps = []
    for token, piece in tokens:
        steps.append(choice.feed(token, piece))
        if choice.finished is not None:
            return steps
    return [*steps, choice.finish("length")]


def complete(pieces: list[str], stops: list[str], max_new: int = 10_000) -> tuple[str, int, Finish | None]:
    """(text, ids, finish) of pieces followed by an end token."""
    choice = state(stops, max_new)
    text = "".join(step.text for step in run(choice, ids_of([piece.encode() for piece in pieces], (END,))))
    return text, choice.ids, choice.finished


def characters(data: bytes) -> list[tuple[str, int]]:
    """Each character of the decoded text and the offset of the byte behind it."""
    found, at = [], 0
    while at < len(data):
        try:
            end, char = at + len(data[at:].decode()[0].encode()), data[at:].decode()[0]
        except UnicodeDecodeError as error:
            if error.start:
                char = data[at : at + error.start].decode()[0]
                end = at + len(char.encode())
            else:
                end, char = at + error.end, "\ufffd"
        found.append((char, end))
        at = end
    return found


def reference(tokens: list[tuple[int, bytes]], stops: list[str], max_new: int) -> tuple[str, int, int, Finish]:
    """(text, ids used, ids out, finish) by looking at everything again after each id."""
    for count in range(len(tokens) + 1):
        token = tokens[count - 1][0] if count else None
        ended = token in (END, STOP_ID)
        over = ended or count == max_new or count == len(tokens)
        pieces = [piece for _, piece in tokens[: count - 1 if ended else count]]
        data = b"".join(pieces)
        chars = characters(data)
        if not over and chars and chars[-1] == ("\ufffd", len(data)):
            # The last one may be half a character only; then it is not there yet.
            tail = data[chars[-2][1] if len(chars) > 1 else 0 :]
            try:
                tail.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    chars.pop()
        text = "".join(char for char, _ in chars)
        for end in range(1, len(text) + 1):
            matches = [stop for stop in stops if text[:end].endswith(stop)]
            if matches:
                stop = max(matches, key=len)
                cut = end - len(stop)
                byte = chars[cut - 1][1] if cut else 0
                starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
                # Half a character's later ids begin where it begins, which may be before the cut: by byte it is the same.
                begun = [start < byte for start in starts]
                return text[:cut], count, sum(begun), Finish("stop", stop)
        if over:
            reason: Reason = "stop" if ended else "length"
            return text, count, count, Finish(reason, STOP_ID if token == STOP_ID else None)
    raise AssertionError


@given(PIECES, STOPS, LIMITS, ENDS)
def test_text_and_finish_are_what_the_whole_says(
    pieces: list[bytes], stops: list[str], max_new: int, end: tuple[int, ...]
) -> None:
    tokens = ids_of(pieces, end)
    choice = state(stops, max_new)
    steps = run(choice, tokens)
    text, used, out, finish = reference(tokens, stops, max_new)
    assert "".join(step.text for step in steps) == text
    assert (choice.ids, choice.finished) == (used, finish)
    assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish == finish
    if all(pieces):  # ids without text: see the test below
        assert choice.out == out


@given(PIECES, STOPS, LIMITS, ENDS, st.integers(0, 16))
def test_replay_after_any_cut_gives_the_same(
    pieces: list[bytes], stops: list[str], max_new: int, end: tuple[int, ...], cut: int
) -> None:
    """A worker takes over after `cut` ids: what it releases goes on exactly behind what had been released."""
    tokens = ids_of(pieces, end)
    whole = run(state(stops, max_new), tokens)
    first = state(stops, max_new)
    before = [first.feed(*token) for token in tokens[:cut]]
    second = state(stops, max_new)
    replayed = second.replay(tokens[:cut])
    assert replayed == ("".join(step.text for step in before), first.out, first.finished)
    after = run(second, tokens[cut:]) if second.finished is None else []
    assert replayed.text + "".join(step.text for step in after) == "".join(step.text for step in whole)
    assert (second.out, second.finished) == (whole[-1].out, whole[-1].finish)


@given(PIECES, STOPS)
def test_an_id_is_out_exactly_when_all_its_text_is(pieces: list[bytes], stops: list[str]) -> None:
    choice = state(stops)
    released, data = 0, b"".join(pieces)
    ends = [end for _, end in characters(data)]
    for count, (token, piece) in enumerate(ids_of(pieces, ()), 1):
        step = choice.feed(token, piece)
        if step.finish is not None:
            break
        released += len(step.text)
        byte = ends[released - 1] if released else 0
        want = [sum(map(len, pieces[: i + 1])) <= byte for i in range(count)]
        assert step.out == sum(want)


def test_an_id_without_text_is_out_when_those_before_it_are() -> None:
    choice = state(["STOP"])
    outs = [choice.feed(1, piece).out for piece in (b"", b"S", b"", b"x", b"", b"\xf0", b"", b"\x9f\x8c\x8d")]
    assert outs == [1, 1, 1, 4, 5, 5, 5, 8]


def test_an_id_partly_released_is_not_out() -> None:
    choice = state(["wind"])
    assert choice.feed(1, b"the w") == Released("the ", 0)
    assert choice.feed(2, b"ind") == Released("", 1, Finish("stop", "wind"))


def test_after_a_stop_string_only_ids_that_begin_before_it_count_as_out() -> None:
    choice = state(["STOP"])
    steps = [choice.feed(i, piece) for i, piece in enumerate((b"a", b"b ST", b"O", b"P and more"))]
    assert steps == [Released("a", 1), Released("b ", 1), Released("", 1), Released("", 2, Finish("stop", "STOP"))]
    assert choice.ids == 4


def test_an_end_token_counts_and_has_no_text() -> None:
    choice = state([])
    assert choice.feed(512, b"a") == Released("a", 1)
    assert choice.feed(END, b"<|257|>") == Released("", 2, Finish("stop"))
    assert choice.ids == 2


def test_a_stop_token_id_is_named() -> None:
    assert state([]).feed(STOP_ID, b"x") == Released("", 1, Finish("stop", STOP_ID))


def test_ids_after_the_end_do_not_count() -> None:
    choice = state(["STOP"])
    run(choice, [(1, b"a"), (2, b"STOP")])
    assert choice.feed(7, b"more") == Released("", 1)
    assert choice.finish("length") == Released("", 1)
    assert (choice.ids, choice.finished) == (2, Finish("stop", "STOP"))


def test_fb024_every_way_to_end() -> None:
    assert complete(["a"] * 9, [], 5) == ("aaaaa", 5, Finish("length"))
    assert complete(["a"] * 4, [], 5) == ("aaaa", 5, Finish("stop"))
    assert complete(["a", "b", "c", "ST", "OP"], ["STOP"], 5) == ("abc", 5, Finish("stop", "STOP"))
    assert complete(["a", "b", "c", "S", "TO"], ["STOP"], 5) == ("abcSTO", 5, Finish("length"))


def test_fb030_ids_are_counted_not_what_was_sent() -> None:
    pieces = [b"a", b"\xf0", b"\x9f", b"\x8c", b"\x8d", b"b", b"EN", b"X", b"c", b"d"]
    choice = state(["END"], 10)
    assert "".join(step.text for step in run(choice, ids_of(pieces, ()))) == "a🌍bENXcd"
    assert (choice.ids, choice.out, choice.finished) == (10, 10, Finish("length"))


def test_fb032_a_held_tail_comes_with_the_end_token() -> None:
    choice = state(["</stop>"])
    assert choice.feed(1, b"almost") == Released("almost", 1)
    assert choice.feed(2, b" </sto") == Released(" ", 1)
    assert choice.feed(END, b"") == Released("</sto", 3, Finish("stop"))


def test_half_a_character_at_the_limit_is_one_replacement() -> None:
    choice = state([], 2)
    assert choice.feed(1, b"a") == Released("a", 1)
    assert choice.feed(2, b"\xf0\x9f") == Released("\ufffd", 2, Finish("length"))


def test_a_replacement_at_the_end_can_complete_a_stop_string() -> None:
    choice = state(["b\ufffd"])
    assert [choice.feed(1, piece) for piece in (b"a", b"b", b"\xf0")][-1] == Released("", 1)
    assert choice.feed(END, b"") == Released("", 1, Finish("stop", "b\ufffd"))


def test_fb035_leading_whitespace_stays() -> None:
    assert complete(["\n\n", " Paris"], [])[0] == "\n\n Paris"


def test_the_engine_may_end_a_choice_early() -> None:
    choice = state(["STOP"])
    choice.feed(1, b"a ST")
    assert choice.finish("length") == Released("ST", 1, Finish("length"))
