"""Field cases of batches, on the whole product, over plain HTTP.

FB-118 is in tests/faults/test_batch_faults.py, FB-120 in tests/integration/test_keys.py, FB-121 in
tests/integration/test_batch_runner.py, where results can be damaged.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.batches import (
    BOUNDARY,
    codes,
    content,
    create,
    ended,
    form,
    line,
    lines,
    look,
    ran,
    rows,
    started,
    texts,
    upload,
    uploaded,
)
from tests.conftest import script, wait_for
from tests.stack import CHATS, REAL, SCRIPTED, Chat, Stack, endless, said

URL = "/v1/completions"


def faults(stack: Stack, raw: bytes) -> list[dict[str, Any]]:
    """`errors.data` of a batch that failed before anything ran."""
    batch = ran(stack, raw)
    assert batch["status"] == "failed" and batch["failed_at"], batch
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["output_file_id"] is batch["error_file_id"] is batch["in_progress_at"] is None
    assert batch["errors"]["object"] == "list" and batch["errors"]["data"]
    return batch["errors"]["data"]


def raw_line(**fields: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": SCRIPTED, "prompt": "x"}, **fields}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode() + b"\n"


def test_fb110_custom_ids(stack: Stack) -> None:
    """Twice, missing, empty, huge and no text: the batch fails with the line's number, and nothing runs."""
    raw = line("a") + line("b") + line("a")
    assert [(error["code"], error["line"]) for error in faults(stack, raw)] == [("duplicate_custom_id", 3)]
    odd = [..., "", "x" * 1_000_000, 7]
    raw = b"".join(raw_line(custom_id=custom_id) for custom_id in odd)
    found = faults(stack, raw)
    assert [(e["code"], e["line"], e["param"]) for e in found] == [
        ("invalid_custom_id", number, "custom_id") for number in (1, 2, 3, 4)
    ]


def test_fb111_faults_of_the_file_end_a_batch_that_was_made(stack: Stack) -> None:
    raw = line("a") + b"{bad\n" + line("c", url=CHATS) + line("d", model="other")
    found = faults(stack, raw)
    assert [(e["code"], e["line"]) for e in found] == [
        ("invalid_json_line", 2),
        ("url_mismatch", 3),
        ("model_mismatch", 4),
    ]
    assert all(error["message"] for error in found)
    assert [e["code"] for e in faults(stack, b"")] == ["empty_file"]
    assert [(e["code"], e["line"]) for e in faults(stack, line("a", model="no-such-model"))] == [("model_not_found", 1)]


def test_fb111_faults_of_the_call_are_answers(stack: Stack) -> None:
    answer = create(stack, "file-0123")
    assert answer.status == 404 and answer.error["param"] == "input_file_id"
    file_id = uploaded(stack, lines(1))
    for fields, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "25h"}, "completion_window"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after"),
    ):
        answer = create(stack, file_id, **fields)
        assert answer.status == 400 and answer.error["param"] == param, (fields, answer)
    batch = ran(stack, lines(1))
    answer = create(stack, batch["output_file_id"])
    assert answer.status == 400 and answer.error["param"] == "input_file_id", "a file of another purpose"


def test_fb112_lines_that_are_json_but_no_requests(stack: Stack) -> None:
    raw = b'[1]\nnull\n"x"\n5\n' + raw_line(body="x") + raw_line(method="GET") + raw_line(url="/v1/unknown")
    found = faults(stack, raw)
    assert [(e["line"], e["code"]) for e in found] == [
        *((number, "invalid_json_line") for number in (1, 2, 3, 4)),
        (5, "invalid_body"),
        (6, "invalid_method"),
        (7, "url_mismatch"),
    ]
    batch = ran(stack, raw_line(extra=[1], priority="high"))
    assert batch["status"] == "completed", "fields of a line that nobody asked for are no fault"


