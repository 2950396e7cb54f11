"""`sluice batch` as a person uses it: a file in, results beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batches import codes, line, lines, look, started, texts
from tests.conftest import ROOT, script, wait_for
from tests.stack import Stack, endless


def sluice(stack: Stack, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.cli", "batch", *words, "--url", f"http://127.0.0.1:{stack.port}"]
    done = subprocess.run(command, cwd=ROOT, env=stack.env, capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_run(stack: Stack, tmp_path: Path, direct: bool) -> None:
    file = tmp_path / "my requests.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines(30) + b"\n" + line("bad", temperature=9))
    done = sluice(stack, "run", str(file), "--json", *(["--direct"] if direct else []), status=1)
    told = json.loads(done.stdout)
    assert told["status"] == "completed"
    assert told["request_counts"] == {"total": 31, "completed": 30, "failed": 1}
    assert texts(read(tmp_path / "my requests.jsonl.output.jsonl")) == {f"line-{n}": f"line-{n}" for n in range(30)}
    assert codes(read(tmp_path / "my requests.jsonl.errors.jsonl")) == {"bad": "invalid_value"}
    assert "31/31" in done.stderr and "1 failed" in done.stderr


def test_without_uploading_it_goes_on_where_it_was(stack: Stack, tmp_path: Path) -> None:
    """What is in the output is not sent again, and a row that was cut off is."""
    file, out, err = tmp_path / "in", tmp_path / "out", tmp_path / "err"
    file.write_bytes(lines(5))
    sluice(stack, "run", str(file), "-o", str(out), "--errors", str(err), "--direct")
    kept = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:3]) + kept[3][:20])
    sluice(stack, "run", str(file), "-o", str(out), "--errors", str(err), "--direct")
    again = out.read_bytes().splitlines(keepends=True)
    assert again[:3] == kept[:3] and len(texts(read(out))) == 5 and err.read_bytes() == b""


def test_what_is_wrong_is_said(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(lines(2) + b"{bad\n")
    for words in ([], ["--direct"]):
        done = sluice(stack, "run", str(file), *words, status=1)
        assert "line 3" in done.stderr and "JSON" in done.stderr
    file.write_bytes(b"no json\n")
    assert "first line" in sluice(stack, "run", str(file), status=1).stderr
    assert "There is no such batch" in sluice(stack, "show", "batch_0", status=1).stderr


def test_batches_are_listed_cancelled_fetched_and_replayed(stack: Stack, tmp_path: Path) -> None:
    batch_id = started(stack, line("short") + line("endless", endless(delay_ms=20)))
    wait_for(lambda: look(stack, batch_id)["request_counts"]["completed"], 60)
    assert batch_id in [batch["id"] for batch in json.loads(sluice(stack, "list", "--json").stdout)["data"]]
    assert batch_id in sluice(stack, "list").stdout
    assert json.loads(sluice(stack, "cancel", batch_id).stdout)["status"] == "cancelling"
    out, err = tmp_path / "out", tmp_path / "err"
    sluice(stack, "fetch", batch_id, "-o", str(out), "--errors", str(err))
    assert texts(read(out)) == {"short": "short"} and codes(read(err)) == {"endless": "batch_cancelled"}
    again = json.loads(sluice(stack, "replay", batch_id).stdout)
    assert again["replay_of"] == batch_id
    wait_for(lambda: look(stack, again["id"])["request_counts"]["total"] == 1, 60)
    sluice(stack, "cancel", again["id"])
    wait_for(stack.idle, 30)
    assert json.loads(sluice(stack, "show", again["id"]).stdout)["request_counts"]["completed"] == 0


def test_standard_output_has_only_what_was_asked_for(stack: Stack, tmp_path: Path) -> None:
    """The progress is on standard error."""
    file = tmp_path / "in"
    file.write_bytes(line("a", script("x")))
    assert sluice(stack, "run", str(file)).stdout == ""
