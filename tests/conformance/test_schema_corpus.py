"""Schemas that other people wrote: answered right, refused, or cut off, and nothing in between."""

from __future__ import annotations

import pytest

from tests.conformance import schema_corpus
from tests.conftest import needs_jsonschema
from tests.stack import Stack

#: How far the shares of a sample of 30 may be from those of all: that is three schemas.
SLACK = 0.1
#: Tokens of an answer in the quick look, and how long one may take, s.
MOST_TOKENS, LONGEST = 200, 60.0


@needs_jsonschema
@pytest.mark.timeout(240)
def test_a_sample_of_schemas(stack: Stack) -> None:
    sample = schema_corpus.sample()
    assert len(sample) == 2 * schema_corpus.SAMPLED
    outcomes = list(schema_corpus.ask_all(stack, sample, most=MOST_TOKENS))
    assert len(outcomes) == len(sample)
    assert schema_corpus.missed(outcomes, SLACK) == []
    assert max(outcome.seconds for outcome in outcomes) < LONGEST


@needs_jsonschema
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_schemas(stack: Stack) -> None:
    outcomes = list(schema_corpus.ask_all(stack, schema_corpus.in_order(schema_corpus.fetched())))
    assert schema_corpus.missed(outcomes) == []