@pytest.mark.parametrize(
    ("join", "end"), [(b"\n", b""), (b"\n", b"\n"), (b"\n", b"\n\n"), (b"\n\n \t\n", b"\n"), (b"\r\n", b"\r\n")]
)
def test_fb113_blank_lines_and_line_ends(stack: Stack, join: bytes, end: bytes) -> None:
    three = [line(f"{n}", script("a\u2028b\x85c")).rstrip() for n in range(3)]
    utf8 = [json.dumps(json.loads(one), ensure_ascii=False).encode() for one in three]
    for bom in (b"", b"\xef\xbb\xbf"):
        batch = ran(stack, bom + join.join(utf8) + end)
        assert batch["status"] == "completed" and batch["request_counts"]["total"] == 3
        assert texts(rows(stack, batch["output_file_id"])) == dict.fromkeys(("0", "1", "2"), "a\u2028b\x85c")
        raw = content(stack, batch["output_file_id"]).decode()
        assert len(raw.splitlines()) == 3, "for those who do cut there"


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_fb115_cancel_at_any_moment(stack: Stack, times: int) -> None:
    """Every line in one file, successes in the output alone."""
    draw = random.Random(115)
    raw = b"".join(
        line(f"line-{n}", script(f"line-{n}", *["x"] * draw.choice((0, 40)), delay_ms=20)) for n in range(20)
    )
    file_id = uploaded(stack, raw)
    for number in range(times):
        batch_id = create(stack, file_id).json["id"]
        moment = draw.choice(("at once", "begun", "some done"))
        if moment != "at once":
            wait_for(lambda batch_id=batch_id: look(stack, batch_id)["status"] != "validating", 30)
        if moment == "some done":
            wait_for(lambda batch_id=batch_id: look(stack, batch_id)["request_counts"]["completed"], 30)
        for _ in range(2):
            answer = stack.call("POST", f"/v1/batches/{batch_id}/cancel")
            assert answer.status == 200 and answer.json["status"] in (
                "cancelling",
                "cancelled",
                "finalizing",
                "completed",
            )
        batch = ended(stack, batch_id)
        done, rest = rows(stack, batch["output_file_id"]), rows(stack, batch["error_file_id"])
        counts = batch["request_counts"]
        assert (counts["completed"], counts["failed"]) == (len(done), len(rest)), (number, moment)
        said, why = texts(done), codes(rest)
        assert sorted([*said, *why]) == sorted(f"line-{n}" for n in range(20)), (number, moment)
        assert all(text.startswith(custom_id) for custom_id, text in said.items())
        assert set(why.values()) <= {"batch_cancelled"}
        if rest:
            assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
        again = stack.call("POST", f"/v1/batches/{batch_id}/cancel")
        assert (again.status, again.json) == (200, batch), "one that has ended stays as it is"
    wait_for(stack.idle, 30)


def test_fb117_all_lines_fail(stack: Stack) -> None:
    batch = ran(stack, line("a", temperature=9) + line("b", max_tokens=10**6) + line("c", script("x", error_after=0)))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
    assert batch["output_file_id"] is None
    found = rows(stack, batch["error_file_id"])
    assert codes(found) == {"a": "invalid_value", "b": "context_length_exceeded", "c": "internal_error"}
    assert {row["custom_id"]: row["response"]["status_code"] for row in found} == {"a": 400, "b": 400, "c": 500}
    assert all(row["error"] is None and row["id"].startswith("batch_req_") for row in found)


def test_fb119_files_that_are_no_batches(stack: Stack) -> None:
    """Refused when they are uploaded, or by the batch, in our own words."""
    for raw in (b"Dear diary,\n", b"\x89PNG\r\n\x1a\n\x00\x00\xff"):
        assert {error["code"] for error in faults(stack, raw)} == {"invalid_json_line"}
    for answer, param in (
        (upload(stack, lines(1), purpose="assistants"), "purpose"),
        (upload(stack, lines(1), None), "file"),
        (
            upload(stack, lines(1), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}),
            "expires_after",
        ),
    ):
        assert answer.status == 400 and answer.error["param"] == param, answer
    without = stack.call(
        "POST",
        "/v1/files",
        raw=b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--b--\r\n',
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    assert without.status == 400 and without.error["param"] == "purpose"
    assert stack.call("POST", "/v1/files", {"purpose": "batch"}).status == 415


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("a\nb\r\n.jsonl", "a%0Ab%0D%0A.jsonl"),
        ("..", "file"),
        ("x" * 300 + ".jsonl", "x" * 255),
        ("für 你.jsonl", "für 你.jsonl"),
    ],
)
def test_fb119_names_are_no_paths(stack: Stack, sent: str, shown: str) -> None:
    file_id = uploaded(stack, lines(1), sent)
    assert stack.call("GET", f"/v1/files/{file_id}").json["filename"] == shown
    answer = stack.call("GET", f"/v1/files/{file_id}/content")
    assert answer.raw == lines(1)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"].startswith("attachment")
    inside = [path for path in (stack.folder / "data" / "files").rglob("*") if path.is_file()]
    assert any(path.name == file_id for path in inside)


