"""A text that is held to a grammar, token by token: what may come next, when it ends, and how it goes on elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import LogLost, StructuredOutputFailed
from shared.reasoning import Reasoning
from shared.sampling import SamplingParams
from shared.structured import (
    ANY_OBJECT,
    MAX_ALIKE,
    MAX_ALIKE_BYTES,
    MAX_BLANKS,
    MAX_DEPTH,
    MAX_NUMBER,
    MAX_PERIOD,
    MAX_ROUND,
    MAX_ROUNDS,
    MAX_STRING,
    Constraint,
    Unmet,
    of_choices,
    of_schema,
)
from workers.generation.constraint import KEPT, Grammar, Grammars, State, Vocabulary
from workers.generation.json_watch import Full, JsonWatch
from workers.generation.sampling import Logits, Sampler

#: A small vocabulary: every byte, some pieces of JSON, an end, a control token, an id without bytes, and two ends.
PIECES = [bytes((byte,)) for byte in range(256)]
MORE = ['{"', '"a"', '":', '", "', '"}', "true", "12", "  ", "}}", '{"a":{"a":', "é", "\n  ", '":"', "1e9", "aa", '":{']
PIECES += [text.encode() for text in MORE]
END, OTHER_END, CONTROL, EMPTY = range(len(PIECES), len(PIECES) + 4)
PIECES += [b"<end>", b"<stop>", b"<|x|>", b""]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
#: What masks must never allow as text.
NO_TEXT = {CONTROL, EMPTY, END, OTHER_END}


def encode(text: str) -> list[int]:
    """As SentencePiece would: with a space before it, which is not the text."""
    return list(b" " + text.encode())


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, end_ids=(END, OTHER_END), control_ids=(CONTROL,), encode=encode)


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(lambda: vocabulary)


def allowed(state: State) -> set[int]:
    bits = np.unpackbits(state.mask().view(np.uint8), count=len(PIECES), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def text_of(ids: list[int]) -> bytes:
    return b"".join(PIECES[token] for token in ids if token not in NO_TEXT)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def write(grammar: Grammar, logits: Callable[[int], Logits], most: int = 400, **params: Any) -> tuple[list[int], State]:
    """Samples until the end; `logits` of each position."""
    state = grammar.begin()
    sampler = Sampler(
        SamplingParams(**params), seed=3, choice=0, vocab_size=len(PIECES), end_ids=(END, OTHER_END), constraint=state
    )
    ids: list[int] = []
    while len(ids) < most and not state.complete and not (ids and ids[-1] in (END, OTHER_END)):
        token = sampler.sample(logits(len(ids)))
        assert token in allowed(state)
        sampler.accept(token)
        ids.append(token)
    return ids, state


def preferring(*tokens: int) -> Callable[[int], Logits]:
    logits = np.zeros(len(PIECES) + 4, np.float32)  # a padded head
    logits[len(PIECES) :] = 50
    for rank, token in enumerate(tokens):
        logits[token] = 20 - rank
    return lambda position: logits


def random_logits(seed: int) -> Callable[[int], Logits]:
    return lambda position: np.random.default_rng((seed, position)).normal(size=len(PIECES)).astype(np.float32)


# -- masks


def test_the_end_is_allowed_only_where_the_text_may_end(grammars: Grammars) -> None:
    state = grammars.of(of_schema({"type": "integer"})).begin()
    assert not allowed(state) & {END, OTHER_END}
    state.accept(ord("4"))
    assert {END, OTHER_END} < allowed(state) and not state.complete
    state = grammars.of(of_choices(["no", "noon"])).begin(ids_of("no"))
    assert {END, ord("o")} <= allowed(state) and not state.complete
    for byte in b"on":
        state.accept(byte)
    assert state.complete and allowed(state) == {END, OTHER_END}


def test_what_is_no_text_is_never_allowed(grammars: Grammars) -> None:
    state = grammars.of(Constraint("regex", "(?s:.)*x")).begin()
    assert not allowed(state) & NO_TEXT
    assert allowed(state) > {ord("x"), ord(" "), PIECES.index("é".encode())}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("schema", [PERSON, {"type": "object"}, {}], ids=["person", "object", "any"])
def test_whatever_a_model_wants_it_writes_what_it_should(grammars: Grammars, schema: Any, seed: int) -> None:
    """FB-050: 100 of 100. Random logits love nothing, so an end comes late, or not at all."""
    ids, _ = write(grammars.of(of_schema(schema)), random_logits(seed), temperature=1.0)
    if ids[-1] in (END, OTHER_END) or len(ids) < 400:
        value = json.loads(text_of(ids), object_pairs_hook=_unique)
        assert schema is not PERSON or (isinstance(value["name"], str) and isinstance(value["age"], int))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def test_a_grammar_has_no_state_of_its_own(grammars: Grammars) -> None:
    """FB-057"""
    grammar = grammars.of(of_schema(PERSON))
    one, two = grammar.begin(), grammar.begin()
    before = allowed(two)
    for byte in b'{"name"':
        one.accept(byte)
    assert allowed(two) == before != allowed(one)


@given(st.integers(0, 10_000), st.integers(0, 400))
def test_a_text_goes_on_elsewhere_as_it_would_have(seed: int, cut: int) -> None:
    """Cut anywhere: a fresh state that is fed the ids so far allows the same, and samples the same."""
    grammar = _EVERYWHERE.of(of_schema({"type": "object"}))
    ids, state = write(grammar, random_logits(seed), most=60, temperature=1.0)
    cut = min(cut, len(ids))
    resumed = grammar.begin(ids[:cut])
    sampler = Sampler(
        SamplingParams(temperature=1.0), seed=3, choice=0, vocab_size=len(PIECES), end_ids=(END, OTHER_END),
        generated=ids[:cut], constraint=resumed,
    )  # fmt: skip
    for position in range(cut, len(ids)):
        assert sampler.sample(random_logits(seed)(position)) == ids[position]
        sampler.accept(ids[position])
    assert resumed.complete == state.complete


_EVERYWHERE = Grammars(lambda: Vocabulary(PIECES, end_ids=(END, OTHER_END), control_ids=(CONTROL,), encode=encode))


def test_ids_that_do_not_follow_the_grammar_are_no_beginning(grammars: Grammars) -> None:
    for text in ("[", '{"a":1,"a"', '{"a":1}x'):
        with pytest.raises(LogLost):
            grammars.of(Constraint("json", ANY_OBJECT)).begin(ids_of(text))
    assert grammars.of(Constraint("json", ANY_OBJECT)).begin([*ids_of("{}"), END]).complete


def test_a_vocabulary_without_an_end(grammars: Grammars) -> None:
    """The text ends where nothing can follow."""
    vocabulary = Vocabulary(PIECES[:END], end_ids=(), control_ids=(), encode=encode)
    state = Grammar(of_choices(["yes", "no"]), vocabulary).begin(ids_of("ye"))
    assert np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little")).tolist() == [ord("s")]
    state.accept(ord("s"))
    assert state.complete


# -- what a grammar does not see


def test_fb051_white_space_ends(grammars: Grammars) -> None:
    ids, state = write(
        grammars.of(of_schema(PERSON)), preferring(*b"\n ", PIECES.index(b"  ")), temperature=0, most=2000
    )
    assert state.complete and json.loads(text_of(ids)).keys() == {"name", "age"}
    assert len(ids) < 10 * 17 + MAX_BLANKS


def test_a_string_that_would_not_end_is_ended(grammars: Grammars) -> None:
    either = np.full(len(PIECES), -50, np.float32)
    either[[ord("a"), ord("b"), ord('"')]] = 20, 20, -10
    ids, state = write(
        grammars.of(of_schema({"type": "string"})), lambda position: either, most=2 * MAX_STRING, temperature=1.0
    )
    assert state.complete and len(text_of(ids)) == MAX_STRING + 2
    ids, state = write(grammars.of(of_schema({"type": "string"})), preferring(*b" n\\"), most=2000, temperature=0)
    assert state.complete and len(text_of(ids)) == MAX_BLANKS + 2


@pytest.mark.parametrize("round_", [b"a", b"1234567890", b"/v2.1", b"x" + bytes(range(58, 58 + 33))], ids=ascii)
def test_a_string_that_goes_in_circles_is_ended(grammars: Grammars, round_: bytes) -> None:
    def going(position: int) -> Logits:
        return preferring(round_[position % len(round_)])(position)

    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 9}}, "required": ["a"]}
    ids, state = write(grammars.of(of_schema(schema)), going, temperature=0, most=2000)
    assert state.complete and json.loads(text_of(ids)).keys() == {"a"}
    assert len(ids) < max(MAX_ROUND, MAX_ROUNDS * len(round_)) + 2 * len(round_) + 5 * 17


def test_a_string_that_is_to_be_longer_is_not_ended(grammars: Grammars) -> None:
    schema = {"type": "string", "minLength": MAX_STRING + 10}
    ids, state = write(grammars.of(of_schema(schema)), preferring(ord("a")), most=2 * MAX_STRING, temperature=0)
    assert state.complete and len(text_of(ids)) == MAX_STRING + 12


@pytest.mark.parametrize(
    "items",
    [
        {"type": "string", "enum": ["kitchen"]}, {"const": 0}, {"type": "array", "items": {"const": 10}, "maxItems": 2},
        {"type": "object", "properties": {"a": {"const": "x"}}, "additionalProperties": False},
    ],
)  # fmt: skip
def test_an_array_of_the_same_over_and_over_is_ended(grammars: Grammars, items: Any) -> None:
    schema = {"properties": {"it": {"type": "array", "items": items}}, "required": ["it"], "type": "object"}
    ids, state = write(
        grammars.of(of_schema(schema)), preferring(*b',"', PIECES.index(b'", "'), ord("{")), most=9000, temperature=0
    )
    assert state.complete
    [value] = json.loads(text_of(ids)).values()
    long = len(json.dumps(value[0], separators=(",", ":")))
    assert MAX_ALIKE <= len(value) <= max(MAX_ALIKE, MAX_ALIKE_BYTES // long) + 3


def test_an_array_that_is_to_be_longer_is_not_ended(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"const": "same"}, "minItems": 100}
    ids, state = write(grammars.of(of_schema(schema)), preferring(ord(",")), most=9000, temperature=0)
    assert state.complete and json.loads(text_of(ids)) == ["same"] * 100


def test_an_array_of_different_items_goes_on(grammars: Grammars) -> None:
    place: JsonWatch | None = JsonWatch()
    for number in range(500):
        assert place is not None
        place = place.after(b"[" * (not number) + b'{"a":[1,1],"b":"%d"},' % (number // 5))
        assert place is not None and place.tired is None and not place.repeats(b"1,")
    assert place is not None
    for _ in range(MAX_ALIKE):
        assert place is not None and place.tired is None
        place = place.after(b' {"a" : [1,1], "b":"always the same"},')
    assert place is not None and place.tired == 0
    other: JsonWatch | None = JsonWatch().after(b"[" + b"".join(b"[%d,[1],1234567890]," % n for n in range(50)))
    assert other is not None and other.tired is None, "only their ends are alike"
    assert place.repeats(b"1,") and place.repeats(b'"a",') and not place.repeats(b'"a,') and not place.repeats(b"[1,")


@pytest.mark.parametrize("prefer", [b"1", b".1", b"e1", b"-9"])
def test_a_number_that_would_not_end_is_ended(grammars: Grammars, prefer: bytes) -> None:
    ids, _ = write(grammars.of(of_schema({"type": "number"})), preferring(*prefer), temperature=0)
    assert len(ids) <= MAX_NUMBER + 2
    assert abs(json.loads(text_of(ids))) < float("inf")


@pytest.mark.parametrize(
    ("schema", "prefer"),
    [
        ({"type": "integer", "multipleOf": 30, "minimum": 1}, b"01"),
        ({"type": "number", "exclusiveMinimum": 1.1}, b"1.0"),
    ],
)
def test_a_number_that_must_not_end_yet_takes_another_digit(grammars: Grammars, schema: Any, prefer: bytes) -> None:
    """A power of ten is no multiple of 30, and 1.1000 not more than 1.1."""
    ids, _ = write(grammars.of(of_schema(schema)), preferring(*prefer), temperature=0)
    value = json.loads(text_of(ids))
    assert value >= 1.1 and value % schema.get("multipleOf", value) == 0 and len(ids) <= MAX_NUMBER + 8


def test_a_number_that_may_not_end_fails(grammars: Grammars) -> None:
    grammar = grammars.of(of_schema({"type": "integer", "multipleOf": 7919, "minimum": 1}))
    with pytest.raises(StructuredOutputFailed):
        write(grammar, preferring(*b"01"), temperature=0)


def test_keys_come_once(grammars: Grammars) -> None:
    """Of the properties that a schema does not name, the grammar would let them come again."""
    ids, _ = write(grammars.of(of_schema({"type": "object"})), preferring(*b'"a:1,'), most=60, temperature=0)
    keys = [part.partition(b'"')[0] for part in text_of(ids)[2:].split(b',"')]
    assert len(keys) > 3 and len(set(keys[:-1])) == len(keys) - 1


def test_depth_is_bounded(grammars: Grammars) -> None:
    ids, _ = write(grammars.of(of_schema({})), preferring(*b"[1]"), most=400, temperature=0)
    assert text_of(ids) == b"[" * MAX_DEPTH + b"1" * MAX_NUMBER + b"]" * MAX_DEPTH
    endless = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    with pytest.raises(StructuredOutputFailed):
        write(grammars.of(of_schema(endless)), preferring(*b'n{"}'), most=2000, temperature=0)


def test_a_pattern_that_costs_too_much_fails_in_time(grammars: Grammars) -> None:
    grammar = grammars.of(of_schema({"type": "string", "pattern": "^(.*a.{40}){3}$"}))
    ids, _ = write(grammar, random_logits(1), most=100, temperature=1.0)
    assert ids


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"a":1},"b":[{"a":1},{"a":2}]}',
        '["a","a","a"]',
        '{"a":"a","b":"a\\"b","c":"\\\\"}',
        '{"a" : [ ] , "b" : { } , "c" : 1e10 , "d" : -1.5E-7}',
        '{"true":true,"e":false,"null":null}',
        '"\\u0061 {[,:"',
    ],
)
@given(data=st.data())
def test_the_watch_lets_good_json_through_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    place: JsonWatch | None = JsonWatch()
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        assert place is not None
        place = place.after(raw[begin:end])
    assert place == JsonWatch().after(raw) and place is not None and place.open == ()


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a"', '{"a":1,"\\u0061"', '{"a":{"b":1},"a"', "[" * (MAX_DEPTH + 1), "1e100", "[1E+0123", '[{"x":[],"x"'],
)
def test_the_watch_refuses(text: str) -> None:
    raw = text.encode()
    assert JsonWatch().after(raw) is None
    assert JsonWatch().after(raw[:-1]) is not None, "the last byte is the one that is wrong"


def test_the_watch_tells_what_is_full() -> None:
    def full(text: str) -> Full | None:
        place = JsonWatch().after(text.encode())
        assert place is not None
        return place.full

    assert full('{"' + "x" * MAX_STRING) is Full.STRING
    assert full('["' + "x" * (MAX_STRING - 1) + "\\") is None, "an escape is not cut"
    assert full('["' + " " * MAX_BLANKS) is full('["' + "\\n" * MAX_BLANKS) is Full.STRING
    assert full('["' + " x" * (MAX_ROUND // 2 - 1)) is None and full('["' + " x" * (MAX_ROUND // 2)) is Full.STRING
    period = "".join(map(chr, range(ord("0"), ord("0") + MAX_PERIOD))).replace("\\", "/")
    assert full('["' + period * (MAX_ROUNDS - 1)) is None and full('["x' + period * MAX_ROUNDS) is Full.STRING
    assert full('["' + period * MAX_ROUNDS + "x") is None, "it goes on with something else"
    assert full('["' + f"{period} " * (MAX_ROUNDS + 1)) is None, "a long round is none"
    assert full("[" + "1" * MAX_NUMBER) is full("1e10") is full("1e-10") is Full.NUMBER
    assert full("[1e1") is full("12345, ") is full("[true") is None


# -- grammars


def test_a_grammar_is_compiled_once_and_kept_for_a_while(vocabulary: Vocabulary) -> None:
    made: list[int] = []

    def make() -> Vocabulary:
        made.append(1)
        return vocabulary

    grammars = Grammars(make)
    assert grammars.kept(of_choices(["a"])) is None and not made
    first = grammars.of(of_choices(["a"]))
    assert grammars.of(of_choices(["a"])) is first is grammars.kept(of_choices(["a"])) and made == [1]
    for number in range(KEPT):
        grammars.of(of_choices([str(number)]))
    assert grammars.kept(of_choices(["a"])) is None and grammars.kept(of_choices(["1"])) is not None


def test_what_is_enforced_in_part_needs_somebody_who_looks(grammars: Grammars) -> None:
    """The worker's second look: a job may come from anybody."""
    constraint = of_schema({"type": "array", "uniqueItems": True})
    with pytest.raises(Unmet):
        grammars.of(constraint)
    assert grammars.of(Constraint("json", constraint.source, whole=True))


