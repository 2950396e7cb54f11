"""Calls in a text: told apart however the text is cut, and what is no call stays text."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.relay.tool_calls import MAX_HEAD, MAX_SPACE, MAX_WHOLE, CallParser, call_id
from api.tool_messages import plain
from shared.errors import InvalidRequest
from shared.tool_calls import Form, Tools, form_of, knows_tools

HERMES = Tools("hermes", ("f", "get_time"))
LLAMA = Tools("llama", ("f", "get_time"))
#: What templates of the families say of tools, and the carried model's as a whole.
QWEN = """{%- if tools %}...return a json object within <tool_call></tool_call>:
<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>{%- endif %}"""
LLAMA_31 = """{%- if tools %}{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and
its value}. Do not use variables.' }}{{- "<|python_tag|>" }}{%- endif %}"""
LLAMA_32 = LLAMA_31.replace("<|python_tag|>", "")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
)
Read = tuple[str, list[tuple[str, str]], bool]


def read(tools: Tools, pieces: list[str]) -> Read:
    """(content, calls, whether all are whole)"""
    parser = CallParser(tools)
    content, calls = "", list[tuple[str, str]]()
    for found in [*map(parser.feed, pieces), parser.flush()]:
        content += found.content
        for call in found.calls:
            if call.name is not None:
                assert call.index == len(calls), "a call begins once, with its name"
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1, "one call after the other"
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert parser.calls == len(calls)
    return content, calls, parser.whole


