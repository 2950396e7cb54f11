"""The request model of chats: types, ranges, nulls, messages, and what becomes of them in the job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.generation import Call, GenerationRequest
from api.schemas.messages import read_messages
from api.schemas.stream_options import StreamOptions
from shared import jobs
from shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from shared.jobs import Job, Placement
from shared.reasoning import Reasoning
from shared.settings import Settings
from tests.unit.test_schemas import CARD, NULLABLE, THINKING_OFF, VALUES, WRONG_VALUES

FUNCTION = {"type": "function", "function": {"name": "f"}}
SAID = [{"role": "user", "content": "hi"}]
#: Fields that only raw completions have, or have otherwise.
OTHERS = {"prompt", "suffix", "echo", "best_of", "logprobs", "add_special_tokens", "parse_special", "model"}


def call(body: dict[str, Any], **settings: Any) -> Call:
    request = ChatRequest.read({"messages": SAID, **body})
    request.read_messages()
    return request.to_call(CARD, Settings(**settings), created=7)


def job(settings: dict[str, Any] | None = None, **body: Any) -> Job:
    return call(body, **(settings or {})).job


def refused(body: dict[str, Any], **settings: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(body, **settings)
    assert caught.value.status == 400 and caught.value.message
    return caught.value


def test_the_sampling_fields_are_those_of_completions() -> None:
    """One model, mixed in: no field of it is written down twice."""
    shared = GenerationRequest.model_fields.keys()
    assert shared <= CompletionRequest.model_fields.keys() and shared <= ChatRequest.model_fields.keys()
    for name in shared:
        assert CompletionRequest.model_fields[name] is GenerationRequest.model_fields[name] or (
            CompletionRequest.model_fields[name].metadata == ChatRequest.model_fields[name].metadata
        )
    assert not {"suffix", "echo", "best_of", "prompt"} & ChatRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, value in WRONG_VALUES if field not in OTHERS]
    + [
        ("messages", {}), ("messages", "hi"), ("messages", []), ("messages", ["hi"]), ("messages", [{}]), ("messages", [5]),
        ("messages", [{"role": "wizard", "content": "x"}]), ("messages", [{"role": ["user"], "content": "x"}]),
        ("messages", [{"content": "x"}]), ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": {"type": "text", "text": "x"}}]),
        ("messages", [{"role": "user", "content": ["x"]}]), ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
        ("messages", [{"role": "user", "content": "x", "name": 5}]),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": 5}]),
        ("messages", [{"role": "assistant", "tool_calls": {}}]), ("messages", [{"role": "assistant", "tool_calls": [1]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]),
        ("messages", [{"role": "assistant", "reasoning_content": 5}]),
        ("max_completion_tokens", 1.5), ("max_completion_tokens", "10"), ("max_completion_tokens", True),
        ("logprobs", 5), ("logprobs", 0), ("logprobs", "true"), ("top_logprobs", 21), ("top_logprobs", -1),
        ("top_logprobs", True), ("top_logprobs", 1.0), ("top_logprobs", 3), ("modalities", ["text", "audio"]),
        ("modalities", "text"), ("metadata", "x"), ("verbosity", 1), ("prediction", "x"), ("prompt_cache_key", 5),
        ("safety_identifier", 5), ("tools", {}), ("tools", ["f"]), ("tools", [{"type": "retrieval"}]),
        ("tools", [{"type": "function", "function": {}}]), ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "f" * 65}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "description": 5}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2), ("tools", [FUNCTION] * 129),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]), ("tools", [5]), ("tools", [None]),
        ("tool_choice", "always"), ("tool_choice", 5), ("tool_choice", ["auto"]), ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("tool_choice", {"type": "function", "name": "f"}),
        ("tool_choice", {"type": "allowed_tools"}), ("parallel_tool_calls", "x"), ("n", 129),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    """FB-026, FB-039, FB-040, FB-067, as in completions."""
    error = refused({field: value})
    assert (error.param, error.code) == (field, "invalid_value")
    assert "pydantic" not in error.message and error.message.isprintable() and len(error.message) < 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", []), ("functions", [{"name": "f"}]), ("function_call", "none"), ("function_call", {"name": "f"}),
        ("chat_template", "{{ messages }}"), ("chat_template_kwargs", {"documents": []}), ("webhook_url", "https://x"),
        ("dry_multiplier", 1),
    ],
    ids=ascii,
)  # fmt: skip
def test_what_is_not_served_is_refused_and_named(field: str, value: Any) -> None:
    error = refused({field: value})
    assert isinstance(error, UnsupportedParameter) and error.param == field


CHAT_FIELDS = [
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "metadata",
    "verbosity",
    "prediction",
    "modalities",
    "prompt_cache_key",
    "safety_identifier",
]


def test_null_is_absent() -> None:
    """FB-025"""
    nulls = call({**dict.fromkeys([*NULLABLE, *CHAT_FIELDS]), "seed": 1}).job
    plain = call({"seed": 1}).job
    for name in Job.__struct_fields__:
        assert name == "id" or getattr(nulls, name) == getattr(plain, name)


def test_messages_must_be_there() -> None:
    for body in ({}, {"messages": None}):
        with pytest.raises(InvalidRequest) as caught:
            ChatRequest.read(body)
        assert caught.value.param == "messages"


def test_what_is_accepted_and_does_nothing() -> None:
    body = {
        "metadata": {"a": "b"}, "verbosity": "low", "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"], "prompt_cache_key": "k", "safety_identifier": "s", "store": True, "user": "u",
        "response_format": {"type": "text"}, "service_tier": "default", "parallel_tool_calls": False, "tools": [],
        "tool_choice": "auto",
    }  # fmt: skip
    assert ChatRequest.unknown({"messages": SAID, **body}) == []
    assert ChatRequest.unknown({"prompt": "x", "best_of": 2, "echo": True}) == ["prompt", "best_of", "echo"]
    assert call(body).job.params == job().params


def test_fields_reach_the_job() -> None:
    made = call({"n": 3, "stop": "a", "seed": 5, "top_p": 0.5, "logprobs": True, "top_logprobs": 4, "stream": True})
    assert (made.job.n, made.job.candidates, made.job.stop, made.job.seed) == (3, 3, ["a"], 5)
    assert made.job.params.top_p == 0.5 and made.job.kind == "chat" and made.job.id.startswith("chatcmpl-")
    assert (made.job.logprobs, made.stream, made.stream_options) == (4, True, StreamOptions())
    assert made.job.add_special is False, "a template writes its own BOS"
    assert (job(logprobs=True).logprobs, job(logprobs=False).logprobs, job(top_logprobs=0).logprobs) == (0, None, None)
    assert call({"service_tier": "flex", "priority": -1, "store": False}).placement == Placement(
        klass="batch", ahead=True, keep=False
    )
    assert refused({"n": 9}, max_choices=8).param == "n"


@pytest.mark.parametrize("value", [None, 0, -1])
def test_all_remaining_context(value: int | None) -> None:
    assert job(max_completion_tokens=value).max_tokens is None


def test_max_completion_tokens_wins() -> None:
    both = call({"max_completion_tokens": 5, "max_tokens": 7})
    assert (both.job.max_tokens, both.job.limit_field) == (5, "max_completion_tokens")
    assert job(max_completion_tokens=-1, max_tokens=7).max_tokens is None
    assert job(max_tokens=7).max_tokens == 7 and call({"max_tokens": 7}).job.limit_field == "max_tokens"
    error = refused({"max_completion_tokens": 10**300})
    assert isinstance(error, ContextLengthExceeded) and error.param == "max_completion_tokens"
    assert job({"default_max_tokens": 16}).max_tokens == 16
    fitted = call({"max_completion_tokens": 10**300, "fit_max_tokens": True})
    assert (fitted.job.max_tokens, fitted.fit_from) == (99, 10**300)


@pytest.mark.parametrize(("field", "value"), THINKING_OFF, ids=ascii)
def test_every_spelling_of_thinking_off(field: str, value: Any) -> None:
    assert ChatRequest.read({"messages": SAID, field: value}).thinking_switch() == (False, field)


def test_messages_as_templates_get_them() -> None:
    assert read_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "hi", "name": "bob", "reasoning_content": "x", "audio": {"id": 1}},
            {
                "role": "assistant", "content": None, "reasoning": "why", "refusal": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "ü"]}'}},
                    {"function": {"name": "g", "arguments": "{no json"}},
                    {"function": {"name": "h"}},
                ],
            },
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "assistant", "reasoning_content": "a", "reasoning": "b", "tool_calls": []},
        ]
    ) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "hi", "name": "bob"},
        {
            "role": "assistant", "content": "", "reasoning_content": "why",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "ü"]}}},
                {"type": "function", "function": {"name": "g", "arguments": "{no json"}},
                {"type": "function", "function": {"name": "h", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "reasoning_content": "a"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, '{"a":' * 500, "NaN", '{"a": NaN}', '{"a":1,"a":2}', "[]", "5", ""]
)
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    [read] = read_messages([message])
    assert read["tool_calls"][0]["function"]["arguments"] == (arguments or {})


def test_the_worker_looks_again() -> None:
    made = job()
    fields = {name: getattr(made, name) for name in Job.__struct_fields__}
    for wrong in (
        {"reasoning": Reasoning("", "x")}, {"reasoning": Reasoning("<a>", " ")}, {"reasoning": Reasoning("<" * 65, "x")},
        {"prompts": ["abc"], "cuts": (0,)}, {"prompts": ["abc"], "cuts": (3,)}, {"prompts": ["abc"], "cuts": (2, 1)},
        {"prompts": ["abc"], "cuts": (1, 1)}, {"prompts": [[1, 2]], "cuts": (1,)}, {"prompts": ["ab", "cd"], "cuts": (1,)},
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            Job(**{**fields, **wrong}).check()
    whole = Job(**{**fields, "prompts": ["abc"], "cuts": (1, 2), "reasoning": Reasoning("<a>", "</a>", True)})
    whole.check()
    assert jobs.from_rq(jobs.to_rq(whole)) == whole


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
        optional={"content": VALUES, "tool_calls": VALUES, "name": VALUES, "reasoning": VALUES},
    ),
    max_size=3,
)


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), VALUES), st.one_of(MESSAGES, VALUES))
def test_any_values_are_a_job_or_a_400(body: dict[str, Any], messages: Any) -> None:
    """FB-039: nothing a client sends is a 500."""
    try:
        made = call({**body, "messages": messages})
    except InvalidRequest as error:
        assert error.param in body or error.param == "messages"
    else:
        assert jobs.from_rq(jobs.to_rq(made.job)) == made.job