def test_refused_tokens_have_random_numbers_of_their_own(grammars: Grammars) -> None:
    """With one number for all, a token that is refused would always be followed by the same other one."""
    grammar = grammars.of(of_schema({"type": "object"}))
    begun = ids_of('{"a":1,"')
    even = np.full(len(PIECES), -20.0, np.float32)
    even[[ord("a"), PIECES.index(b"aa"), ord("b"), PIECES.index(b'":')]] = 5.0
    seen = set()
    for seed in range(60):
        state = grammar.begin([*begun, ord("a")])
        sampler = Sampler(
            SamplingParams(),
            seed=seed,
            choice=0,
            vocab_size=len(PIECES),
            end_ids=(END,),
            generated=begun,
            constraint=state,
        )
        seen.add(sampler.sample(even))
    assert seen == {ord("a"), PIECES.index(b"aa"), ord("b")}, "not the end of the key, which is there already"


# -- behind a model's reasoning (FB-058)

OPENED, UNOPENED = (Reasoning("<think>", "</think>", opened=opened) for opened in (True, False))


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        (OPENED, 'I think {"a":1} it is "x".\n</think>\n\n{"a":1}'),
        (OPENED, '</think>{"a":{"a":2}}'),
        (UNOPENED, ' <think>[[[ "</thin" </think> {"a":1}'),
        (UNOPENED, '{"a":1}'),
        (UNOPENED, '\n{"a":1}'),
    ],
)
def test_fb058_the_constraint_begins_behind_the_reasoning(reasoning: Reasoning, text: str) -> None:
    grammar = _EVERYWHERE.of(Constraint("json", ANY_OBJECT), reasoning)
    state = grammar.begin(ids_of(text))
    assert state.complete
    assert not grammar.begin(ids_of(text[:-1])).complete
    with pytest.raises(LogLost):
        grammar.begin(ids_of(text[:-1] + ',"a":1'))


def test_fb058_nothing_of_the_reasoning_counts(grammars: Grammars) -> None:
    """Neither keys, nor depth, nor white space; and no end before the answer."""
    grammar = grammars.of(Constraint("json", ANY_OBJECT), OPENED)
    state = grammar.begin(ids_of("[" * (MAX_DEPTH + 5) + '"' + " " * 200))
    assert allowed(state) > set(b'[] "x<') and not allowed(state) & {END, OTHER_END}
    state = grammar.begin(ids_of("yes</think>"))
    assert allowed(state) <= {*b" \n\r\t{", *map(PIECES.index, [b'{"', b"  ", b"\n  ", b'{"a":{"a":'])}
    assert grammars.of(of_choices(["ok"]), UNOPENED).begin(ids_of("<think>no</think>ok")).complete
    with pytest.raises(LogLost):
        grammars.of(of_choices(["ok"]), UNOPENED).begin(ids_of("no"))
