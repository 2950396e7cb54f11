"""Every endpoint's raw bytes, compared with transcripts in `golden/`: what a client's HTTP library is given.

What differs from run to run (ids, times, dates, names of processes) is masked by as many `*`; chunked bodies are
joined, because where the server cuts them is a matter of timing. `pytest tests/contract/test_golden.py --update-golden`
writes the transcripts anew; the diff of the commit then says what clients will see.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.schemas import answers, batch_answers, chat_answers
from shared import keys
from shared.api_keys import Key, digest
from tests import batches
from tests.conftest import needs_jsonschema, script, wait_for
from tests.contract import schemas
from tests.stack import CHATS, SCRIPTED, Stack, endless, said

GOLDEN = Path(__file__).parent / "golden"

#: Apart enough for each piece to be an event of its own.
SLOW = 60
STREAMED = {"model": SCRIPTED, "prompt": script("Hel", "lo", delay_ms=SLOW), "stream": True}
PLAIN = {"model": SCRIPTED, "prompt": script("Hel", "lo")}
KEYED = {**PLAIN, "user": "golden"}
STRUCTURED = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": {"$ref": "#/nothing"}}}}
TOO_STRICT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}, "strict": True}}
#: Requests of before, whose ids are put in their places: one that ended, one that was cancelled in the queue, one whose log
#: is gone, a chat that ended.
ENDED, CANCELLED, EXPIRED, CHATTED = "<ended>", "<cancelled>", "<expired>", "<chatted>"
#: A file that was uploaded, its batch, and the files of its results; a batch that failed.
FILE, BATCH, OUTPUT, ERRORS, FAILED = "<file>", "<batch>", "<output>", "<errors>", "<failed>"
UPLOAD = {"Content_Type": f"multipart/form-data; boundary={batches.BOUNDARY}"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLING = script(
    "I look.\n",
    '<tool_call>{"name": "get_weather", "arguments": {',
    '"city": "Pa',
    'ris"}',
    "}</tool_call>",
    delay_ms=SLOW,
)
FAILING = script("a", "b", delay_ms=SLOW, start_delay_ms=400, error_after=1)


def request(method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> bytes:
    """A request as bytes; the server closes behind the answer."""
    content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    sent = {"Host": "localhost", "Connection": "close", "X-Request-Id": "golden", "Content-Type": "application/json"}
    if method in ("POST", "PUT"):
        sent["Content-Length"] = str(len(content))
    else:
        del sent["Content-Type"]
    sent.update({name.replace("_", "-"): value for name, value in headers.items()})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value), "", ""]
    return "\r\n".join(lines).encode() + content


def completion(**fields: Any) -> bytes:
    return request("POST", "/v1/completions", fields)


def chat(content: Any, **fields: Any) -> bytes:
    return request("POST", CHATS, {"model": SCRIPTED, "messages": said(content), **fields})


def keyed(key: str, **fields: Any) -> bytes:
    return request("POST", "/v1/completions", fields, Authorization=f"Bearer {key}")


#: Secret -> what a server with keys knows of it.
KEYS = {
    "sk-golden-full": Key("key-full", tenant="acme", requests=1000, tokens=100_000, concurrent=2),
    "sk-golden-used-up": Key("key-used-up", requests=1, tokens=100),
    "sk-golden-tokenizer": Key("key-tokenizer", scopes=("tokenize",)),
    "sk-golden-revoked": Key("key-revoked", revoked=1),
}
#: Those that go to the server with keys.
LOCKED = {
    "error-401-no-key": completion(**PLAIN),
    "error-401-wrong-key": request("GET", "/v1/models", x_api_key="sk-golden-wrong"),
    "error-401-revoked-key": keyed("sk-golden-revoked", **PLAIN),
    "error-401-path": request("DELETE", "/v1/nothing"),
    "error-403-scope": keyed("sk-golden-tokenizer", **PLAIN),
    "error-429-requests": keyed("sk-golden-used-up", **PLAIN),
    "error-403-chat-scope": request(
        "POST", CHATS, {"model": SCRIPTED, "messages": said("x")}, Authorization="Bearer sk-golden-tokenizer"
    ),
    "chat-limits": request(
        "POST",
        CHATS,
        {"model": SCRIPTED, "messages": said("x"), "max_tokens": 9},
        Authorization="Bearer sk-golden-full",
    ),
    "completion-limits": keyed("sk-golden-full", **PLAIN, max_tokens=50),
    "stream-limits": keyed("sk-golden-full", **STREAMED, max_tokens=50),
}

THINKING = script("<think>", "why", "</think>", "so", delay_ms=SLOW)

#: Name of the transcript -> the request.
REQUESTS = {
    **LOCKED,
    "completion": completion(**PLAIN),
    "completion-all-fields": completion(
        **{**PLAIN, "prompt": [script("a", "b"), script("c")]}, n=2, logprobs=2, echo=True, max_tokens=2, unknown=1
    ),
    "completion-stop": completion(**PLAIN, stop=["llo"]),
    "completion-scored": completion(model=SCRIPTED, prompt="two words", echo=True, logprobs=1, max_tokens=0),
    "completion-token-ids": completion(model=SCRIPTED, prompt=[104, 105], return_tokens_as_token_ids=True, logprobs=0),
    "completion-fitted": completion(**PLAIN, max_tokens=10**9, fit_max_tokens=True),
    "completion-structured": completion(**{**PLAIN, "prompt": script('{"a":', "1}")}, response_format=STRUCTURED),
    "stream-structured": completion(**{**STREAMED, "prompt": script('{"a":', "1}")}, response_format=STRUCTURED),
    "stream-structured-fails": completion(**STREAMED, response_format=STRUCTURED),
    "error-502-structured": completion(**PLAIN, response_format=STRUCTURED),
    "error-400-schema": completion(**PLAIN, response_format=NO_SCHEMA),
    "error-400-strict": completion(**PLAIN, response_format=TOO_STRICT),
    "stream": completion(**STREAMED),
    "stream-usage": completion(**STREAMED, stream_options={"include_usage": True}),
    "stream-no-usage": completion(**STREAMED, stream_options={"include_usage": False}),
    "stream-running-usage": completion(**STREAMED, stream_options={"continuous_usage_stats": True}),
    "stream-echo-logprobs": completion(**STREAMED, echo=True, logprobs=1),
    "stream-length": completion(**STREAMED, max_tokens=1),
    "stream-fails-late": completion(model=SCRIPTED, prompt=FAILING, stream=True),
    "stream-fails-before-it-begins": completion(model=SCRIPTED, prompt='{"pieces": 1}', stream=True),
    "stream-resumed": request("GET", f"/v1/completions/{ENDED}?stream=true&starting_after=3"),
    "stream-resumed-at-its-end": request("GET", f"/v1/completions/{ENDED}?stream=true&starting_after=7"),
    "completion-background": completion(model=SCRIPTED, prompt=script("a", start_delay_ms=500), background=True),
    "completion-same-key": request("POST", "/v1/completions", KEYED, Idempotency_Key="golden"),
    "job": request("GET", f"/v1/completions/{ENDED}"),
    "job-head": request("HEAD", f"/v1/completions/{ENDED}"),
    "job-cancelled": request("POST", f"/v1/completions/{CANCELLED}/cancel"),
    "error-400-cursor": request("GET", f"/v1/completions/{ENDED}?stream=true", Last_Event_ID="x"),
    "error-400-grace": request("POST", "/v1/completions", PLAIN, X_Resume_Grace="soon"),
    "error-404-job": request("GET", "/v1/completions/cmpl-none"),
    "error-409-key": request("POST", "/v1/completions", PLAIN, Idempotency_Key="golden"),
    "error-410-stream": request("GET", f"/v1/completions/{EXPIRED}?stream=true"),
    "chat": chat(script("Hel", "lo")),
    "chat-all-fields": chat(script("a", "b"), n=2, logprobs=True, top_logprobs=1, max_completion_tokens=2, prompt="x"),
    "chat-reasoning": chat(THINKING, enable_thinking=True),
    "chat-stream": chat(script("Hel", "lo", delay_ms=SLOW), stream=True),
    "chat-stream-usage": chat(script("Hel", "lo", delay_ms=SLOW), stream=True, stream_options={"include_usage": True}),
    "chat-stream-reasoning": chat(THINKING, stream=True),
    "chat-stream-logprobs": chat(THINKING, stream=True, logprobs=True),
    "chat-stream-fails-late": chat(FAILING, stream=True),
    "chat-stream-resumed": request("GET", f"{CHATS}/{CHATTED}?stream=true&starting_after=3"),
    "chat-tools": chat(CALLING, tools=[WEATHER]),
    "chat-stream-tools": chat(CALLING, tools=[WEATHER], stream=True),
    "error-400-chat-tools": chat("x", tools=[{"type": "function", "function": {"name": "get weather"}}]),
    "chat-background": chat(script("a", start_delay_ms=500), background=True),
    "chat-job": request("GET", f"{CHATS}/{CHATTED}"),
    "error-400-chat-image": chat([{"type": "image_url", "image_url": {"url": "x"}}]),
    "error-400-chat-functions": chat("x", functions=[{"name": "f"}]),
    "error-400-chat-template": chat("x", chat_template="{{ messages }}"),
    "error-400-chat-messages": request("POST", CHATS, {"model": SCRIPTED}),
    "error-404-chat-job": request("GET", f"{CHATS}/{ENDED}"),
    "error-500-chat-engine": chat(script("a", "b", error_after=1)),
    "file-upload": request("POST", "/v1/files", raw=batches.form(b"x\n", "../a.jsonl", purpose="batch"), **UPLOAD),
    "file": request("GET", f"/v1/files/{FILE}"),
    "file-content": request("GET", f"/v1/files/{FILE}/content"),
    "file-output": request("GET", f"/v1/files/{OUTPUT}"),
    "file-output-content": request("GET", f"/v1/files/{OUTPUT}/content"),
    "file-errors-content": request("GET", f"/v1/files/{ERRORS}/content"),
    "files": request("GET", "/v1/files?order=asc&limit=1"),
    "file-deleted": request("DELETE", f"/v1/files/{ERRORS}"),
    "batch": request("GET", f"/v1/batches/{BATCH}"),
    "batch-failed": request("GET", f"/v1/batches/{FAILED}"),
    "batch-cancelled-late": request("POST", f"/v1/batches/{BATCH}/cancel"),
    "batches": request("GET", f"/v1/batches?limit=1&after={BATCH}"),
    "error-400-file": request("POST", "/v1/files", raw=batches.form(b"x", purpose="vision"), **UPLOAD),
    "error-400-batch": request(
        "POST",
        "/v1/batches",
        {"input_file_id": FILE, "endpoint": "/v1/completions", "completion_window": "2 days"},
    ),
    "error-400-replay": request("POST", f"/v1/batches/{FAILED}/replay"),
    "error-404-file": request("GET", "/v1/files/file-0"),
    "error-404-batch": request("GET", "/v1/batches/batch_0"),
    "tokenize": request("POST", "/tokenize", {"model": SCRIPTED, "prompt": "ä<|300|>", "return_token_strs": True}),
    "tokenize-messages": request(
        "POST", "/v1/tokenize", {"model": SCRIPTED, "messages": [{"role": "user", "content": "hi"}]}
    ),
    "detokenize": request("POST", "/detokenize", {"model": SCRIPTED, "tokens": [195, 164, 300]}),
    "tokenizer-info": request("GET", f"/tokenizer_info?model={SCRIPTED}"),
    "error-400-tokenize": request("POST", "/tokenize", {"model": SCRIPTED, "prompt": "x", "messages": []}),
    "error-404-detokenize-model": request("POST", "/detokenize", {"model": "none", "tokens": [1]}),
    "error-400-field": completion(**PLAIN, temperature=3),
    "error-400-context": completion(**PLAIN, max_tokens=10**9),
    "error-400-unsupported": completion(**PLAIN, dry_multiplier=1),
    "error-400-json": request("POST", "/v1/completions", raw=b'{"prompt": NaN}'),
    "error-403-host": request("GET", "/v1/models", Host="example.com"),
    "error-404-model": completion(model="none", prompt="x"),
    "error-404-path": request("GET", "/v1/nothing"),
    "error-405": request("GET", "/v1/completions"),
    "error-413": request("POST", "/v1/completions", raw=b"", Content_Length="99999999"),
    "error-415": request("POST", "/v1/completions", raw=b"prompt=x", Content_Type="text/plain"),
    "error-500-engine": completion(model=SCRIPTED, prompt=script("a", "b", error_after=1)),
    "options": request("OPTIONS", "/v1/completions"),
    "models": request("GET", "/v1/models"),
    "model": request("GET", f"/v1/models/{SCRIPTED}"),
    "model-head": request("HEAD", f"/v1/models/{SCRIPTED}"),
    "model-unknown": request("GET", "/v1/models/some/model"),
    "health": request("GET", "/health"),
    "ready": request("GET", "/ready"),
    "status": request("GET", "/v1/status"),
    "openapi": request("GET", "/openapi.json"),
    "docs": request("GET", "/docs"),
    "playground": request("GET", "/"),
    "page-file": request("GET", "/web/icon.svg"),
    # last: it leaves a queue of batch work in the status
    "error-429-queue": completion(**PLAIN, service_tier="flex"),
}

#: Their bodies have tests of their own and change with every field.
HEAD_ONLY = {"openapi", "docs", "playground", "page-file"}

_MASKED = [
    re.compile(pattern)
    for pattern in (
        rb"cmpl-([0-9A-Za-z]+)",
        rb'"created":([0-9]+)',
        rb'_at":([0-9]+)',
        rb"file-([0-9a-f]{32})",
        rb"batch_(?:req_)?([0-9a-f]{32})",
        rb'"call_([0-9a-f]+)"',
        rb"\r\nDate: ([^\r]+)",
        rb'(?<!"function":\{)"name":"([^"]+)"',
        rb"\r\nServer: ([^\r]+)",
    )
]
#: Masked by one `*`: their length differs too.
_VARYING = [
    re.compile(pattern)
    for pattern in (
        rb"\r\nopenai-processing-ms: ([0-9]+)",
        rb"\r\nx-ratelimit-reset-[a-z]+: ([0-9.ms]+)",
        rb"\r\nx-ratelimit-remaining-[a-z]+: ([0-9]+)",
        rb'"tokens_per_second":([0-9.]+)',
        rb'_ms":([0-9.]+)',
        rb'"status":"(queued|running)"',
        rb'"queue_position":(1|null)',
        rb"(?:\A|\n)id: ([0-9]+-[0-9]+)",
    )
]
#: The wait that is told there is drawn.
DRAWN = {"error-429-queue"}
#: What this may change the length of.
VARYING_LENGTH = {
    "openapi",
    "docs",
    "playground",
    "page-file",
    "status",
    "job",
    "job-head",
    "completion-background",
    "chat-job",
    "chat-background",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("golden"), (SCRIPTED,), max_waiting_batch=1) as served:
        yield served


@contextlib.contextmanager
def state_for(name: str, served: Stack) -> Iterator[None]:
    """What has to be the case for a transcript: for the refusal of a full queue, all lanes taken and one waiting."""
    if name != "error-429-queue":
        yield
        return
    with served.open(endless(delay_ms=50), n=64) as running:
        running.goes_on()
        with served.open(script("x"), service_tier="flex"):
            yield
    wait_for(served.idle)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One with API keys."""
    with Stack(tmp_path_factory.mktemp("locked"), (SCRIPTED,)) as locked, locked.store() as store:
        for secret, key in KEYS.items():
            store.hset(keys.KEYS, digest(secret), msgspec.json.encode(key).decode())
        store.hset(
            "sluice:limit:key-used-up", mapping={"requests": "-10", "tokens": "100", "at": int(time.time() * 1000)}
        )
        store.set(keys.KEYS_VERSION, "golden")
        wait_for(lambda: locked.call("GET", "/v1/models").status == 401)
        yield locked


