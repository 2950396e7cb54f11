"""Field cases of HTTP and JSON, most of them over bare sockets, on the whole product.

FB-014, FB-039 and FB-040 are in test_field_cases.py; FB-106, and what of FB-036 and FB-037 concerns keys, is in
tests/unit/test_api_keys.py. Not applicable yet: FB-105 through nginx (its configuration does not come with the product yet), and of
FB-101 what concerns schemas. What concerns batch lines and file names is in test_field_cases_batches.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import script, wait_for
from tests.contract.schemas import check_error
from tests.integration.test_http_completions import refused, whole
from tests.stack import REAL, SCRIPTED, Answer, Stack, hexes

JSON = "Content-Type: application/json"
BODY = b'{"model":"scripted","prompt":"a b"}'
#: The default limit of a body, bytes.
LIMIT = 10_000_000


def request(*headers: str, path: str = "/v1/completions", method: str = "POST", host: str = "localhost") -> bytes:
    """A request's head as it stands in the headers, right or wrong."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode("latin-1")


def exchange(stack: Stack, sent: bytes) -> bytes:
    """Everything that comes back on a connection until the server closes it."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=20) as client:
        client.sendall(sent)
        return everything(client)


def everything(client: socket.socket) -> bytes:
    """Half-closes once something came, for a server that waits for the rest of a refused body."""
    raw = client.recv(65536)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
    return raw + b"".join(iter(lambda: client.recv(65536), b""))


def answers(raw: bytes) -> list[Answer]:
    """The responses in these bytes, each with a length, but for 100s; fails on anything between."""
    found = []
    while raw:
        head, separator, raw = raw.partition(b"\r\n\r\n")
        assert separator and head.startswith(b"HTTP/1.1 "), raw[:200]
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        if not status.startswith("HTTP/1.1 100 "):
            found.append(Answer(int(status.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return found


def post(stack: Stack, body: bytes, *headers: str) -> Answer:
    head = request(JSON, f"Content-Length: {len(body)}", "Connection: close", *headers)
    [answer] = answers(exchange(stack, head + body))
    return answer


WRONG_TEXT = [
    b'{"model":"scripted","prompt":"a\\ud800b"}',
    b'{"model":"scripted","prompt":"a\\udc00b"}',
    b'{"model":"scripted","prompt":"\\ude00\\ud83d"}',
    b'{"model":"scripted","prompt":["ok","a\\ud800"]}',
    b'{"model":"scripted","prompt":"x","stop":"\\ud800"}',
    b'{"model":"scripted","prompt":"x","stop":["a","b\\udfff"]}',
    b'{"model":"scripted","prompt":"x","user":"\\ud800"}',
    b'{"model":"\\ud800","prompt":"x"}',
    b'{"model":"scripted","prompt":"x","\\ud800":1}',
    b'{"model":"scripted","prompt":"x","unknown":{"deep":["\\ud800"]}}',
    b'{"model":"scripted","prompt":"\xff"}',
    b'{"model":"scripted","prompt":"\xed\xa0\x80"}',
    b'{"model":"scripted","prompt":"\xc0\xaf"}',
    b'{"model":"scripted","prompt":"\xe4\xbd"}',
    '{"model":"scripted","prompt":"x"}'.encode("utf-16"),
    '{"model":"scripted","prompt":"x"}'.encode("utf-16-le"),
    '{"model":"scripted","prompt":"x"}'.encode("utf-32"),
    '{"model":"scripted","prompt":"x"}'.encode("utf-8-sig"),
]


@pytest.mark.parametrize("streamed", [False, True])
def test_fb101_text_that_is_none(stack: Stack, streamed: bool) -> None:
    for raw in WRONG_TEXT:
        body = raw.replace(b"}", b',"stream":true}') if streamed and raw.endswith(b"}") else raw
        answer = post(stack, body)
        refused(answer, 400)
        for word in (b"Error:", b"codec", b"Traceback", b"surrogates not allowed", b".py"):
            assert word not in answer.raw, (raw, answer)
        assert "x-sluice-id" not in answer.headers


def test_fb101_text_that_is_some(stack: Stack) -> None:
    for prompt in (b"\\ud83d\\ude00", "😀".encode(), b"\\uD83D\\uDE00", b"\\uffff", "\ufeff".encode(), b"\\ufffd"):
        body = b'{"model":"scripted","echo":true,"prompt":"%b"}' % prompt
        want = json.loads(b'"%b"' % prompt)
        assert post(stack, body).text.startswith(want), prompt


def test_fb102_a_zero_character_cuts_nothing(stack: Stack, model: str) -> None:
    prompt = "Say A.\0 Say B."
    body = b'{"model":"%b","prompt":"Say A.\\u0000 Say B.","echo":true,"max_tokens":1,"temperature":0}' % model.encode()
    answer = post(stack, body)
    assert answer.text.startswith(prompt)
    count = stack.call("POST", "/tokenize", {"model": model, "prompt": prompt}).json["count"]
    assert answer.usage["prompt_tokens"] == count > len("Say A.") / 4
    shorter = stack.complete("Say A.", model=model, max_tokens=1, temperature=0).usage["prompt_tokens"]
    assert count > shorter
    assert whole(stack.stream(prompt, model=model, echo=True, max_tokens=1, temperature=0)).text.startswith(prompt)
    raw = b'{"model":"scripted","prompt":"a\0b"}'
    refused(post(stack, raw), 400, code="invalid_json")
    assert stack.complete(script("a", "\0b", "c"), stop="\0b").text == "a"
    assert stack.complete(script("a\0b")).text == "a\0b"
    assert refused(stack.complete("x", model="scripted\0"), 404)


@pytest.mark.parametrize("name", ["no-such", "", "Scripted", "SCRIPTED", "scripted ", " scripted", "../x", "scripted/..", "é", "x" * 5000])  # fmt: skip
def test_fb103_models_that_are_not_there(stack: Stack, name: str) -> None:
    for streamed in (False, True):
        answer = post(stack, json.dumps({"model": name, "prompt": "x", "stream": streamed}).encode())
        refused(answer, 404, param="model", code="model_not_found")
        assert answer.headers["content-type"] == "application/json"


def test_fb103_no_model_is_the_default_one(stack: Stack) -> None:
    """The only one, the scripted engine not counting; whoever answers is named."""
    for body in (b'{"prompt":"x","max_tokens":1}', b'{"model":null,"prompt":"x","max_tokens":1}'):
        assert post(stack, body).json["model"] == REAL
    for wrong in (b"5", b"true", b"[]", b"{}", b'["scripted"]'):
        refused(post(stack, b'{"model":%b,"prompt":"x"}' % wrong), 400, param="model")


def test_fb104_content_types(stack: Stack) -> None:
    def ask(*headers: str) -> Answer:
        head = request(*headers, f"Content-Length: {len(BODY)}", "Connection: close")
        [answer] = answers(exchange(stack, head + BODY))
        return answer

    wrong = ["text/plain", "application/x-www-form-urlencoded", "text/json", "application/jsonl", "*/*", "", "json"]
    wrong += ["application/json; charset=utf-16", "application/json, text/plain", "multipart/form-data; boundary=x"]
    for kind in wrong:
        answer = ask(f"Content-Type: {kind}")
        refused(answer, 415, code="unsupported_media_type")
        assert b"<html" not in answer.raw.lower()
    refused(ask(), 415, code="unsupported_media_type")
    for kind in (
        "application/json",
        "application/json; charset=utf-8",
        "application/JSON",
        "application/json;charset=UTF-8",
    ):
        assert ask(f"Content-Type: {kind}").text == "a b"
    assert ask("content-TYPE: application/json ").text == "a b"


#: Heads that two servers in a row could read in two ways, each with what lies behind it. The second request of each is
#: one that would show: a path that nobody asked for.
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
AMBIGUOUS: dict[str, bytes] = {
    "length and chunked": request(JSON, f"Content-Length: {len(CHUNKED)}", "Transfer-Encoding: chunked") + CHUNKED,
    "chunked and a short length": request(JSON, "Content-Length: 4", "Transfer-Encoding: chunked") + CHUNKED,
    "chunked, then identity": request(JSON, "Transfer-Encoding: chunked", "Transfer-Encoding: identity") + CHUNKED,
    "identity, then chunked": request(JSON, "Transfer-Encoding: identity", "Transfer-Encoding: chunked") + CHUNKED,
    "chunked, identity": request(JSON, "Transfer-Encoding: chunked, identity") + CHUNKED,
    "chunked twice": request(JSON, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + CHUNKED,
    "vertical tab": request(JSON, "Transfer-Encoding: \x0bchunked") + CHUNKED,
    "xchunked": request(JSON, "Transfer-Encoding: xchunked") + CHUNKED,
    "chunked in quotes": request(JSON, 'Transfer-Encoding: "chunked"') + CHUNKED,
    "space before the colon": request(JSON, "Transfer-Encoding : chunked") + CHUNKED,
    "folded": request(JSON, "Transfer-Encoding:\r\n chunked") + CHUNKED,
    "plus": request(JSON, f"Content-Length: +{len(BODY)}") + BODY,
    "minus": request(JSON, "Content-Length: -5") + BODY,
    "hex": request(JSON, f"Content-Length: 0x{len(BODY):x}") + BODY,
    "underscore": request(JSON, "Content-Length: 3_5") + BODY,
    "list": request(JSON, f"Content-Length: {len(BODY)},{len(BODY)}") + BODY,
    "identity and a length": request(JSON, f"Content-Length: {len(BODY)}", "Transfer-Encoding: identity") + BODY,
    "gzip, chunked": request(JSON, "Transfer-Encoding: gzip, chunked") + CHUNKED,
    "two lengths": request(JSON, f"Content-Length: {len(BODY)}", "Content-Length: 5") + BODY,
    "the same length twice": request(JSON, f"Content-Length: {len(BODY)}", f"Content-Length: {len(BODY)}") + BODY,
    "empty length": request(JSON, "Content-Length: ") + BODY,
    "another digit": request(JSON, "Content-Length: \xb2") + BODY,
    "bad chunk size": request(JSON, "Transfer-Encoding: chunked") + b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size with 0x": request(JSON, "Transfer-Encoding: chunked") + b"0x23\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size with plus": request(JSON, "Transfer-Encoding: chunked") + b"+23\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size with minus": request(JSON, "Transfer-Encoding: chunked") + b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than it says": request(JSON, "Transfer-Encoding: chunked") + b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "bare line feeds": request(JSON, f"Content-Length: {len(BODY)}").replace(b"\r\n", b"\n") + BODY,
    "a header after a zero byte": request(JSON, "X: a\0b", f"Content-Length: {len(BODY)}") + BODY,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_fb105_no_body_is_taken_for_a_request(stack: Stack, name: str) -> None:
    """CVE-2024-1135, CVE-2024-6827: refused with 400 and closed; what lies behind is never answered."""
    raw = exchange(stack, AMBIGUOUS[name] + SMUGGLED)
    found = answers(raw)
    assert len(found) == 1, (name, raw)
    assert found[0].status == 400, (name, raw)
    check_error(found[0].json)
    assert found[0].headers["connection"] == "close" and b"smuggled" not in raw
    assert stack.call("GET", "/health").status == 200


def test_fb105_the_server_is_one_that_is_repaired() -> None:
    requirements = (Path(__file__).parents[2] / "requirements.txt").read_text(encoding="utf-8")
    [line] = [line for line in requirements.splitlines() if line.startswith("gunicorn")]
    version = line.partition("==")[2].split(";")[0].split()[0]
    assert tuple(int(part) for part in version.split(".")[:2]) >= (23, 0)


def test_fb107_content_types_of_answers(stack: Stack) -> None:
    def kind(method: str, path: str, **more: Any) -> str | None:
        return stack.call(method, path, **more).headers.get("content-type")

    for path in ("/v1/models", f"/v1/models/{REAL}", "/health", "/ready", "/v1/status", "/nope", "/v1/models/nope"):
        assert kind("GET", path) == "application/json", path
    for path in ("/v1/completions", "/tokenize", "/v1/detokenize"):
        for body in ({"model": SCRIPTED, "prompt": "x", "tokens": [1]}, {"model": 5}, {"model": "none", "prompt": "x"}):
            assert kind("POST", path, body=body) == "application/json", (path, body)
        assert kind("PUT", path, body={}) == "application/json"
    assert kind("POST", "/v1/completions", raw=b"{") == "application/json"
    failed = {"model": SCRIPTED, "prompt": script("a", error_after=0)}
    assert kind("POST", "/v1/completions", body=failed) == "application/json"
    stream = {"model": SCRIPTED, "prompt": "x", "stream": True}
    assert (kind("POST", "/v1/completions", body=stream) or "").partition(";")[0] == "text/event-stream"


def test_fb108_output_that_is_no_utf8(stack: Stack) -> None:
    for pieces in (("e2", "28", "a1"), ("e228a1",), ("e228", "a1")):
        for logprobs in (None, 0, 3):
            answer = stack.complete(hexes(*pieces), logprobs=logprobs)
            assert answer.text == "\ufffd(\ufffd"
            stream = whole(stack.stream(hexes(*pieces), logprobs=logprobs))
            assert stream.text == answer.text and stream.raw.decode("utf-8")
    tokens = stack.complete(hexes("e2", "28", "a1"), logprobs=0).choice["logprobs"]["tokens"]
    assert tokens == ["bytes:\\xe2", "(", "bytes:\\xa1", "<|257|>"]
    assert stack.complete("x").status == 200


def memory(stack: Stack) -> int:
    """Bytes that the API's processes hold."""
    pages = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in stack.api_processes()]
    return sum(map(int, pages)) * 4096


