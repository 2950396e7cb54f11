"""What README.md shows is run as it stands there; only the port is another one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import ROOT, Stack

README = (ROOT / "README.md").read_text()


def block(start: str) -> str:
    """The indented lines of the README from the one that begins with `start`, with its continuation lines."""
    lines = README[README.index("    " + start) :].splitlines()
    taken = [lines[0]]
    while taken[-1].endswith("\\"):
        taken.append(lines[len(taken)])
    return "\n".join(line.removeprefix("    ") for line in taken)


def run(command: str, stack: Stack) -> str:
    command = command.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    return done.stdout


def test_the_curl_line_gives_what_is_shown(stack: Stack) -> None:
    answer = run(block("curl -N"), stack)
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    shown = [json.loads(line.strip()[6:]) for line in README.splitlines() if line.strip().startswith("data: {")]
    assert answer.endswith("data: [DONE]\n\n")
    assert events[0]["choices"][0]["text"] == shown[0]["choices"][0]["text"]
    assert events[-1]["usage"] == shown[-1]["usage"]
    for event, line in ((events[0], shown[0]), (events[-1], shown[-1])):
        assert event.keys() == line.keys()


EXAMPLES = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n((?: {4}[^\n]*\n|\n)+)", README, re.DOTALL)


@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=["completion", "chat"])
def test_the_client_examples_print_what_is_shown(stack: Stack, tmp_path: Path, code: str, shown: str) -> None:
    example = tmp_path / "example.py"
    example.write_text(code.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}"))
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == shown.split()


@pytest.mark.parametrize("start", ["sluice complete", "sluice models"])
def test_the_sluice_commands_work(start: str, stack: Stack) -> None:
    command = block(start).replace("sluice", f"{sys.executable} -m scripts.cli", 1)
    answer = run(f"{command} --url http://127.0.0.1:{stack.port}", stack)
    assert ("Paris" if "complete" in start else "smollm2-135m-instruct") in answer


def test_every_path_that_is_named_exists() -> None:
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`\./(scripts/\w+)", README):
        assert (ROOT / name).exists(), name


def test_every_page_of_docs_is_named() -> None:
    assert "docs/README.md" in README
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"({page.name})" in index or page.name == "README.md"