def hermes(name: str = "f", arguments: str = "{}", space: str = "\n") -> str:
    return f'<tool_call>{space}{{"name": "{name}", "arguments": {arguments}}}{space}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []), (" \n", " \n", []), ("hi", "hi", []), ("a <b> c", "a <b> c", []), ("x\n", "x\n", []),
        (hermes(), "", [("f", "{}")]),
        (hermes(space=""), "", [("f", "{}")]),
        ("\n\n" + hermes("f", '{"a": [1, {"b": "}"}]}') + "\n", "", [("f", '{"a": [1, {"b": "}"}]}')]),
        ("Let me see.\n" + hermes(), "Let me see.", [("f", "{}")]),
        (hermes() + "\n" + hermes("get_time", '{"zone":"a"}'), "", [("f", "{}"), ("get_time", '{"zone":"a"}')]),
        (hermes() + "\nDone.", "\nDone.", [("f", "{}")]),
        (hermes("f", '{"a": "</tool_call> \\" {"}'), "", [("f", '{"a": "</tool_call> \\" {"}')]),
        ('<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "get_time", "arguments": {}}]</tool_call>', "",
         [("f", '{"a": 1}'), ("get_time", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>x', "x", [("f", '{"a": 1}')]),
        ('<tool_call>{"arguments": {"a": 1.50}, "name": "f"}</tool_call>', "", [("f", '{"a": 1.5}')]),
        ('<tool_call>{"type": "function", "id": "1", "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"type":"function","function":{"name":"f","arguments":"{\\"a\\":1}"}}</tool_call>', "",
         [("f", '{"a":1}')]),
        ('<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", "{}")]),
        ('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [("get_time", "{}")]),
        # no calls
        ("<tool_call>", "<tool_call>", []), ("a <tool_call> b", "a <tool_call> b", []), ("x <tool", "x <tool", []),
        (hermes("unknown"), hermes("unknown"), []), (hermes("f", "[]"), hermes("f", "[]"), []),
        (hermes("f", '"x"'), hermes("f", '"x"'), []), ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": ' + hermes(), '<tool_call>{"name":', [("f", "{}")]),
        ("<tool_call><tool_call>" + hermes(), "<tool_call><tool_call>", [("f", "{}")]),
        ('{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(HERMES, [text]) == (content, calls, True)
    assert read(HERMES, list(text)) == (content, calls, True)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hi", "hi", []), (" {x}", " {x}", []), ("{", "{", []),
        ('{"name": "f", "parameters": {"a": "x"}}', "", [("f", '{"a": "x"}')]),
        ('\n<|python_tag|>{"name": "f", "parameters": {"a": "x"}}', "", [("f", '{"a": "x"}')]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"name": "get_time", "parameters": {}}', "", [("f", "{}"), ("get_time", "{}")]),
        ('So: <|python_tag|>{"name": "f", "parameters": {}}', "So:", [("f", "{}")]),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
        ('{"answer": {"name": "f", "parameters": {}}}', '{"answer": {"name": "f", "parameters": {}}}', []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "f", "age": 3}', "", [("f", "{}")]),
        ('<|python_tag|>f.call(x="y")', '<|python_tag|>f.call(x="y")', []),
        ("{}", "{}", []), ("{ }", "{ }", []),
    ],
)  # fmt: skip
def test_llama(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(LLAMA, [text]) == (content, calls, True)
    assert read(LLAMA, list(text)) == (content, calls, True)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "", '{"a": "x'),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\\', "", '{"a": "x\\'),
        ('<tool_call>{"name": "f", "arguments": {"a": [</tool_call>so', "so", '{"a": ['),
        ('<tool_call>{"name": "f", "arguments": {"a": <b>}}', "<b>}}", '{"a": '),
    ],
)
def test_arguments_that_break_off(text: str, content: str, arguments: str) -> None:
    """What was sent of a call cannot be taken back: it has what the model wrote, and is not called whole."""
    assert read(HERMES, [text]) == read(HERMES, list(text)) == (content, [("f", arguments)], False)


def test_one_call_alone() -> None:
    single = Tools("hermes", ("f",), single=True)
    text = hermes() + "\n" + hermes() + "\n"
    assert read(single, [text]) == read(single, list(text)) == ("\n" + hermes() + "\n", [("f", "{}")], True)
    assert read(single, [hermes() + " \n"]) == ("", [("f", "{}")], True)
    array = '<tool_call>[{"name":"f","arguments":{}},{"name":"f","arguments":{}}]</tool_call>'
    assert read(single, [array])[1] == [("f", "{}")]


PIECES = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", '{"name": "f", "arguments": ', '{"name": "', "f", '"',
    '", "arguments": ', '{"a": "', "\\", '"}', "}", "{", "[", "]", ",", ";", "x", "<", "<|python_tag|>", "{}",
    '{"arguments": {"b": 2}, "name": "get_time"}', '"parameters": ', '{"type": "function", ', "é", " " * (MAX_SPACE - 3),
    '{"name": "f", "parameters": {"q": [1, "}"]}}',
]  # fmt: skip
TOOLS = st.builds(Tools, st.sampled_from(["hermes", "llama"]), st.just(("f", "get_time")), st.booleans())


@given(TOOLS, st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.lists(st.integers(0, 400)))
def test_any_cut_gives_the_same(tools: Tools, text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = read(tools, [text])
    assert read(tools, [text[a:b] for a, b in pairwise(edges)]) == whole
    assert read(tools, list(text)) == whole


@given(TOOLS, st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_no_text_is_lost(tools: Tools, text: str) -> None:
    """What is no call is content, in order; what is left out of it are calls, their wrapping and space."""
    content, calls, _ = read(tools, [text])
    rest = iter(text)
    assert all(character in rest for character in content)
    if not calls:
        assert content == text


ARGUMENTS = st.dictionaries(
    st.text(max_size=5), st.recursive(st.text(max_size=8) | st.integers(), st.lists), max_size=3
)


@given(
    st.lists(st.tuples(st.sampled_from(["f", "get_time"]), ARGUMENTS), min_size=1, max_size=3),
    st.text(alphabet="abé \n", max_size=9), st.booleans(), st.integers(1, 7),
)  # fmt: skip
def test_what_models_write_is_read(calls: list[tuple[str, Any]], said: str, ascii_: bool, step: int) -> None:
    text = said + "\n" + "\n".join(hermes(name, json.dumps(args, ensure_ascii=ascii_)) for name, args in calls)
    content, found, whole = read(HERMES, [text[a : a + step] for a in range(0, len(text), step)])
    assert (content.strip(), whole) == (said.strip(), True)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES)
    parser.feed('<tool_call>\n{"name": "f", "argum')
    assert [call.name for call in parser.feed('ents": {').calls] == ["f"]
    pieces = [parser.feed(piece).calls[0].arguments for piece in ('"city": "Pa', 'ris", "days', '": 3', "}")]
    assert pieces == ['"city": "Pa', 'ris", "days', '": 3', "}"]
    assert parser.feed("}\n</tool_call>").calls == [] and parser.flush().content == ""


def test_content_waits_no_longer_than_it_must() -> None:
    for tools in (HERMES, LLAMA):
        parser = CallParser(tools)
        assert [parser.feed(piece).content for piece in ("Hel", "lo <b", "> {", '"name"')] == [
            "Hel",
            "lo <b",
            "> {",
            '"name"',
        ]
    parser = CallParser(LLAMA)
    assert parser.feed('{"answer').content == '{"answer', "by its first key it is no call"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{" * 10_000, '<tool_call>{"arguments":' * 6000, '<tool_call>{"arguments":"' * 6000, " " * 100_000,
        '<tool_call>{"name":"f","arguments":' + "[" * 100_000, '<tool_call>{"name":"f","arguments":{"a":"' + "\\" * 100_000,
        '<tool_call>{"arguments":' + "{" * (MAX_WHOLE + 10), '<tool_call>{"type":"' + "x" * (MAX_HEAD + MAX_WHOLE),
        "<tool_call>" + hermes() * 5000, "<tool_" * 20_000,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_any_text_takes_time_by_its_length(text: str) -> None:
    """Ten times as long as any of them takes here."""
    began = time.process_time()
    read(HERMES, [text])
    read(HERMES, [text[a : a + 4] for a in range(0, len(text), 4)])
    assert time.process_time() - began < 10


def test_ids_tell_calls_apart() -> None:
    made = {call_id(job, choice, index) for job in ("a", "b") for choice in (0, 1, 11) for index in (0, 1, 11)}
    assert len(made) == 18 and call_id("a", 0, 0) == call_id("a", 0, 0)


@pytest.mark.parametrize(
    ("template", "form", "knows"),
    [
        (QWEN, "hermes", True), (LLAMA_31, "llama", True), (LLAMA_32, "llama", True), (SMOLLM2, "hermes", False),
        ("{{ tools }} [TOOL_CALLS]", "hermes", True), ("", "hermes", False),
    ],
)  # fmt: skip
def test_the_form_by_the_template(template: str, form: Form, knows: bool) -> None:
    assert (form_of(template), knows_tools(template)) == (form, knows)


@pytest.mark.parametrize("names", [(), ("a b",), ("f" * 65,), ("",), tuple(map(str, range(129)))])
def test_the_worker_looks_again(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Tools("hermes", names).check()


def test_messages_for_a_template_that_knows_no_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é"}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    told = plain(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
            {"role": "tool", "content": "1", "tool_call_id": "x"},
            {"role": "tool", "content": "2"},
        ],
        [tool],
    )
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n") and json.dumps(tool, ensure_ascii=False) in told[0]["content"]
    assert read(HERMES, [told[2]["content"]]) == ("Well.", [("f", '{"a": "é"}')] * 2, True), "written as it is read"
    assert told[3]["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert plain([{"role": "user", "content": "go"}], [tool])[0]["role"] == "system"
    messages = [{"role": "user", "content": "go"}]
    assert plain(messages, []) == messages