def test_a_file_whose_bytes_are_gone(stack: Stack) -> None:
    """As on a machine that does not have the folder: an error of its own, not an answer that breaks off."""
    file_id = uploaded(stack, lines(1))
    [path] = (stack.folder / "data" / "files").rglob(file_id)
    path.unlink()
    answer = stack.call("GET", f"/v1/files/{file_id}/content")
    assert answer.status == 404 and answer.error["code"] == "not_found"
    batch = ended(stack, create(stack, file_id).json["id"])
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "file_missing"


def test_fb119_too_large(stack: Stack) -> None:
    """413 as soon as it shows; nothing is left of it."""
    sent = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    answer = stack.call(
        "POST",
        "/v1/files",
        raw=sent,
        headers={"Content-Type": "multipart/form-data; boundary=b", "Content-Length": "201000000"},
    )
    assert answer.status == 413 and answer.error["code"] == "body_too_large"


def test_fb101_fb102_odd_characters_in_lines_and_names(stack: Stack) -> None:
    lone = line("a").replace(b'"a"', b'"a\\ud800"')
    utf16 = '{"custom_id": "c"}'.encode("utf-16")
    found = faults(stack, lone + line("b") + b"\xff\n" + utf16 + b"\n")
    assert [(error["code"], error["line"]) for error in found] == [("invalid_json_line", n) for n in (1, 3, 4)]
    assert not any(word in error["message"] for error in found for word in ("Error", "codec", "surrogates not"))
    pair = line("😀", script("a\0b"))
    assert b"\\ud83d\\ude00" in pair
    batch = ran(stack, pair)
    assert texts(rows(stack, batch["output_file_id"])) == {"😀": "a\0b"}
    file_id = uploaded(stack, pair, "a\0b.jsonl")
    assert stack.call("GET", f"/v1/files/{file_id}").json["filename"] == "ab.jsonl"
    sent = form(pair, "NAME", purpose="batch").replace(b"NAME", b"\xff\xfe")
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = stack.call("POST", "/v1/files", raw=sent, headers=headers)
    assert answer.status == 400 and answer.error["code"] == "invalid_form"


def test_a_batch_with_a_line_that_never_ends_can_be_cancelled(stack: Stack) -> None:
    batch_id = started(stack, line("short") + line("endless", endless(delay_ms=20)))
    wait_for(lambda: look(stack, batch_id)["request_counts"]["completed"] == 1, 30)
    partial = look(stack, batch_id)
    assert partial["status"] == "in_progress" and partial["output_file_id"] is None
    assert texts(rows(stack, partial["partial_output_file_id"])) == {"short": "short"}, "while it runs"
    stack.call("POST", f"/v1/batches/{batch_id}/cancel")
    batch = ended(stack, batch_id)
    assert batch["output_file_id"] == partial["partial_output_file_id"]
    assert codes(rows(stack, batch["error_file_id"])) == {"endless": "batch_cancelled"}
    wait_for(stack.idle, 30)


def test_a_batch_of_chats(stack: Stack, model: str) -> None:
    """Templates, reasoning and faults are those of the endpoint; other endpoints' lines are not taken."""
    if model == REAL:
        raw = line("real", said("Say hello."), model=REAL, max_tokens=5, temperature=0)
        batch = ran(stack, raw, endpoint=CHATS)
        [row] = rows(stack, batch["output_file_id"])
        answer = stack.complete(said("Say hello."), model=REAL, max_tokens=5, temperature=0)
        assert texts([row]) == {"real": answer.text}
        return
    raw = b"".join(line(f"line-{n}", said(script("<think>", "why", "</think>", f"{n}"))) for n in range(5))
    raw += line("bad", said(script("x")), tools=5) + line("empty", Chat([]))
    batch = ran(stack, raw, endpoint=CHATS)
    assert batch["status"] == "completed" and batch["endpoint"] == CHATS
    assert batch["request_counts"] == {"total": 7, "completed": 5, "failed": 2}
    found = rows(stack, batch["output_file_id"])
    assert texts(found) == {f"line-{n}": f"{n}" for n in range(5)}
    for row in found:
        assert row["response"]["body"]["object"] == "chat.completion"
        assert row["response"]["body"]["choices"][0]["message"]["reasoning_content"] == "why"
    assert set(codes(rows(stack, batch["error_file_id"]))) == {"bad", "empty"}
    assert batch["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    [fault, *_] = ended(stack, started(stack, raw))["errors"]["data"]
    assert (fault["code"], fault["line"]) == ("url_mismatch", 1)
