"""A small client of a running Sluice for the command line: JSON calls and streamed completions, standard library only.

Knows the shapes of the HTTP contract; prints nothing.
"""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO
from urllib.parse import urlsplit

#: Bytes of a file that are sent or read at once.
PIECE = 256 * 1024


class ServerUnreachable(Exception):
    """No answer at the address; the message names it and the way to start a server."""


class ServerError(Exception):
    """The server answered with an error. `status` is 0 for one inside a stream; `code` may be None."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"{message} ({', '.join(str(x) for x in (status or 'in the stream', code) if x)})")
        self.status = status
        self.message = message
        self.code = code


class Client:
    """Calls the server at `url`. Raises ServerUnreachable and ServerError. `timeout_s`: longest silence of a response."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerUnreachable(f"{url} is no address of a server; it looks like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """The decoded body; None where it is not JSON."""
        return self._read(self._send("GET", path, None))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._read(self._send("POST", path, body))

    def upload(self, name: str, file: BinaryIO, size: int, sent: Callable[[int], object] = lambda count: None) -> Any:
        """Uploads a file of `size` bytes for a batch; the file object. `sent` is told of each piece, bytes."""
        dividing = secrets.token_hex(16)
        quoted = name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
        head = (
            f'--{dividing}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{dividing}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{dividing}--\r\n".encode()

        def pieces() -> Iterator[bytes]:
            yield head
            while piece := file.read(PIECE):
                yield piece
                sent(len(piece))
            yield tail

        headers = {
            "Content-Type": f"multipart/form-data; boundary={dividing}",
            "Content-Length": str(len(head) + size + len(tail)),
        }
        return self._read(self._send("POST", "/v1/files", pieces(), headers))

    def download(self, path: str) -> Iterator[bytes]:
        """The body's bytes in pieces. One that breaks off is raised."""
        with self._send("GET", path, None) as response:
            try:
                while piece := response.read(PIECE):
                    yield piece
            except (OSError, http.client.HTTPException) as error:
                raise ServerUnreachable(f"The connection to {self.url} broke: {error!r}") from None

    def models(self) -> list[str]:
        return [model["id"] for model in self.get("/v1/models")["data"]]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data events of a stream, decoded, to `[DONE]`. An error event is raised; so is a stream that just stops."""
        response = self._send("POST", path, {**body, "stream": True})
        try:
            for data in data_lines(response):
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(0, event["error"].get("message", "error"), event["error"].get("code"))
                yield event
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(
                f"The connection to {self.url} broke in the middle of the stream: {error!r}"
            ) from None
        finally:
            response.close()
        raise ServerUnreachable(f"The stream from {self.url} ended without its closing [DONE].")

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | Iterator[bytes] | None,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        connection = self._connection(self._host, self._port, timeout=self._timeout_s)
        try:
            raw = json.dumps(body, ensure_ascii=False).encode() if isinstance(body, dict) else body
            connection.request(method, self._prefix + path, raw, {**self._headers, **(headers or {})})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerUnreachable(f"No server answers at {self.url} ({error}). Start one: ./scripts/up") from None
        if response.status >= 400:
            raise self._error(response)
        return response

    def _read(self, response: http.client.HTTPResponse) -> Any:
        with response:
            try:
                return json.loads(response.read())
            except ValueError:
                return None

    def _error(self, response: http.client.HTTPResponse) -> ServerError:
        try:
            error = self._read(response)["error"]
            return ServerError(response.status, error["message"], error.get("code"))
        except (TypeError, KeyError, OSError, http.client.HTTPException):
            return ServerError(response.status, response.reason or "no reason given")


def data_lines(lines: Iterable[bytes]) -> Iterator[str]:
    """The `data` of each server-sent event (WHATWG HTML, section 9.2.6): lines of one event joined, comments skipped."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
