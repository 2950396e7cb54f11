"""The whole product as a child process, and a client that knows of it what any client knows: HTTP.

`Stack` starts `sluice up` and ends it; `Client` talks to it. Nothing here imports the parts that are tested.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlencode

import pytest
import redis

from scripts import carried_model, ports
from shared import connection
from shared.settings import Settings
from tests.faults import processes
from workers.engines.llamacpp.carried import CARRIED_MODEL_ID

ROOT = Path(__file__).resolve().parent.parent

SCRIPTED = "scripted"
#: The model that comes with the product. Its ids for " Paris" and for the end of a text.
REAL = CARRIED_MODEL_ID
PARIS = 7042
END = 2

#: How long a stack may need to list its models, s.
READY_S = 100.0
#: An answer that takes this long is none, s.
ANSWER_S = 60.0

Leave = Literal["close", "half-close", "reset"]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Chat(list[dict[str, Any]]):
    """The messages of a chat. In the place of a prompt it makes the request one of `/v1/chat/completions`."""


def said(content: Any) -> Chat:
    """A chat in which the user has said something: for the scripted engine, its script."""
    return Chat([{"role": "user", "content": content}])


def path_of(prompt: Any) -> str:
    return CHATS if isinstance(prompt, Chat) else COMPLETIONS


def path_of_job(job_id: str) -> str:
    return f"{CHATS if job_id.startswith('chatcmpl-') else COMPLETIONS}/{job_id}"


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, whole or of a chunk, of whichever kind; of a chat without the reasoning."""
    return choice["text"] if "text" in choice else spoken(choice).get("content") or ""


def reasoning_of(choice: dict[str, Any]) -> str:
    return spoken(choice).get("reasoning_content") or ""


