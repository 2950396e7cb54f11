"""The contract that an ExLlamaV3 adapter has to keep, with an EXL3 model on a real GPU.

There is no adapter yet (docs/exllamav2.md says why): until then the suite is skipped with the engine's own words.
`EXL3_TEST_MODEL` names the model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.contract.engine")

from shared.cards import ModelCard  # noqa: E402
from shared.errors import InvalidRequest  # noqa: E402
from shared.settings import Settings  # noqa: E402
from tests.contract.engine import EngineContract, EngineUnderTest, loaded  # noqa: E402
from workers.engines import make as make_engine  # noqa: E402
from workers.engines.base import Engine  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine_under_test() -> Iterator[EngineUnderTest]:
    folder = os.environ.get("EXL3_TEST_MODEL")
    if folder is None:
        pytest.skip("EXL3_TEST_MODEL names no folder with an EXL3 model")

    def started(**settings: int) -> tuple[Engine, ModelCard]:
        engine = make_engine("exllamav3", folder, Settings(**settings))  # type: ignore[arg-type]
        return engine, engine.load(lambda part, what: None)

    story = "Once upon a time, there was a little girl who lived in a village near the forest."
    under_test = EngineUnderTest(
        make=lambda: started(lanes=8, context_cells=8192),
        make_small=lambda: started(lanes=4, context_cells=512),
        prompt=story,
        ending_prompt=story,
        obedient_prompt=story,
        repeats=False,
    )
    try:
        with loaded(under_test):
            yield under_test
    except InvalidRequest as error:
        pytest.skip(str(error))


class TestExLlamaV3Engine(EngineContract):
    pass
