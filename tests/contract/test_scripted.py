"""The scripted engine keeps the contract of every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.contract.engine")

from shared.cards import ModelCard  # noqa: E402
from tests.contract.engine import EngineContract, EngineUnderTest, loaded  # noqa: E402
from workers.engines.base import Engine  # noqa: E402
from workers.engines.scripted import ScriptedEngine  # noqa: E402


def make() -> tuple[Engine, ModelCard]:
    engine = ScriptedEngine(lanes=8)
    return engine, engine.load(lambda part, what: None)


@pytest.fixture(scope="module")
def engine_under_test() -> Iterator[EngineUnderTest]:
    under_test = EngineUnderTest(
        make=make,
        prompt='{"pieces": ["a", "b", {"hex": "f09f"}, {"hex": "8c8d"}, "c"], "repeat": 0}',
        ending_prompt="five words and an end",
        obedient_prompt='{"prefer": ["\\n", " "]}',
        special="<|300|>",
        penalises=False,
        failing_prompt='{"pieces": ["a", "b", "c"], "error_after": 2}',
    )
    with loaded(under_test):
        yield under_test


class TestScriptedEngine(EngineContract):
    pass
