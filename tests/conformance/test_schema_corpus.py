"""Schemas that other people wrote: answered right, refused, or cut off, and nothing in between."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance import schema_corpus
from tests.conformance.schema_corpus import FUNCTIONS, SUITE, Case, Outcome
from tests.conftest import needs_jsonschema
from tests.stack import Stack

#: Of all schemas of a source, how many have a valid answer at least, are cut off at most, and fail at most. (Where masks enforce
#: a schema in part, a text may turn out wrong: then the answer says so.)
MARKS = {SUITE: (0.7, 0.05, 0.02), FUNCTIONS: (0.9, 0.05, 0.0)}
#: Of the sample, so many are the quick look.
LEAN = 20


def judge(outcomes: list[Outcome], slack: float = 0.0) -> None:
    wrong = [outcome for outcome in outcomes if outcome.kind in ("invalid", "error")]
    assert not wrong, wrong[:3]
    for source, (valid, length, failed) in MARKS.items():
        own = [outcome for outcome in outcomes if outcome.case.source == source]
        kinds = Counter(outcome.kind for outcome in own)
        told = [outcome for outcome in own if outcome.kind != "valid"]
        assert kinds["valid"] >= len(own) * (valid - slack), told
        assert kinds["length"] <= len(own) * (length + slack), told
        assert kinds["failed"] <= len(own) * (failed + slack), told


@needs_jsonschema
@pytest.mark.slow
@pytest.mark.parametrize("cases", [pytest.param(LEAN, id="lean"), pytest.param(60, id="all")])
@pytest.mark.timeout(600)
def test_a_sample_of_schemas(stack: Stack, cases: int) -> None:
    sample = schema_corpus.sample()
    assert len(sample) == 60
    chosen: list[Case] = sample[:: 60 // cases]
    judge(
        list(schema_corpus.ask_all(stack, chosen)), slack=0.25 if cases == LEAN else 0.1
    )  # two or three schemas more or less of ten


@needs_jsonschema
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_schemas(stack: Stack) -> None:
    folder = schema_corpus.fetched()
    judge(list(schema_corpus.ask_all(stack, [*schema_corpus.suite(folder), *schema_corpus.functions(folder)])))
