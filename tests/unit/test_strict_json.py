"""Strict JSON: what is refused, with which words, and how long a hostile body takes."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.strict_json import parse
from shared.errors import InvalidJson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.booleans())
def test_reads_what_json_reads(value: dict, ascii_only: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_invalid_json(body: bytes) -> None:
    try:
        assert isinstance(parse(body), dict)
    except InvalidJson as error:
        assert error.message


@pytest.mark.parametrize(
    "body",
    [
        b"{:",
        b"",
        b"  \n",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b"true",
        b'{"a":1',
        b'{"a":1} x',
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":01}',
    ],
)
def test_not_one_object(body: bytes) -> None:
    """FB-039"""
    with pytest.raises(InvalidJson):
        parse(body)


@pytest.mark.parametrize("body", [b'{"a":1,"a":1}', b'{"x":{"y":[{"a":1,"\\u0061":2}]}}'])
def test_duplicate_keys(body: bytes) -> None:
    """FB-039: duplicates are refused, however deep and however written."""
    with pytest.raises(InvalidJson, match="twice"):
        parse(body)


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 290 + "e50", "9" * 400 + ".0"]
)
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "frequency_penalty"])
def test_numbers_that_are_not_finite(field: str, number: str) -> None:
    """FB-014"""
    with pytest.raises(InvalidJson) as caught:
        parse(f'{{"prompt":"x","{field}": {number}}}'.encode())
    assert caught.value.param == field
    with pytest.raises(InvalidJson) as caught:
        parse(f'{{"prompt":"x","logit_bias":{{"5": {number}}}}}'.encode())
    assert caught.value.param == "logit_bias"


def test_such_words_inside_strings_are_text() -> None:
    assert parse(b'{"prompt":"NaN Infinity 1e999 \\\\ud800"}') == {"prompt": "NaN Infinity 1e999 \\ud800"}


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00", r"\ud83d\u0041", r"\udf0d\ud83c", r"a\uD800"])
def test_lone_surrogates(text: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse(f'{{"prompt":["{text}"]}}'.encode())
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidJson):
        parse(f'{{"a":{{"{text}":1}}}}'.encode())
    with pytest.raises(InvalidJson) as caught:
        parse(f'{{"{text}":1}}'.encode())
    caught.value.message.encode()
    assert caught.value.param is None


def test_surrogate_pairs_are_characters() -> None:
    assert parse(rb'{"prompt":"\ud83c\udf0d"}') == {"prompt": "🌍"}


@pytest.mark.parametrize(
    "body", [b'\xef\xbb\xbf{"a":1}', b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', '{"a":1}'.encode("utf-16")]
)
def test_only_plain_utf8(body: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse(body)


def test_nesting() -> None:
    def nested(levels: int) -> bytes:  # the object itself is one
        return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    parse(nested(64))
    with pytest.raises(InvalidJson, match="64"):
        parse(nested(65))
    with pytest.raises(InvalidJson, match="64"):
        parse(b'{"a":' * 100 + b"1" + b"}" * 100)
    brackets = '[{"\\"' * 100
    assert parse(json.dumps({"a": brackets, "b": [[]] * 100}).encode())["a"] == brackets


def test_integers_of_any_length() -> None:
    """int() of thousands of digits raises or takes seconds; out of every range is all that matters."""
    value = parse(b'{"a":' + b"9" * 5000 + b',"b":-' + b"9" * 5000 + b',"c":12}')
    assert value["a"] > 10**200 and value["b"] < -(10**200) and value["c"] == 12


@pytest.mark.parametrize(
    "body",
    [b'{"a":' + b"[" * 5_000_000, b'{"a":' + b"[]," * 1_000_000 + b"1}", b'{"a":"' + b'\\"' * 4_000_000,
     b'{"a":"' + b"[" * 8_000_000 + b'"}',
     b"9" * 5_000_000, b'{"a":' + b"1" * 5_000_000 + b"}"],
    ids=["open", "pairs", "quotes", "string", "digits", "integer"],
)  # fmt: skip
def test_hostile_bodies_are_answered_soon(body: bytes) -> None:
    started = time.process_time()
    try:
        parse(body)
    except InvalidJson:
        pass
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("tail", [b'"\\', b'"a\\', b'"', b'""', b'"\\"'])
def test_strings_that_never_close_are_refused_in_linear_time(tail: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidJson):
        parse(b"[" * 65 + tail * 200_000)
    assert time.monotonic() - began < 5
