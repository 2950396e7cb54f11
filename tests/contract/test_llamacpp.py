"""The llamacpp engine, with the carried model, keeps the contract of every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.contract.engine")

from shared.cards import ModelCard  # noqa: E402
from shared.settings import Settings  # noqa: E402
from tests.contract.engine import EngineContract, EngineUnderTest, loaded  # noqa: E402
from workers.engines import make as make_engine  # noqa: E402
from workers.engines.base import Engine  # noqa: E402


def started(**settings: int) -> tuple[Engine, ModelCard]:
    engine = make_engine("llamacpp", None, Settings(**settings))  # type: ignore[arg-type]
    return engine, engine.load(lambda part, what: None)


@pytest.fixture(scope="module")
def engine_under_test() -> Iterator[EngineUnderTest]:
    story = "Once upon a time, there was a little girl who lived in a village near the forest."
    under_test = EngineUnderTest(
        make=lambda: started(lanes=8, context_cells=2048),
        make_small=lambda: started(lanes=4, context_cells=300),
        prompt=story,
        ending_prompt=story,
        obedient_prompt=story,
        special="<|im_start|>",
        repeats=False,  # batches of other sizes round otherwise
    )
    with loaded(under_test):
        yield under_test


class TestLlamaCppEngine(EngineContract):
    pass
