"""The ExLlamaV2 engine, on the package's own generator and a tiny model, keeps the contract of every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.contract.engine")

from shared.cards import ModelCard  # noqa: E402
from shared.settings import Settings  # noqa: E402
from tests.contract.engine import EngineContract, EngineUnderTest, loaded  # noqa: E402
from tests.exllamav2 import harness  # noqa: E402
from workers.engines.base import Engine  # noqa: E402


@pytest.fixture(scope="module")
def engine_under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    harness.install_or_skip()
    from tests.exllamav2 import models
    from workers.engines.exllamav2.engine import ExLlamaV2Engine
    from workers.engines.exllamav2.options import ExLlamaV2Options

    folder = models.write_tiny_llama(tmp_path_factory.mktemp("exl2") / "tiny", vocab=500)

    def started(**settings: int) -> tuple[Engine, ModelCard]:
        options = ExLlamaV2Options.from_settings(Settings(**settings), folder, "tiny")  # type: ignore[arg-type]
        engine = ExLlamaV2Engine(options)
        return engine, engine.load(lambda part, what: None)

    story = "Once upon a time there was a model that knew nothing."
    under_test = EngineUnderTest(
        make=lambda: started(lanes=8, context_cells=2048, prefill_chunk=256),
        make_small=lambda: started(lanes=4, context_cells=512),
        prompt=story,
        ending_prompt=story,
        obedient_prompt=story,
        special="<|im_start|>",
        repeats=False,  # batches of other sizes round otherwise
    )
    with loaded(under_test):
        yield under_test


class TestExLlamaV2Engine(EngineContract):
    pass
