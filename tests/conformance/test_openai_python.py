"""The official `openai` client for Python against the whole product: what its users write, works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
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


# -- files and batches


def requests_of(count: int, **body: Any) -> bytes:
    one = {"method": "POST", "url": "/v1/completions"}
    return b"".join(
        json.dumps(
            {"custom_id": f"request-{n}", **one, "body": {"model": SCRIPTED, "prompt": script(f"{n}"), **body}}
        ).encode()
        + b"\n"
        for n in range(count)
    )


def over(client: OpenAI, batch: Batch) -> Batch:
    def looked() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return wait_for(looked, 60, every=0.2)


def test_a_batch_from_file_to_results(strict: OpenAI) -> None:
    uploaded = strict.files.create(
        file=("requests.jsonl", requests_of(20)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert uploaded.filename == "requests.jsonl" and uploaded.bytes == len(requests_of(20))
    assert uploaded.expires_at == uploaded.created_at + 7200
    batch = strict.batches.create(
        input_file_id=uploaded.id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"run": "7"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 86_400
    batch = over(strict, batch)
    assert batch.status == "completed" and batch.metadata == {"run": "7"} and batch.model == SCRIPTED
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert batch.usage and batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    assert batch.error_file_id is None and batch.output_file_id
    results = [json.loads(line) for line in strict.files.content(batch.output_file_id).text.splitlines()]
    assert {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results} == {
        f"request-{n}": f"{n}" for n in range(20)
    }
    for result in results:
        check_completion(result["response"]["body"])
        assert result["response"]["status_code"] == 200 and result["error"] is None
    output = strict.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and output.expires_at
    assert 3590 < output.expires_at - output.created_at < 3660 + 60
    assert b"".join(strict.files.content(uploaded.id).iter_bytes()) == requests_of(20)
    for file_id in (uploaded.id, batch.output_file_id):
        assert strict.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            strict.files.retrieve(file_id)
    with pytest.raises(openai.NotFoundError):
        strict.files.content(batch.output_file_id)


def test_cancelling_a_batch(client: OpenAI, stack: Stack) -> None:
    uploaded = client.files.create(file=requests_of(5, prompt=endless(delay_ms=20)), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", 30)
    with pytest.raises(openai.ConflictError):
        client.with_options(max_retries=0).files.delete(uploaded.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = over(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.output_file_id is None and batch.error_file_id
    rows = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {row["error"]["code"] for row in rows} == {"batch_cancelled"} and len(rows) == 5
    wait_for(stack.idle, 20)


def test_lists_of_files_and_batches(client: OpenAI) -> None:
    made = [client.files.create(file=requests_of(1), purpose="batch").id for _ in range(5)]
    batches = [
        client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="1h").id
        for file_id in made
    ]
    requests = partial(client.files.list, purpose="batch")  # results of batches that end meanwhile are files too
    for listed, ids in ((requests, made), (client.batches.list, batches)):
        first = listed(limit=2)
        assert [item.id for item in first.data] == ids[::-1][:2] and first.has_more
        every = [item.id for item in listed(limit=2)]  # the client fetches page after page
        assert every[:5] == ids[::-1] and len(set(every)) == len(every)
    assert [f.id for f in client.files.list(order="asc", purpose="batch")][-5:] == made
    assert not [f for f in client.files.list(purpose="batch_output") if f.id in made]
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.list(after="batch_0")
    assert caught.value.param == "after"
    for batch_id in batches:
        wait_for(lambda batch_id=batch_id: client.batches.retrieve(batch_id).status == "completed", 60)


def test_a_file_that_is_no_batch(client: OpenAI) -> None:
    uploaded = client.files.create(file=requests_of(2) + b"{bad\n", purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    batch = over(client, batch)
    assert batch.status == "failed" and batch.errors and batch.errors.data
    assert (batch.errors.data[0].line, batch.errors.data[0].code) == (3, "invalid_json_line")
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=b"x", purpose="fine-tune")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-0", endpoint="/v1/completions", completion_window="24h")
