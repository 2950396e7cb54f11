"""Every endpoint's raw bytes, compared with transcripts in `golden/`: what a client's HTTP library is given.

What differs from run to run (ids, times, dates, names of processes) is masked by as many `*`; chunked bodies are
joined, because where the server cuts them is a matter of timing. `pytest tests/contract/test_golden.py --update-golden`
writes the transcripts anew; the diff of the commit then says what clients will see.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from api.schemas import answers
from tests.conftest import script
from tests.stack import SCRIPTED, Stack

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = Path(__file__).parent / "schemas"

#: Apart enough for each piece to be an event of its own.
SLOW = 60
STREAMED = {"model": SCRIPTED, "prompt": script("Hel", "lo", delay_ms=SLOW), "stream": True}
PLAIN = {"model": SCRIPTED, "prompt": script("Hel", "lo")}
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


#: Name of the transcript -> the request.
REQUESTS = {
    "completion": completion(**PLAIN),
    "completion-all-fields": completion(
        **{**PLAIN, "prompt": [script("a", "b"), script("c")]}, n=2, logprobs=2, echo=True, max_tokens=2, unknown=1
    ),
    "completion-stop": completion(**PLAIN, stop=["llo"]),
    "completion-scored": completion(model=SCRIPTED, prompt="two words", echo=True, logprobs=1, max_tokens=0),
    "completion-token-ids": completion(model=SCRIPTED, prompt=[104, 105], return_tokens_as_token_ids=True, logprobs=0),
    "completion-fitted": completion(**PLAIN, max_tokens=10**9, fit_max_tokens=True),
    "stream": completion(**STREAMED),
    "stream-usage": completion(**STREAMED, stream_options={"include_usage": True}),
    "stream-no-usage": completion(**STREAMED, stream_options={"include_usage": False}),
    "stream-running-usage": completion(**STREAMED, stream_options={"continuous_usage_stats": True}),
    "stream-echo-logprobs": completion(**STREAMED, echo=True, logprobs=1),
    "stream-length": completion(**STREAMED, max_tokens=1),
    "stream-fails-late": completion(model=SCRIPTED, prompt=FAILING, stream=True),
    "stream-fails-before-it-begins": completion(model=SCRIPTED, prompt='{"pieces": 1}', stream=True),
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
}

#: Their bodies have tests of their own and change with every field.
HEAD_ONLY = {"openapi", "docs"}

_MASKED = [
    re.compile(pattern)
    for pattern in (
        rb"cmpl-([0-9A-Za-z]+)",
        rb'"created":([0-9]+)',
        rb"\r\nDate: ([^\r]+)",
        rb'"name":"([^"]+)"',
        rb"\r\nServer: ([^\r]+)",
    )
]
#: Masked by one `*`: their length differs too.
_VARYING = [
    re.compile(pattern)
    for pattern in (
        rb"\r\nopenai-processing-ms: ([0-9]+)",
        rb'"tokens_per_second":([0-9.]+)',
        rb"(?:\A|\n)id: ([0-9]+-[0-9]+)",
    )
]
#: What this may change the length of.
VARYING_LENGTH = {"openapi", "docs", "status"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("golden"), (SCRIPTED,)) as served:
        yield served


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
    if name in HEAD_ONLY:
        body = b"(the body has tests of its own)\n"
    sent = re.sub(rb"\r\n", b"\\\\r\n", REQUESTS[name])
    return sent + b"\n----\n" + masked(head + b"\r\n\r\n" + body).replace(b"\r\n", b"\\r\n")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_bytes_are_those_of_the_transcript(served: Stack, name: str, update_golden: bool) -> None:
    received = transcript(name, exchange(served.port, REQUESTS[name]))
    file = GOLDEN / f"{name}.txt"
    if update_golden:
        file.write_bytes(received)
    assert received.decode() == file.read_bytes().decode()


def test_there_is_no_transcript_of_nothing() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(REQUESTS)


# -- the transcripts, and so the wire, against the schemas: those of the tests and those of the document

_VALIDATORS = {
    name: json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("completion", "completion_chunk", "error")
}
_REGISTRY: Registry[Any] = Registry().with_resources(
    (f"{name}.json", Resource.from_contents(schema)) for name, schema in _VALIDATORS.items()
)
_BOTH = {
    "completion": answers.Completion,
    "completion_chunk": answers.CompletionChunk,
    "error": answers.ErrorAnswer,
}
_OTHERS = {
    "models": answers.ModelList,
    "model": answers.Model,
    "health": answers.Health,
    "ready": answers.Readiness,
    "status": answers.Status,
    "tokenize": answers.Tokenized,
    "tokenize-messages": answers.Tokenized,
    "detokenize": answers.Detokenized,
    "tokenizer-info": answers.TokenizerInfo,
}


def check(kind: str, value: Any) -> None:
    Draft202012Validator({"$ref": f"{kind}.json"}, registry=_REGISTRY).validate(value)
    _BOTH[kind].model_validate(value)


@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - HEAD_ONLY))
def test_answers_have_the_shape_that_is_described(name: str, served: Stack) -> None:
    received = exchange(served.port, REQUESTS[name])
    head, _, body = received.partition(b"\r\n\r\n")
    body = joined(head, body)
    if not body:
        return
    if b"text/event-stream" not in head:
        value = json.loads(body)
        if "error" in value:
            check("error", value)
        elif name in _OTHERS:
            _OTHERS[name].model_validate(value)
        else:
            check("completion", value)
        return
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    for event in events:
        value = json.loads(event)
        check("error" if "error" in value else "completion_chunk", value)