@pytest.fixture
def port(request: pytest.FixtureRequest, name: str) -> int:
    """Of the server that a transcript's request goes to."""
    stack: Stack = request.getfixturevalue("locked" if name in LOCKED else "served")
    return stack.port


@pytest.fixture(scope="module")
def earlier(served: Stack) -> dict[bytes, bytes]:
    """Place -> id."""
    ended, expired = (served.complete(PLAIN["prompt"]).json["id"] for _ in range(2))
    chatted = served.complete(said(THINKING)).json["id"]
    served.call("POST", "/v1/completions", KEYED, headers={"Idempotency-Key": "golden"})
    with served.store() as store:
        wait_for(lambda: all(store.exists(keys.results(job_id)) for job_id in (ended, expired, chatted)))
        store.delete(keys.log(expired))
    [lanes] = [worker["lanes"] for worker in served.status()["workers"]]
    running = [served.open(endless(delay_ms=20)).goes_on(1) for _ in range(lanes)]
    cancelled = served.complete("x", background=True).json["id"]
    served.cancel(cancelled)
    for stream in running:
        stream.leave()
    wait_for(served.idle)
    failed = batches.ran(served, b"[]\n" + batches.line("a", url="/v1/chat/completions"))
    batch = batches.ran(served, batches.line("a") + batches.line("b", temperature=3), metadata={"run": "7"})
    places = {
        ENDED: ended,
        CANCELLED: cancelled,
        EXPIRED: expired,
        CHATTED: chatted,
        FILE: batch["input_file_id"],
        BATCH: batch["id"],
        OUTPUT: batch["output_file_id"],
        ERRORS: batch["error_file_id"],
        FAILED: failed["id"],
    }
    return {place.encode(): job_id.encode() for place, job_id in places.items()}


