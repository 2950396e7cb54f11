"""The protocol keeps its promises under a seeded adversary (run.py says which, and what is not real here)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import scripts
from tests.protocol.run import a_server, run_seed

ROOT = Path(__file__).parents[2]
FEW, MANY = 25, 100


def run(first: int, count: int) -> None:
    """Two processes, half of the seeds each."""
    half = first + count // 2
    parts = [f"{first}:{half}", f"{half}:{first + count}"]
    command = [sys.executable, "-m", "tests.protocol.run"]
    children = [
        subprocess.Popen([*command, part], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
        for part in parts
    ]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(outputs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, 100, FEW))
def test_seeds(first: int) -> None:
    run(first, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(100, 2000, MANY))
def test_more_seeds(first: int) -> None:
    run(first, MANY)


#: Mistakes in scripts, and how they are made. Each must be noticed within a few seeds, or the test above sees too little.
#: (One that the heartbeats put right by themselves is none.)
MISTAKES: dict[str, tuple[str, str, str]] = {
    "any entry is taken": (
        "emit",
        "if int(ta) ~= ARGV[4] or int(s) ~= ARGV[5] then return",
        "if false then return",
    ),
    "the dead keep what they had": ("reap", "give_back(id, j, w)", "local _ = id"),
    "a repeated submission is a second one": ("submit", "if R('EXISTS', key) == 0 then", "if true then"),
    "a key stands for nothing": ("submit", "if known[1] == idem then", "if false then"),
    "background work ends with its client": (
        "detach",
        "return let_go(",
        "R('HSET', 'rq:job:' .. ARGV[1], 'background', '') return let_go(",
    ),
    "batch goes first": ("take", "ipairs({ 'interactive', 'batch' })", "ipairs({ 'batch', 'interactive' })"),
}


#: Where to begin to look for what shows in one seed of fifty.
RARE = {"a repeated submission is a second one": 20}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, right, wrong = MISTAKES[mistake]
    genuine: Callable[[str], str] = scripts.text

    def text(which: str) -> str:
        found = genuine(which)
        if which == name:
            assert found.count(right) == 1
            return found.replace(right, wrong)
        return found

    monkeypatch.setattr(scripts, "text", text)
    scripts.sha.cache_clear()
    try:
        with a_server() as server:
            first = RARE.get(mistake, 0)
            assert any(run_seed(seed, server).wrong for seed in range(first, first + 25))
    finally:
        scripts.sha.cache_clear()
