"""A small client of a running Sluice for the command line: JSON calls and streamed completions, standard library only.

Knows the shapes of the HTTP contract; prints nothing.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit


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

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = self._connection(self._host, self._port, timeout=self._timeout_s)
        try:
            raw = None if body is None else json.dumps(body, ensure_ascii=False).encode()
            connection.request(method, self._prefix + path, raw, self._headers)
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
