"""Chats with the official `openai` client for Python, which here refuses every answer that does not fit its types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel, Field

from tests.conftest import script, wait_for
from tests.contract.schemas import check_chunk, check_completion
from tests.stack import REAL, SCRIPTED, Stack, endless

TALK: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "You answer briefly."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the capital of "}, {"type": "text", "text": "France?"}],
    },
]
THOUGHT = script("<thi", "nk>why ", "not</think>", "\n\nso", " it is", delay_ms=10)


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", timeout=60, _strict_response_validation=True
    ) as client:
        yield client


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_an_answer(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=TALK, max_completion_tokens=5, temperature=0)
    check_completion(answer.model_dump(mode="json", exclude_unset=True))
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 5 and answer.usage.completion_tokens_details
    assert answer.usage.prompt_tokens_details and answer.id.startswith("chatcmpl-")


def test_a_stream(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "messages": TALK, "max_tokens": 6, "temperature": 0}
    plain = client.chat.completions.create(**fields)
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    for chunk in chunks:
        check_chunk(chunk.model_dump(mode="json", exclude_unset=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage and plain.usage
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_clients_own_accumulator(client: OpenAI, model: str) -> None:
    """`stream()` puts the chunks together itself, and knows when a choice is done."""
    fields: dict[str, Any] = {"model": model, "messages": said("Say hi."), "temperature": 0, "logprobs": True}
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    assert final.choices[0].finish_reason == "stop"
    kept = final.choices[0].logprobs
    assert kept and kept.content
    plain = client.chat.completions.create(**fields)
    if model != REAL:  # whose numbers depend a little on what of the prompt is there already
        assert final.choices[0].message.content == plain.choices[0].message.content
        assert plain.usage and len(kept.content) == plain.usage.completion_tokens


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=REAL, messages=TALK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 4
        for entry in choice.logprobs.content:
            assert (
                len(entry.top_logprobs) == 2 and entry.logprob <= 0 and bytes(entry.bytes or ()).decode() == entry.token
            )


def test_reasoning(client: OpenAI) -> None:
    """Where the clients of thinking models look for it."""
    answer = client.chat.completions.create(model=SCRIPTED, messages=said(THOUGHT))
    message = answer.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == ("so it is", "why not")
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    stream = client.chat.completions.create(model=SCRIPTED, messages=said(THOUGHT), stream=True)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why not"
    assert "".join(delta.content or "" for delta in deltas) == "so it is"


def test_the_fields_of_the_client_arrive(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SCRIPTED,
        messages=[
            *said("earlier"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            {"role": "user", "name": "bob", "content": script("a", "b", "STOP", "c")},
        ],
        stop=["STOP"],
        seed=3,
        logit_bias={"1": 1},
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        user="somebody",
        metadata={"a": "b"},
        reasoning_effort="low",
        modalities=["text"],
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        store=True,
        service_tier="auto",
        response_format={"type": "text"},
        extra_body={"min_p": 0.1},
    )
    assert answer.choices[0].message.content == "ab" and answer.choices[0].finish_reason == "stop"


def test_errors(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=TALK, temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=TALK, max_completion_tokens=10**6)
    assert (caught.value.param, caught.value.code) == ("max_completion_tokens", "context_length_exceeded")
    image: Any = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": image}])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=TALK)


def test_an_error_inside_a_stream_is_raised(client: OpenAI) -> None:
    broken = said(script(*"abcd", delay_ms=120, error_after=3))
    stream = client.chat.completions.create(model=SCRIPTED, messages=broken, stream=True)
    texts = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            texts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(texts) == "abc" and caught.value.code == "internal_error"


def test_a_stored_answer_can_be_retrieved(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=SCRIPTED, messages=said(script("a")))
    again = client.chat.completions.retrieve(answer.id)
    assert again.choices == answer.choices and again.usage == answer.usage


def test_closing_the_stream_frees_the_lane(client: OpenAI, stack: Stack) -> None:
    wait_for(stack.idle)
    stream = client.chat.completions.create(model=SCRIPTED, messages=said(endless(delay_ms=20)), stream=True)
    next(iter(stream))
    wait_for(lambda: stack.busy() == 1)
    stream.close()
    wait_for(stack.idle, 5)


async def _many(port: int) -> list[str]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, _strict_response_validation=True
    ) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model=SCRIPTED, messages=said(script(f"{number} ", "a", "b", delay_ms=5)), stream=True
            )
            return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

        return list(await asyncio.gather(*(one(number) for number in range(30))))


def test_the_asynchronous_client(stack: Stack) -> None:
    assert asyncio.run(_many(stack.port)) == [f"{number} ab" for number in range(30)]


WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: ChatCompletionToolParam = {"type": "function", "function": {"name": "get_time"}}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calling(*texts: str) -> str:
    """A script that writes these texts in small pieces."""
    whole = "\n".join(texts)
    return script(*(whole[a : a + 7] for a in range(0, len(whole), 7)), delay_ms=5)


def test_calls_of_tools(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SCRIPTED,
        messages=said(calling("I look.", call_of("get_weather", city="Paris"), call_of("get_time"))),
        tools=[WEATHER, TIME],
        tool_choice="auto",
        parallel_tool_calls=True,
    )
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" for call in calls) and len({call.id for call in calls}) == 2
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]
    answer = client.chat.completions.create(
        model=SCRIPTED, messages=said(calling(call_of("get_time"))), tools=[TIME], tool_choice="none"
    )
    assert answer.choices[0].message.content == call_of("get_time") and not answer.choices[0].message.tool_calls


def test_streamed_calls_of_tools(client: OpenAI) -> None:
    """By hand, and as the client's own accumulator puts them together."""
    fields: dict[str, Any] = {
        "model": SCRIPTED,
        "messages": said(calling(call_of("get_weather", city="Paris"), call_of("get_weather", city="Rome"))),
        "tools": [WEATHER],
    }
    chunks = list(client.chat.completions.create(**fields, stream=True))
    deltas = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()]
    names = [delta.function.name for delta in deltas if delta.function and delta.function.name]
    assert names == ["get_weather"] * 2 and chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len([delta for delta in deltas if delta.index == 0]) > 2, "arguments come as they are written"
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"city": "Paris"}', '{"city": "Rome"}']