@contextlib.contextmanager
def flat_memory(stack: Stack) -> Iterator[None]:
    before = memory(stack)
    yield
    wait_for(lambda: memory(stack) < before + 40_000_000, 5)


def test_fb109_a_client_that_writes_all_first_reads_the_answer(stack: Stack) -> None:
    """50 MB where 10 are allowed: clients that send before they read, most of the time."""
    large = b'{"model":"scripted","prompt":"' + b"x" * 50_000_000 + b'"}'
    url = f"http://127.0.0.1:{stack.port}/v1/completions"
    read = 0
    with flat_memory(stack):
        for _ in range(5):
            with contextlib.suppress(requests.ConnectionError):
                answer = requests.post(url, data=large, headers={"Content-Type": "application/json"}, timeout=20)
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
                read += 1
    assert read >= 3
    within = b'{"model":"scripted","prompt":"' + b"x" * (LIMIT + 1) + b'"}'
    for _ in range(3):
        answer = requests.post(url, data=within, headers={"Content-Type": "application/json"}, timeout=20)
        assert answer.status_code == 413, "up to 16 MB are read to the end"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("expect", ["Expect: 100-continue", "Expect:"])
def test_fb109_curl(stack: Stack, tmp_path: Path, expect: str) -> None:
    """With `Expect` as curl sends it with large bodies, and without."""
    (tmp_path / "body").write_bytes(b'{"model":"scripted","prompt":"' + b"x" * 50_000_000 + b'"}')
    url = f"http://127.0.0.1:{stack.port}/v1/completions"
    call = ["curl", "-s", "-i", "-m", "20", "-H", JSON, "-H", expect, "--data-binary", f"@{tmp_path / 'body'}", url]
    done = subprocess.run(call, capture_output=True, timeout=30, check=False)
    [answer] = answers(done.stdout)
    refused(answer, 413, code="body_too_large")


