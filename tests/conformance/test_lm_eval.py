"""lm-eval's `local-completions` against the server: the numbers are those of transformers on the very same weights.

The server is asked twice: with the file it serves by default (8-bit weights, which llama.cpp multiplies with activations
that it rounds to 8 bits as well), and with the same weights written as 32-bit floats. The first shows what that
arithmetic costs, the second that nothing else differs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts import carried_model
from shared.settings import Settings
from tests.conformance import environments
from tests.stack import REAL, Stack
from workers.engines.llamacpp.convert import fastest_form
from workers.engines.llamacpp.model import identity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: Largest difference with 32-bit weights, natural logarithm, per token; the rest is the cache in 16 bits.
#: What was measured stands in docs/conformance.md.
AS_FLOATS = 0.02
#: With 8-bit weights: per token of long continuations, and how far the error of all may be from the one that rounding
#: activations makes in transformers itself.
AS_SERVED_LONG, AS_SERVED_RATIO = 0.08, 2.0


class Converted(NamedTuple):
    """A folder for transformers, made of the file the server loads, and the same weights as 32-bit floats."""

    folder: Path
    floats: Path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    cache = Settings().cache_dir
    carried = carried_model.ensure(cache)
    served = fastest_form(carried, identity(carried), cache, lambda part: None)
    folder = tmp_path_factory.mktemp("weights") / "hf"
    command = [str(environments.python("lm-eval")), str(environments.HERE / "gguf_to_hf.py"), str(served), str(folder)]
    subprocess.run(command, check=True, timeout=600)
    return Converted(folder, folder / "f32.gguf")


@pytest.fixture(scope="module")
def floats(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("floats"),
        ("llamacpp",),
        options=("--model", f"{converted.floats}={REAL}"),
    ) as stack:
        yield stack


def run(stack: Stack, model: str, folder: Path, *more: str) -> dict[str, Any]:
    """The report of one run. The tokenizer is the server's where it serves one."""
    remote = stack.call("GET", "/tokenizer_info").status == 200
    command = [
        str(environments.python("lm-eval")),
        str(environments.HERE / "lm_eval_run.py"),
        *(f"http://127.0.0.1:{stack.port}", model, str(folder)),
        *("--tokenizer", "remote" if remote else "huggingface"),
        *more,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("REPORT ")]
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    per_token = [row["per_token"] for row in report["rows"]]
    print(report["scores"], "mean", sum(per_token) / len(per_token), "worst", max(per_token))
    return report


@pytest.fixture(scope="module")
def as_served(stack: Stack, converted: Converted) -> dict[str, Any]:
    return run(stack, REAL, converted.folder, "--rounded")


@pytest.fixture(scope="module")
def as_floats(floats: Stack, converted: Converted) -> dict[str, Any]:
    return run(floats, REAL, converted.folder)


def test_loglikelihoods_of_float_weights_are_those_of_transformers(as_floats: dict[str, Any]) -> None:
    assert len(as_floats["rows"]) >= 70
    assert not [row for row in as_floats["rows"] if row["per_token"] > AS_FLOATS]
    assert all(row["same_greedy"] for row in as_floats["rows"])


def test_the_served_file_differs_by_the_rounding_of_activations_and_no_more(as_served: dict[str, Any]) -> None:
    rows = as_served["rows"]
    assert max(row["per_token"] for row in rows if row["tokens"] >= 10) <= AS_SERVED_LONG
    served = sum(row["per_token"] for row in rows)
    rounded = sum(row["rounded_per_token"] for row in rows)
    assert rounded / AS_SERVED_RATIO <= served <= rounded * AS_SERVED_RATIO


@pytest.mark.parametrize("file", ["as_served", "as_floats"])
def test_an_easy_choice_is_made_right(file: str, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(file)
    assert report["scores"]["sluice_two_way"]["acc"] >= 0.9
    assert report["scores"]["sluice_two_way"]["acc"] == report["reference_scores"]["sluice_two_way"]["acc"]


@pytest.mark.parametrize("file", ["as_served", "as_floats"])
def test_the_end_token_can_be_the_right_continuation(file: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(file)["scores"]["sluice_ends"]["acc"] == 1.0