class Place(BaseModel):
    """Where somebody is."""

    city: str = Field(max_length=20)
    country: Literal["France", "Italy"]


def test_a_pydantic_model_is_a_tool(client: OpenAI) -> None:
    """Its schema holds the arguments of a call that has to come, and `parse()` finds the object there."""
    answer = client.chat.completions.parse(
        model=REAL,
        messages=said("Ann is in Paris."),
        tools=[openai.pydantic_function_tool(Place)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    [choice] = answer.choices
    [call] = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, Place)


def test_a_pydantic_model_is_an_answer(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": REAL, "messages": said("Ann is in Paris."), "response_format": Place, "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    parsed = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, Place)
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_a_tool_and_answers(client: OpenAI, streamed: bool) -> None:
    """The loop of an agent: call, result, answer. (The scripted model's answer is what the tool returns.)"""
    messages: list[Any] = said(calling(call_of("get_weather", city="Paris")))
    results = {"Paris": script("It is ", "sunny."), "Rome": "rain"}
    for _ in range(3):
        fields: dict[str, Any] = {"model": SCRIPTED, "messages": messages, "tools": [WEATHER]}
        if streamed:
            with client.chat.completions.stream(**fields) as stream:
                [choice] = stream.get_final_completion().choices
        else:
            [choice] = client.chat.completions.create(**fields).choices
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[city]})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[-1]["content"] == "It is sunny."


def test_the_carried_model_is_told_of_tools(client: OpenAI) -> None:
    """Its template knows none: it reads of them in its system message, and of calls and results in the turns."""
    fields: dict[str, Any] = {"model": REAL, "max_tokens": 1, "temperature": 0}
    plain = client.chat.completions.create(**fields, messages=said("Weather in Paris?"))
    told = client.chat.completions.create(**fields, messages=said("Weather in Paris?"), tools=[WEATHER])
    turns: list[Any] = [
        *said("Weather in Paris?"),
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answered = client.chat.completions.create(**fields, messages=turns, tools=[WEATHER])
    sizes = [answer.usage.prompt_tokens for answer in (plain, told, answered) if answer.usage]
    assert sizes[0] + 50 < sizes[1] < sizes[2] - 20