def calls_of(pieces: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """(name, arguments) of the calls in the pieces of one choice, or in the whole. Fails where ids and places do not fit."""
    found: list[list[str]] = []
    ids: list[str] = []
    for place, call in (item for piece in pieces for item in enumerate(spoken(piece).get("tool_calls", ()))):
        number = call.get("index", place)
        if "id" in call:
            assert number == len(found) and call["type"] == "function", call
            found.append([call["function"]["name"], ""])
            ids.append(call["id"])
        found[number][1] += call["function"]["arguments"]
    assert len(set(ids)) == len(ids)
    return tuple((name, arguments) for name, arguments in found)


def spoken(choice: dict[str, Any]) -> dict[str, Any]:
    """Message or delta."""
    found: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
    return found


def strict_json(raw: bytes | str) -> Any:
    """Raises ValueError for what is not JSON, NaN and Infinity among it."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(raw, parse_constant=refuse)


class Answer:
    """A response that came as a whole. `json` raises ValueError if the body is none."""

    def __init__(self, status: int, headers: dict[str, str], raw: bytes, seconds: float = 0.0) -> None:
        self.status, self.headers, self.raw, self.seconds = status, headers, raw, seconds

    def __repr__(self) -> str:
        return f"<{self.status} {self.raw[:300]!r}>"

    @property
    def json(self) -> Any:
        return strict_json(self.raw)

    @property
    def choice(self) -> dict[str, Any]:
        assert self.status == 200, self
        [choice] = self.json["choices"]
        return choice

    @property
    def text(self) -> str:
        return text_of(self.choice)

    @property
    def reasoning(self) -> str:
        return reasoning_of(self.choice)

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        return calls_of([self.choice])

    @property
    def finish(self) -> str:
        return self.choice["finish_reason"]

    @property
    def usage(self) -> dict[str, Any]:
        assert self.status == 200, self
        return self.json["usage"]

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Stream:
    """A streamed response, read as far as a test wants. Not an event stream (an error, for one): `answer` is set.

    `raw`: the body's bytes so far; `data`: its data events, decoded, with their `ids` (None: no id line) and `times`
    (s since the request); `comments`; `done`: how many `[DONE]`; `ended`: the body came to its end, in good order.
    """

    def __init__(
        self,
        connect: Callable[[float], http.client.HTTPConnection],
        body: dict[str, Any] | None,
        headers: dict[str, str],
        method: str = "POST",
        path: str = COMPLETIONS,
    ) -> None:
        self._began = time.monotonic()
        self._connection = connect(ANSWER_S)
        self.raw = b""
        self.data: list[dict[str, Any]] = []
        self.ids: list[str | None] = []
        self.times: list[float] = []
        self.comments: list[str] = []
        self.done = 0
        self.ended = False
        self.answer: Answer | None = None
        self._id: str | None = None
        try:
            self._socket = self._connection.sock
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
            self._response = self._connection.getresponse()
            self.status = self._response.status
            self.headers = lower(self._response.getheaders())
            if not self.headers.get("content-type", "").startswith("text/event-stream"):
                self.answer = Answer(self.status, self.headers, self._response.read())
        except BaseException:
            self._connection.close()
            raise

    def __repr__(self) -> str:
        return f"<{self.status} stream, ended {self.ended}, ...{self.raw[-300:]!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, until: Callable[[Self], Any] = lambda stream: False, timeout: float = ANSWER_S) -> Self:
        """Reads on until the condition holds (default: to the end). Fails after `timeout` s, and if a stream that is
        to be read up to a condition ends before. A connection that breaks raises OSError or HTTPException."""
        give_up = time.monotonic() + timeout
        while not self.ended and not until(self):
            left = give_up - time.monotonic()
            if left <= 0:
                pytest.fail(f"not so far after {timeout} s: {self}")
            self._socket.settimeout(left)
            try:
                line = self._response.readline()
            except TimeoutError:
                pytest.fail(f"silent for {left:.1f} s: {self}")
            self._take(line)
        return self

    def _take(self, line: bytes) -> None:
        if not line:
            self.ended = True
            return
        self.raw += line
        text = line.decode().rstrip("\r\n")
        if text.startswith(":"):
            self.comments.append(text)
        elif text.startswith("id:"):
            self._id = text[3:].strip()
        elif text.startswith("data:"):
            data = text[5:].strip()
            if data == "[DONE]":
                self.done += 1
                return
            self.data.append(strict_json(data))
            self.ids.append(self._id)
            self._id = None
            self.times.append(time.monotonic() - self._began)

    def goes_on(self, more: int = 1) -> Self:
        """Reads `more` further data events."""
        count = len(self.data) + more
        self.read(lambda stream: len(stream.data) >= count)
        assert len(self.data) >= count, f"ended early: {self}"
        return self

    @property
    def seconds(self) -> float:
        """Since the request was sent."""
        return time.monotonic() - self._began

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The choices of all chunks."""
        return [choice for chunk in self.data for choice in chunk.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(map(text_of, self.pieces))

    @property
    def reasoning(self) -> str:
        return "".join(map(reasoning_of, self.pieces))

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        return calls_of(self.pieces)

    @property
    def finish(self) -> str | None:
        """The one finish_reason, if there was one."""
        reasons = [choice["finish_reason"] for choice in self.pieces if choice["finish_reason"]]
        assert len(reasons) <= 1, reasons
        return reasons[0] if reasons else None

    @property
    def stop_reason(self) -> str | int | None:
        return next((choice["stop_reason"] for choice in self.pieces if choice["finish_reason"]), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        """Of the last event that has it."""
        return next((chunk["usage"] for chunk in reversed(self.data) if chunk.get("usage")), None)

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.data if "error" in event), None)

    @property
    def id(self) -> str:
        return self.headers["x-sluice-id"]

    def same_connection(self, path: str = "/health") -> int:
        """The status of one more request on the connection: the stream before it ended where it said."""
        assert self.ended, self
        self._socket.settimeout(ANSWER_S)
        self._connection.request("GET", path)
        with self._connection.getresponse() as response:
            response.read()
            return response.status

    def leave(self, how: Leave = "close") -> float:
        """The client hangs up; returns when it did (monotonic, s)."""
        if how == "half-close":
            self._socket.shutdown(socket.SHUT_WR)
            return time.monotonic()
        if how == "reset":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()
        return time.monotonic()

    def close(self) -> None:
        self._response.close()
        self._connection.close()


class Unanswered:
    """A request whose answer nobody has read, yet or ever: plain ones, and those that a test hangs up on."""

    def __init__(
        self, port: int, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = COMPLETIONS
    ) -> None:
        raw = json.dumps(body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n{more}"
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self.socket.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def leave(self, how: Leave = "close") -> float:
        if how == "half-close":
            self.socket.shutdown(socket.SHUT_WR)
            return time.monotonic()
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        return time.monotonic()


class Client:
    """Calls the server on a port of this machine, one connection a call. `key`: the API key to show, "" for none."""

    def __init__(self, port: int, key: str = "") -> None:
        self.port = port
        self.key = key

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A new connection to the server."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        client.connect()
        return client

    def _headers(self, more: dict[str, str] | None) -> dict[str, str]:
        shown = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **shown, **(more or {})}

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = ANSWER_S,
    ) -> Answer:
        """`raw`: the body's bytes as they are. A header given as "" is not sent."""
        sent = self._headers(headers)
        began = time.monotonic()
        client = self.connect(timeout)
        try:
            content = raw if raw is not None else None if body is None else json.dumps(body).encode()
            client.request(method, path, content, {name: value for name, value in sent.items() if value})
            response = client.getresponse()
            read = response.read()
            return Answer(response.status, lower(response.getheaders()), read, time.monotonic() - began)
        finally:
            client.close()

    def complete(
        self, prompt: Any, *, model: str | None = SCRIPTED, timeout: float = ANSWER_S, **fields: Any
    ) -> Answer:
        return self.call("POST", path_of(prompt), body(prompt, model, fields), timeout=timeout)

    def open(
        self, prompt: Any, *, model: str | None = SCRIPTED, headers: dict[str, str] | None = None, **fields: Any
    ) -> Stream:
        """A stream whose headers are there."""
        asked = body(prompt, model, {"stream": True, **fields})
        return Stream(self.connect, asked, self._headers(headers), path=path_of(prompt))

    def stream(self, prompt: Any, *, timeout: float = ANSWER_S, **more: Any) -> Stream:
        """A stream read to its end; check `answer` if there may be none."""
        with self.open(prompt, **more) as stream:
            return stream if stream.answer else stream.read(timeout=timeout)

    def resume(
        self, job_id: str, cursor: str | None = None, *, headers: dict[str, str] | None = None, **query: str
    ) -> Stream:
        """The stream of an earlier request, behind an event; its headers are there."""
        sent = {**({} if cursor is None else {"Last-Event-ID": cursor}), **(headers or {})}
        path = f"{path_of_job(job_id)}?{urlencode({'stream': 'true', **query})}"
        return Stream(self.connect, None, sent, "GET", path)

    def job(self, job_id: str) -> Answer:
        return self.call("GET", path_of_job(job_id))

    def cancel(self, job_id: str) -> Answer:
        return self.call("POST", f"{path_of_job(job_id)}/cancel")

    def ask(
        self, prompt: Any, *, model: str | None = SCRIPTED, headers: dict[str, str] | None = None, **fields: Any
    ) -> Unanswered:
        """Sends a request and does not wait for anything."""
        return Unanswered(self.port, body(prompt, model, fields), headers, path_of(prompt))

    def status(self) -> dict[str, Any]:
        answer = self.call("GET", "/v1/status")
        assert answer.status == 200, answer
        return answer.json

    def busy(self, model: str = SCRIPTED) -> int:
        """Lanes that run something."""
        return sum(worker["busy"] for worker in self.status()["workers"] if worker["model"] == model)

    def queue(self, model: str = SCRIPTED) -> tuple[int, int]:
        """(waiting, running), as the queue's books say."""
        rows = [row for row in self.status()["queues"] if row["model"] == model]
        return sum(row["waiting"] for row in rows), sum(row["running"] for row in rows)

    def idle(self) -> bool:
        """Nothing runs and nothing waits, by every count that is shown."""
        state = self.status()
        counts = [worker["busy"] for worker in state["workers"]]
        counts += [row[count] for row in state["queues"] for count in ("waiting", "running")]
        counts += [node["streams"] for node in state["nodes"]]
        return not any(counts)

    def models(self) -> list[str]:
        return [model["id"] for model in self.call("GET", "/v1/models").json["data"]]

    def serves(self, *models: str) -> bool:
        """Whether these models can be used now; not being reachable is no."""
        try:
            answer = self.call("GET", "/v1/status", timeout=5)
        except (OSError, http.client.HTTPException):
            return False
        return answer.status == 200 and {m["id"] for m in answer.json["models"] if m["ready"]} >= set(models)


