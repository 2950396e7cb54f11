"""Files and batches as a client without a library sees them. Helpers; the tests are elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.conftest import script, wait_for
from tests.stack import SCRIPTED, Answer, Chat, Client, path_of, strict_json

BOUNDARY = "----sluice-test"
OVER = ("completed", "failed", "expired", "cancelled")


def form(raw: bytes, filename: str | None = "requests.jsonl", **fields: str) -> bytes:
    """The body of an upload; the file last. `filename` None: without one."""
    parts = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields.items()]
    head = "".join(parts).encode()
    if filename is not None:
        name = filename.replace("\r", "%0D").replace("\n", "%0A").replace('"', "%22")
        head += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
        head += raw + b"\r\n"
    return head + f"--{BOUNDARY}--\r\n".encode()


def upload(client: Client, raw: bytes, filename: str | None = "requests.jsonl", **fields: str) -> Answer:
    sent = form(raw, filename, **({"purpose": "batch"} | fields))
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return client.call("POST", "/v1/files", raw=sent, headers=headers)


def uploaded(client: Client, raw: bytes, filename: str = "requests.jsonl", **fields: str) -> str:
    """The id of the file."""
    answer = upload(client, raw, filename, **fields)
    assert answer.status == 200, answer
    return answer.json["id"]


def line(custom_id: Any, prompt: Any = None, *, url: str | None = None, **body: Any) -> bytes:
    """A line of an input file, with its line feed; a chat, if the prompt is one."""
    asked = script(f"{custom_id}") if prompt is None else prompt
    said = {"messages": asked} if isinstance(asked, Chat) else {"prompt": asked}
    request = {"model": SCRIPTED, **said, **body}
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": url or path_of(asked), "body": request}).encode()
        + b"\n"
    )


def lines(count: int, **body: Any) -> bytes:
    """So many of them, `line-0` and so on; the text of each is its custom_id."""
    return b"".join(line(f"line-{number}", **body) for number in range(count))


def create(client: Client, file_id: str, window: str = "24h", **fields: Any) -> Answer:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": window}
    return client.call("POST", "/v1/batches", {**asked, **fields})


def started(client: Client, raw: bytes, window: str = "24h", **fields: Any) -> str:
    """The id of a batch of these lines."""
    answer = create(client, uploaded(client, raw), window, **fields)
    assert answer.status == 200, answer
    return answer.json["id"]


def look(client: Client, batch_id: str) -> dict[str, Any]:
    answer = client.call("GET", f"/v1/batches/{batch_id}")
    assert answer.status == 200, answer
    return answer.json


def ended(client: Client, batch_id: str, timeout: float = 60.0) -> dict[str, Any]:
    """The batch once it is over."""

    def over() -> dict[str, Any] | None:
        batch = look(client, batch_id)
        return batch if batch["status"] in OVER else None

    return wait_for(over, timeout, every=0.1)


def ran(client: Client, raw: bytes, **fields: Any) -> dict[str, Any]:
    """A batch of these lines, from its upload to its end."""
    return ended(client, started(client, raw, **fields))


def content(client: Client, file_id: str | None) -> bytes:
    """Of a file; of none, nothing."""
    if file_id is None:
        return b""
    answer = client.call("GET", f"/v1/files/{file_id}/content")
    assert answer.status == 200, answer
    return answer.raw


def rows(client: Client, file_id: str | None) -> list[dict[str, Any]]:
    """Of a file of results. Cut at line feeds only, and each of them strict JSON."""
    raw = content(client, file_id)
    assert not raw or raw.endswith(b"\n")
    return [strict_json(row) for row in raw.split(b"\n")[:-1]]


def texts(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """custom_id -> text of the completion. Fails if one comes twice."""
    choices = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in results}
    found = {
        custom_id: choice["message"]["content"] if "message" in choice else choice["text"]
        for custom_id, choice in choices.items()
    }
    assert len(found) == len(results)
    return found


def codes(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """custom_id -> why it was not completed. Fails if one comes twice."""
    found = {row["custom_id"]: (row["error"] or row["response"]["body"]["error"])["code"] for row in results}
    assert len(found) == len(results)
    return found