def sent_for(name: str, earlier: dict[bytes, bytes]) -> bytes:
    sent = REQUESTS[name]
    for place, job_id in earlier.items():
        sent = sent.replace(place, job_id)
    return sent


def exchange(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


def joined(head: bytes, body: bytes) -> bytes:
    """The body without the framing of its chunks."""
    if b"\r\ntransfer-encoding: chunked" not in head.lower():
        return body
    pieces = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n"
        if length == 0:
            assert body == b"\r\n", "nothing after the last chunk"
            return b"".join(pieces)
        pieces.append(body[:length])
        body = body[length + 2 :]


def masked(received: bytes) -> bytes:
    for pattern in (*_MASKED, *_VARYING):
        received = pattern.sub(_stars, received)
    return received


def _stars(match: re.Match[bytes]) -> bytes:
    stars = b"*" if match.re in _VARYING else b"*" * len(match[1])
    begin, end = match.start(1) - match.start(), match.end(1) - match.start()
    return match[0][:begin] + stars + match[0][end:]


def transcript(name: str, received: bytes) -> bytes:
    """Request and answer, as kept. Carriage returns are shown as `\\r`, so that the files survive editors and git."""
    head, _, body = received.partition(b"\r\n\r\n")
    body = joined(head, body)
    if name in VARYING_LENGTH:
        head = re.sub(rb"\r\nContent-Length: [0-9]+", b"\r\nContent-Length: *", head)
    if name in DRAWN:
        head = re.sub(rb"\r\n(Retry-After|retry-after-ms): [0-9]+", rb"\r\n\1: *", head)
    if name in HEAD_ONLY:
        head = re.sub(rb'\r\nETag: "[0-9a-f]+"', b"\r\nETag: *", head)
        body = b"(the body has tests of its own)\n"
    sent = re.sub(rb"\r\n", b"\\\\r\n", REQUESTS[name])
    return sent + b"\n----\n" + masked(head + b"\r\n\r\n" + body).replace(b"\r\n", b"\\r\n")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_bytes_are_those_of_the_transcript(
    served: Stack, port: int, earlier: dict[bytes, bytes], name: str, update_golden: bool
) -> None:
    if name == "status":
        wait_for(lambda: served.idle() and all(w["free"] == w["lanes"] for w in served.status()["workers"]))
    with state_for(name, served):
        received = transcript(name, exchange(port, sent_for(name, earlier)))
    file = GOLDEN / f"{name}.txt"
    if update_golden:
        file.write_bytes(received)
    assert received.decode() == file.read_bytes().decode()


def test_there_is_no_transcript_of_nothing() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(REQUESTS)


# -- the transcripts, and so the wire, against the schemas: those of the tests and those of the document

_BOTH = {
    "completion": answers.Completion,
    "completion_chunk": answers.CompletionChunk,
    "chat_completion": chat_answers.ChatCompletion,
    "chat_chunk": chat_answers.ChatCompletionChunk,
    "error": answers.ErrorAnswer,
}
_OTHERS = {
    "completion-background": answers.CompletionJob,
    "chat-background": chat_answers.ChatJob,
    "chat-job": chat_answers.ChatJob,
    "job": answers.CompletionJob,
    "job-cancelled": answers.CompletionJob,
    "models": answers.ModelList,
    "model": answers.Model,
    "health": answers.Health,
    "ready": answers.Readiness,
    "status": answers.Status,
    "tokenize": answers.Tokenized,
    "tokenize-messages": answers.Tokenized,
    "detokenize": answers.Detokenized,
    "tokenizer-info": answers.TokenizerInfo,
    "file-upload": batch_answers.FileObject,
    "file": batch_answers.FileObject,
    "file-output": batch_answers.FileObject,
    "files": batch_answers.FileList,
    "file-deleted": batch_answers.FileDeleted,
    "batch": batch_answers.Batch,
    "batch-failed": batch_answers.Batch,
    "batch-cancelled-late": batch_answers.Batch,
    "batches": batch_answers.BatchList,
}


def check(kind: str, value: Any) -> None:
    schemas.check(f"{kind}.json", value)
    _BOTH[kind].model_validate(value)


@needs_jsonschema
@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - HEAD_ONLY))
def test_answers_have_the_shape_that_is_described(
    name: str, port: int, served: Stack, earlier: dict[bytes, bytes]
) -> None:
    with state_for(name, served):
        received = exchange(port, sent_for(name, earlier))
    head, _, body = received.partition(b"\r\n\r\n")
    body = joined(head, body)
    if not body:
        return
    if b"text/event-stream" not in head:
        if b"octet-stream" in head:
            assert all(json.loads(line)["custom_id"] for line in body.split(b"\n")[:-1])
            return
        value = json.loads(body)
        if set(value) == {"error"}:
            check("error", value)
        elif name in _OTHERS:
            _OTHERS[name].model_validate(value)
        else:
            check("chat_completion" if name.startswith("chat") else "completion", value)
        return
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    for event in events:
        value = json.loads(event)
        chunk = "chat_chunk" if name.startswith("chat") else "completion_chunk"
        check("error" if "error" in value else chunk, value)
