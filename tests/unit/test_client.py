"""The command line's own client: what comes out of a stream however it is cut, and every way it can go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import ports
from scripts.client import Client, ServerError, ServerUnreachable, data_lines
from tests.conftest import ROOT


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1), max_size=5), st.booleans()
)
def test_data_comes_out_as_it_went_in(texts: list[str], crlf: bool) -> None:
    end = "\r\n" if crlf else "\n"
    sent = "".join(f": comment{end}id: 1-2{end}data: {text}{end}{end}" for text in texts)
    assert list(data_lines(sent.encode().splitlines(keepends=True))) == texts


def test_lines_of_one_event_are_joined_and_an_unfinished_event_is_dropped() -> None:
    assert list(data_lines([b"data: a\n", b"data:b\n", b"\n", b"data: half\n"])) == ["a\nb"]


class Handler(BaseHTTPRequestHandler):
    """A server that answers as Sluice does. The prompt says how it behaves."""

    def log_message(self, *arguments: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "sluice"}]})
        else:
            self._answer(404, {"error": {"message": "No such path.", "type": "x", "param": None, "code": "not_found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") == "Bearer wrong":
            self._answer(401, {"error": {"message": "No.", "type": "x", "param": None, "code": "invalid_api_key"}})
        elif not body.get("stream"):
            self._answer(
                200, {"model": body.get("model", "tiny"), "choices": [{"index": 0, "text": body["prompt"].upper()}]}
            )
        else:
            self._stream(body["prompt"])

    def _answer(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, prompt: str) -> None:
        self.send_response(200)
        self.end_headers()
        for word in prompt.split():
            self._event({"choices": [{"index": 0, "text": word + " "}]})
        if "fail" in prompt:
            self._event({"error": {"message": "worker died", "type": "x", "param": None, "code": "worker_lost"}})
        if "cut" not in prompt:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: object) -> None:
        self.wfile.write(f": hello\nid: 1-1\ndata: {json.dumps(event)}\n\n".encode())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def text(client: Client, prompt: str) -> str:
    events = client.stream("/v1/completions", {"model": "tiny", "prompt": prompt})
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_given_as_the_official_client_wants_it(url: str, suffix: str) -> None:
    assert Client(url + suffix).models() == ["tiny"]


def test_a_stream_is_read_to_its_end(url: str) -> None:
    assert text(Client(url), "a bé c") == "a bé c "


def test_errors_carry_what_the_server_said(url: str) -> None:
    with pytest.raises(ServerError, match="No such path") as caught:
        Client(url).get("/nothing")
    assert (caught.value.status, caught.value.code) == (404, "not_found")
    with pytest.raises(ServerError, match="invalid_api_key"):
        text(Client(url, "wrong"), "a")


def test_a_stream_that_fails_or_stops_is_no_completion(url: str) -> None:
    with pytest.raises(ServerError, match="worker died"):
        text(Client(url), "a fail")
    with pytest.raises(ServerUnreachable, match="DONE"):
        text(Client(url), "a cut")


def test_no_server_is_said_with_the_way_to_one() -> None:
    with pytest.raises(ServerUnreachable, match=r"\./scripts/up"):
        Client(f"http://127.0.0.1:{ports.any_free()}").models()


def sluice(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_complete_prints_the_text(url: str) -> None:
    assert sluice("complete", "one two", "--url", url).stdout == "one two "
    assert sluice("complete", "--url", url, stdin="from a pipe").stdout == "from a pipe "
    assert sluice("complete", "-", "--url", url, stdin="from a pipe").stdout == "from a pipe "
    assert sluice("complete", "loud", "--url", url, "--no-stream").stdout == "LOUD"


def test_a_stream_that_fails_leaves_its_text_on_standard_output_and_the_reason_on_the_other(url: str) -> None:
    failed = sluice("complete", "some text fail", "--url", url)
    assert (failed.returncode, failed.stdout) == (1, "some text fail ")
    assert failed.stderr == "sluice: worker died (in the stream, worker_lost)\n"


def test_a_prompt_that_is_no_text_is_refused(url: str) -> None:
    command = [sys.executable, "-m", "scripts.cli", "complete", "--url", url]
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"sluice: The prompt on standard input is not UTF-8 (byte 3).\n"


#: What each shell sends when the words so far are `sluice complete --model t`, as its completion script says.
SHELLS = {
    "bash": {
        "_SLUICE_COMPLETE": "complete_bash",
        "COMP_WORDS": "sluice complete --url URL --model t",
        "COMP_CWORD": "5",
    },
    "zsh": {"_SLUICE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "sluice complete --url URL --model t"},
    "fish": {
        "_SLUICE_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": "sluice complete --url URL --model t",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("running", [True, False])
def test_model_names_are_completed_if_there_is_a_server(url: str, shell: str, running: bool) -> None:
    server = url if running else f"http://127.0.0.1:{ports.any_free()}"
    asked = {name: value.replace("URL", server) for name, value in SHELLS[shell].items()}
    command = [sys.executable, "-m", "scripts.cli"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ("tiny" in done.stdout) is running, done
    assert not done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_can_be_shown(shell: str) -> None:
    asked = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "scripts.cli", "--show-completion", shell]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert f"complete_{shell}" in done.stdout and "_SLUICE_COMPLETE" in done.stdout


def test_complete_as_json_prints_the_servers_events(url: str) -> None:
    printed = sluice("complete", "a b", "--url", url, "--json").stdout.splitlines()
    assert [json.loads(line)["choices"][0]["text"] for line in printed] == ["a ", "b "]


def test_models_as_table_and_json(url: str) -> None:
    assert "tiny" in sluice("models", "--url", url).stdout
    assert json.loads(sluice("models", "--url", url, "--json").stdout)["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["complete", "x", "--url", "http://127.0.0.1:1"], "No server answers"),
        (["models", "--url", "ftp://x"], "no address"),
        (["bench", "nonsense"], "NAME one of"),
        (["up", "--engine", "nonsense"], "no such engine"),
        (["up", "--port", "70000"], "A setting is wrong: port"),
    ],
)
def test_what_goes_wrong_is_one_line(arguments: list[str], says: str) -> None:
    ended = sluice(*arguments)
    assert ended.returncode == 1
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
