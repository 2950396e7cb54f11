"""`sluice keys` as a person types it, on a data folder that no server uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.store import DataFolder
from tests.conftest import ROOT


def keys(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "REDIS_URL" and "SLUICE" not in name}
    env = {**inherited, "SLUICE_DATA_DIR": str(folder), "COLUMNS": "80", **environment}
    command = [sys.executable, "-m", "scripts.cli", "keys", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done


def test_a_key_is_shown_once_and_kept_without_a_server(tmp_path: Path) -> None:
    made = keys(tmp_path, "add", "--tenant", "shop", "--rpm", "60", "--class", "batch", "--name", "[b]search[/b]")
    assert made.returncode == 0
    [secret] = made.stdout.split()  # nothing else: it can go into a file or a variable
    assert secret.startswith("sk-sluice-") and "only now" in made.stderr
    listed = keys(tmp_path, "list").stdout
    assert secret not in listed and secret[-4:] in listed
    for word in ("shop", "[b]search[/b]", "60 requests/min", "batch", "never"):
        assert word in listed
    key_id = next(word for word in listed.split() if word.startswith("key-"))
    assert keys(tmp_path, "revoke", key_id).returncode == 0
    assert keys(tmp_path, "revoke", key_id).returncode == 0
    assert "revoked" in keys(tmp_path, "list").stdout
    with DataFolder(tmp_path):  # the store it started is gone, and so is its lock
        pass


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("add", "--scope", "root"), "There is no scope root. There are: completions, chat"),
        (("add", "--class", "gold"), "interactive, and batch"),
        (("add", "--tenant", "a:b"), "A tenant is"),
        (("add", "--rpm", "0"), "from 1 on"),
        (("revoke", "key-none"), "There is no key key-none"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = keys(tmp_path, *words)
    assert done.returncode == 1 and says in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_a_store_out_of_reach_is_said_without_its_password(tmp_path: Path) -> None:
    done = keys(tmp_path, "list", REDIS_URL="redis://me:secret@127.0.0.1:1")
    assert done.returncode == 1 and "me:***@127.0.0.1:1" in done.stderr and "secret" not in done.stderr