def test_fb109_expect_is_answered_before_the_body(stack: Stack) -> None:
    head = request(JSON, f"Content-Length: {len(BODY)}", "Expect: 100-continue", "Connection: close")
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as client:
        client.sendall(head)
        assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
        client.sendall(BODY)
        raw = everything(client)
    assert answers(raw)[0].text == "a b"
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as client:
        client.sendall(request(JSON, "Content-Length: 50000000", "Expect: 100-continue"))
        raw = everything(client)
    assert refused(answers(raw)[0], 413, code="body_too_large")


def test_fb109_the_limit_holds_without_a_length(stack: Stack) -> None:
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with flat_memory(stack), socket.create_connection(("127.0.0.1", stack.port), timeout=20) as client:
        client.sendall(request(JSON, "Transfer-Encoding: chunked"))
        with contextlib.suppress(ConnectionError):
            for _ in range(LIMIT // 0x10000 + 2):
                client.sendall(piece)
        raw = everything(client)
    assert refused(answers(raw)[0], 413, code="body_too_large")
    small = request(JSON, "Transfer-Encoding: chunked", "Connection: close") + CHUNKED
    assert answers(exchange(stack, small))[0].text == "a b"


# -- CORS

PAGE = "https://app.example"
PREFLIGHT = {
    "Content-Type": "",
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_fb036_a_preflight_is_answered_where_the_origin_is_allowed(narrow: Stack, stack: Stack) -> None:
    answer = narrow.call("OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))
    assert "Origin" in answer.headers["vary"]
    asked = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization,x-stainless-lang,x-stainless-retry-count"}
    allowed = narrow.call("OPTIONS", "/v1/completions", headers=asked).headers["access-control-allow-headers"]
    assert "x-stainless-retry-count" in allowed, "what the official client sends from a browser"
    for other, origin in ((narrow, "https://evil.example"), (narrow, PAGE + ".evil.example"), (stack, PAGE)):
        answer = other.call("OPTIONS", "/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        assert answer.status == 403
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_fb037_errors_carry_the_headers_of_successes(narrow: Stack) -> None:
    page = {"Origin": PAGE}
    ok = {"model": SCRIPTED, "prompt": script("a")}
    cases: list[tuple[int, str, str, dict[str, Any]]] = [
        (200, "POST", "/v1/completions", {"body": ok}),
        (400, "POST", "/v1/completions", {"raw": b"{"}),
        (404, "POST", "/v1/nothing", {"body": {}}),
        (405, "GET", "/v1/completions", {}),
        (413, "POST", "/v1/completions", {"raw": b"x" * (LIMIT + 1)}),
        (415, "POST", "/v1/completions", {"raw": b"x", "type": "text/plain"}),
        (500, "POST", "/v1/completions", {"body": {**ok, "prompt": script("a", error_after=0)}}),
    ]
    for status, method, path, sent in cases:
        headers = {**page, "Content-Type": sent.pop("type", "application/json")}
        answer = narrow.call(method, path, headers=headers, **sent)
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (status, PAGE), (path, answer)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    failing = {"model": SCRIPTED, "prompt": script("a", "b", delay_ms=300, error_after=1), "stream": True}
    answer = narrow.call("POST", "/v1/completions", failing, headers=page)
    assert answer.status == 200 and b'"error"' in answer.raw
    assert answer.headers["access-control-allow-origin"] == PAGE
