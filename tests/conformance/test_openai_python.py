"""The official `openai` client for Python against the whole product: what its users write, works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from tests.conftest import script, wait_for
from tests.contract.schemas import check_chunk, check_completion
from tests.stack import REAL, SCRIPTED, Stack, endless

STORY = "Once upon a time, there was a little girl"


class Counted:
    """Counts what the client really sends."""

    sent = 0

    def __call__(self, request: object) -> None:
        self.sent += 1


@pytest.fixture
def requests() -> Counted:
    return Counted()


@pytest.fixture
def client(stack: Stack, requests: Counted) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"http://127.0.0.1:{stack.port}/v1",
        api_key="none",
        timeout=60,
        http_client=openai.DefaultHttpxClient(event_hooks={"request": [requests]}),
    ) as client:
        yield client


@pytest.fixture
def strict(stack: Stack) -> Iterator[OpenAI]:
    """Refuses answers that do not fit its types. Not for streams: its type of a chunk allows no finish_reason null,
    which OpenAI's own streams have."""
    with OpenAI(
        base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", timeout=60, _strict_response_validation=True
    ) as client:
        yield client


def test_a_completion(strict: OpenAI, model: str) -> None:
    answer = strict.completions.create(model=model, prompt=STORY, max_tokens=5, temperature=0)
    check_completion(answer.model_dump(mode="json"))
    [choice] = answer.choices
    assert choice.text and choice.finish_reason == "length" and answer.model == model
    assert answer.usage and answer.usage.completion_tokens == 5


def test_a_stream(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "prompt": STORY, "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**fields)
    with client.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    for chunk in chunks:
        check_chunk(chunk.model_dump(mode="json"))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_fields_of_the_client_arrive(strict: OpenAI) -> None:
    answer = strict.completions.create(
        model=SCRIPTED,
        prompt=script("a", "b", "STOP", "c"),
        echo=True,
        stop=["STOP"],
        seed=3,
        logit_bias={"1": 1},
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        n=1,
        best_of=1,
        user="somebody",
        extra_body={"min_p": 0.1, "ignore_eos": False},
    )
    assert answer.choices[0].text == script("a", "b", "STOP", "c") + "ab"
    assert answer.choices[0].finish_reason == "stop"


def test_models(strict: OpenAI) -> None:
    assert {model.id for model in strict.models.list()} == {SCRIPTED, REAL}
    assert strict.models.retrieve(REAL).id == REAL


def test_a_wrong_field(client: OpenAI, requests: Counted, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    assert caught.value.type == "invalid_request_error" and caught.value.request_id
    assert "temperature" in caught.value.message
    assert requests.sent == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_too_many_tokens(client: OpenAI, requests: Counted, model: str, streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=STORY, max_tokens=32768, stream=streamed)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    assert requests.sent == 1, "no retries"


def test_a_model_that_does_not_exist(client: OpenAI, requests: Counted) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    assert requests.sent == 2


def test_an_endpoint_that_does_not_exist(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=SCRIPTED, input="x")


def test_what_is_not_served(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=SCRIPTED, prompt="x", extra_body={"dry_multiplier": 0.5})
    assert (caught.value.param, caught.value.code) == ("dry_multiplier", "unsupported_parameter")


def test_an_engine_that_fails(client: OpenAI) -> None:
    once = client.with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError) as caught:
        once.completions.create(model=SCRIPTED, prompt=script("a", error_after=0))
    assert caught.value.code == "internal_error"


def test_an_error_inside_a_stream_is_raised(client: OpenAI) -> None:
    stream = client.completions.create(model=SCRIPTED, prompt=script(*"abcd", delay_ms=120, error_after=3), stream=True)
    texts = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            texts += [choice.text for choice in chunk.choices]
    assert "".join(texts) == "abc" and caught.value.code == "internal_error"


def test_a_request_that_was_stopped_is_not_repeated(stack: Stack, client: OpenAI, requests: Counted) -> None:
    """The client repeats a 409 unless it is told not to. RQ's own command stops the job."""
    wait_for(stack.idle)
    with stack.store() as store, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.completions.create, model=SCRIPTED, prompt=endless(delay_ms=20))
        [job_id] = wait_for(
            lambda: [
                name.decode().removeprefix("rq:job:")
                for name in store.keys("rq:job:*")
                if store.hget(name, "status") == b"started"
            ]
        )
        send_stop_job_command(store, job_id, serializer=JSONSerializer)
        with pytest.raises(openai.ConflictError) as caught:
            waiting.result(20)
    assert caught.value.code == "cancelled"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert requests.sent == 1
    wait_for(stack.idle)


def test_with_raw_response(client: OpenAI, model: str) -> None:
    raw = client.completions.with_raw_response.create(
        model=model, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.headers["openai-processing-ms"].isdigit()
    answer = raw.parse()
    assert answer.id == raw.headers["x-sluice-id"]


def test_closing_the_stream_frees_the_lane(client: OpenAI, stack: Stack, model: str) -> None:
    wait_for(stack.idle)
    prompt = endless(delay_ms=20) if model == SCRIPTED else STORY
    stream = client.completions.create(model=model, prompt=prompt, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    wait_for(lambda: stack.busy(model) == 1)
    stream.close()
    wait_for(lambda: stack.busy(model) == 0, 1)
    wait_for(stack.idle)


def test_a_client_that_times_out_frees_the_lane(client: OpenAI, stack: Stack) -> None:
    wait_for(stack.idle)
    impatient = client.with_options(timeout=0.5, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=SCRIPTED, prompt=endless(delay_ms=20))
    wait_for(stack.idle, 2)


async def _many(port: int) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60) as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(
                model=SCRIPTED, prompt=script(f"{number} ", "a", "b", delay_ms=5), stream=True
            )
            return "".join([choice.text async for chunk in stream for choice in chunk.choices])

        return list(await asyncio.gather(*(one(number) for number in range(40))))


def test_the_asynchronous_client(stack: Stack) -> None:
    assert asyncio.run(_many(stack.port)) == [f"{number} ab" for number in range(40)]
