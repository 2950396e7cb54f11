"""Thousands of random requests after the OpenAPI document: no 5xx, and no answer that the document does not describe."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import environments
from tests.stack import REAL, SCRIPTED, Stack

FUZZ = environments.HERE / "fuzz.py"
#: Model -> ids in its vocabulary.
VOCABULARY = {SCRIPTED: 65_536, REAL: 49_152}
#: The only answers of 500 and above: a text without the form that was asked for, and a cursor that its stream never had.
DOCUMENTED = ("502 structured_output_failed", "503 log_lost")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("fuzz"), (SCRIPTED,)) as stack:
        yield stack


def fuzz(stack: Stack, model: str, requests: int, *, max_tokens: int, timeout: float) -> dict[str, Any]:
    """The report of a run."""
    command = [
        str(environments.python("fuzz")),
        str(FUZZ),
        f"http://127.0.0.1:{stack.port}",
        *("--model", model, "--vocab", str(VOCABULARY[model])),
        *("--requests", str(requests), "--max-tokens", str(max_tokens)),
        *("--unbounded", "0.05" if model == SCRIPTED else "0"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report: dict[str, Any] = json.loads(ended.stdout)
    print({key: value for key, value in report.items() if key != "failures"})
    return report


def passed(report: dict[str, Any], requests: int) -> None:
    assert report["failures"] == [], (len(report["failures"]), report["failures"][:5])
    assert report["requests"] == requests
    failed = sum(count for status, count in report["statuses"].items() if status >= "5")
    documented = [count for refusal, count in report["refusals"].items() if refusal.startswith(DOCUMENTED)]
    assert failed == sum(documented), (report["statuses"], report["refusals"])
    assert report["valid_served"] * 2 >= report["valid"], report["refusals"]


@pytest.mark.timeout(180)
def test_a_few_hundred(request: pytest.FixtureRequest) -> None:
    if not environments.is_made("fuzz"):
        pytest.skip(
            "schemathesis is not there: python -m tests.conformance.environments installs it, and so do the slow tests"
        )
    scripted = request.getfixturevalue("scripted")
    passed(fuzz(scripted, SCRIPTED, 300, max_tokens=16, timeout=170), 300)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands(scripted: Stack) -> None:
    passed(fuzz(scripted, SCRIPTED, 5000, max_tokens=16, timeout=1700), 5000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model(stack: Stack) -> None:
    passed(fuzz(stack, REAL, 200, max_tokens=6, timeout=1200), 200)