class Stack(Client):
    """`sluice up` in a session of its own, on a free port and a fresh data folder. A context manager.

    `options` go to the command line, `real` is the id of the model that is not scripted, `settings` (lower-case names) to
    the environment. `module` is what runs as `sluice`."""

    def __init__(
        self,
        folder: Path,
        engines: Sequence[str] = (SCRIPTED,),
        *,
        options: Sequence[str] = (),
        real: str = REAL,
        key: str = "",
        module: str = "scripts.cli",
        **settings: object,
    ) -> None:
        super().__init__(free_port(), key)
        self.folder = folder
        self.engines = engines
        self.real = real
        if "llamacpp" in engines and real == REAL:
            carried_model.ensure(Settings().cache_dir)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == "SLUICE_CACHE_DIR" or (name != "REDIS_URL" and not name.startswith("SLUICE_"))
        }
        self.env = {
            **inherited,
            "SLUICE_DATA_DIR": str(folder / "data"),
            **{f"SLUICE_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.command = [sys.executable, "-m", module, "up", "--port", str(self.port), *options]
        for engine in engines:
            self.command += ["--engine", engine]
        self._log = folder / "log.txt"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        wanted = [SCRIPTED if engine == SCRIPTED else self.real for engine in self.engines]
        give_up = time.monotonic() + READY_S
        while not self.serves(*wanted):
            if self.process.poll() is not None:
                pytest.fail(f"`up` ended with {self.process.returncode}:\n{self.log()[-3000:]}")
            if time.monotonic() > give_up:
                pytest.fail(f"not ready after {READY_S} s:\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """pid -> command line of all that runs in the session, `up` included; zombies do not."""
        return processes.in_session(self.process.pid)

    def pids(self, part: str) -> list[int]:
        """Of the processes whose command line holds `part`, oldest first."""
        return sorted(pid for pid, command in self.processes().items() if part in command)

    def workers(self) -> list[int]:
        return sorted(self.pids(" -m workers ") + self.pids(" -m tests.exllamav2.worker "))

    def api_processes(self) -> list[int]:
        """The processes that answer; not the master, which is the first."""
        return self.pids(" -m api")[1:]

    def stores(self) -> list[int]:
        return self.pids("-server ")

    @property
    def url(self) -> str:
        """Of the stack's own store."""
        owner = json.loads((self.folder / "data" / "lock").read_text())
        return f"unix://{owner['socket_folder']}/store.sock"

    @contextlib.contextmanager
    def store(self) -> Iterator[redis.Redis]:
        """The stack's own store, for what HTTP does not show."""
        client = connection.connect(self.url)
        with contextlib.closing(client):
            yield client

    def close(self) -> None:
        """SIGTERM, and what is left after its time is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(45)
        processes.end(self.process.pid)
        self.process.wait(10)


def run_keys(environment: dict[str, str], *words: str) -> Any:
    """`sluice keys ... --json`."""
    command = [sys.executable, "-m", "scripts.cli", "keys", *words, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lower(headers: list[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def body(prompt: Any, model: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    asked = {"messages": prompt} if isinstance(prompt, Chat) else {"prompt": prompt}
    return {**({} if model is None else {"model": model}), **asked, **fields}


#: Below those that the system gives to whoever connects; each process of the tests begins at another.
_PORTS = itertools.count(os.getpid() * 101 % 11_000)


def free_port() -> int:
    while not ports.is_free("127.0.0.1", port := 20_000 + next(_PORTS) % 11_000):
        pass
    return port


def hexes(*pieces: str, **more: Any) -> str:
    """A prompt for the scripted engine whose pieces are bytes in hexadecimal."""
    return json.dumps({"hex": pieces, **more})


def endless(**more: Any) -> str:
    """A prompt for the scripted engine that never ends by itself."""
    return json.dumps({"pieces": ["tick "], "repeat": 0, **more})


def event_name(event_id: str) -> tuple[int, int, int]:
    """`{attempt}-{seq}` or `{attempt}-{seq}.{k}` as numbers, which only ever grow within a stream."""
    match = re.fullmatch(r"(\d+)-(\d+)(?:\.(\d+))?", event_id)
    assert match, event_id
    return int(match[1]), int(match[2]), int(match[3] or 0)
