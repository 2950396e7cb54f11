"""Clients that people use, as they come from their registries, against the real model.

Each completes and streams the same prompt, must get the same text both ways and the text that plain HTTP gives, usage,
a stop string that works, and its own exception for a 400.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import environments
from tests.stack import REAL, Stack
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "The capital of France is"
FIELDS: dict[str, Any] = {"model": REAL, "max_tokens": 24, "temperature": 0, "seed": 1}


def read(command: Sequence[str | Path], **more: Any) -> dict[str, Any]:
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **more)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    print(json.dumps(found, ensure_ascii=False))
    return found


def url(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.port}"


def run_node(stack: Stack, script: str, model: str = REAL) -> dict[str, Any]:
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js 20 or newer")
    folder = environments.node("node")
    return read(["node", script, url(stack), model, PROMPT], cwd=folder)


def check(
    found: dict[str, Any], stack: Stack, prompt: str = PROMPT, stop: Sequence[str] = (".",), **fields: Any
) -> None:
    """Text, stop and usage are those of plain HTTP."""
    plain = stack.complete(prompt, **FIELDS, **fields)
    stopped = stack.complete(prompt, **FIELDS, stop=stop)
    assert found["text"] == found["streamed"] == plain.text
    assert found["stopped"] == stopped.text
    assert stop[-1] not in found["stopped"]
    assert found["finish"] == plain.finish
    assert found["stopped_finish"] == "stop"
    for usage in (found["usage"], found.get("streamed_usage", found["usage"])):
        assert usage["prompt_tokens"] == plain.usage["prompt_tokens"]
        assert usage["completion_tokens"] == plain.usage["completion_tokens"]


BAD_FIELD = {"kind": "BadRequestError", "status": 400, "code": "invalid_value", "param": "temperature"}


def test_openai_for_node(stack: Stack) -> None:
    found = run_node(stack, "openai.mjs")
    check(found, stack)
    assert found["error"] == BAD_FIELD
    assert found["missing"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found"}
    assert REAL in found["models"]


def test_vercel_ai_sdk(stack: Stack) -> None:
    found = run_node(stack, "vercel.mjs")
    check(found, stack, found["sent_prompt"], stop=["\nuser:", "."])
    assert (found["error"]["kind"], found["error"]["status"]) == ("AI_APICallError", 400)
    assert "temperature" in found["error"]["message"]


def test_continue(stack: Stack) -> None:
    found = run_node(stack, "continue.mjs")
    check(found, stack)
    assert found["error"] == BAD_FIELD
    assert found["suffix"] == {
        "status": 400,
        "code": "unsupported_parameter",
        "param": "suffix",
    }  # it has no such tokens


def test_continue_fills_in_the_middle(tmp_path: Path) -> None:
    """On a tiny random model that has the tokens: what comes is what plain HTTP gives for prompt and suffix."""
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with Stack(tmp_path, ("llamacpp",), options=["--model", f"{model}=tiny"], real="tiny") as stack:
        found = run_node(stack, "continue.mjs", "tiny")
        asked = {**FIELDS, "model": "tiny", "suffix": "\n    return c\n"}
        assert found["suffix"]["text"] == stack.complete("def add(a, b):\n", **asked).text


def test_langchain(stack: Stack) -> None:
    interpreter = environments.python("clients")
    found = read([interpreter, environments.HERE / "langchain_client.py", url(stack), REAL, PROMPT])
    check(found, stack)
    assert found["error"] == BAD_FIELD
    assert [len(choices) for choices in found["batch"]] == [2, 2]
    assert set(found["batch"][0]) == {found["text"]}


def test_llm(stack: Stack, tmp_path: Path) -> None:
    """The `llm` command, with the server as one of its extra models."""
    llm = environments.python("clients").with_name("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: {REAL}\n  api_base: {url(stack)}/v1\n  completion: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    asked = [llm, "-m", "mine", "-o", "max_tokens", "24", "-o", "temperature", "0", "-o", "seed", "1"]

    def say(*more: str) -> subprocess.CompletedProcess[str]:
        command = [str(part) for part in (*asked, *more, PROMPT)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    def logged() -> list[dict[str, Any]]:
        command = [str(llm), "logs", "-n", "2", "--json"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
        return [entry["response_json"] for entry in json.loads(shown.stdout)]

    plain = stack.complete(PROMPT, **FIELDS)
    once, streamed = say("--no-stream"), say()
    assert (once.returncode, streamed.returncode) == (0, 0), once.stderr + streamed.stderr
    assert once.stdout.rstrip("\n") == streamed.stdout.rstrip("\n") == plain.text.rstrip("\n")
    # For completion models the command shows no usage, but it keeps what the last chunk said.
    for answered in logged():
        assert answered["usage"]["prompt_tokens"] == plain.usage["prompt_tokens"]
        assert answered["usage"]["completion_tokens"] == plain.usage["completion_tokens"]
    stopped = say("-o", "stop", ".")
    assert stopped.stdout.rstrip("\n") == stack.complete(PROMPT, **FIELDS, stop=".").text.rstrip("\n")
    failed = say("-o", "logit_bias", '{"99999999": 1}')
    assert failed.returncode != 0
    assert "logit_bias" in failed.stderr


def test_instructor(stack: Stack) -> None:
    """A pydantic model by a tool that must be called, and by a schema: what comes is one, at the first try."""
    found = read([environments.python("instructor"), environments.HERE / "instructor_client.py", url(stack), REAL])
    assert len(found) == 2
    for person in found.values():
        assert person.keys() == {"name", "age", "mood"} and 0 <= person["age"] <= 130 and len(person["name"]) <= 30
