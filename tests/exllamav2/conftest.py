"""What the tests of ExLlamaV2 share: the package on the CPU harness, and one tiny model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.exllamav2 import harness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test on the package may have to wait for the compiler; ./scripts/test has run it before."""
    first = next((item for item in items if "exllamav2" in getattr(item, "fixturenames", ())), None)
    if first is not None:
        first.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def exllamav2() -> ModuleType:
    """The genuine package, on the CPU harness. Skips where the harness cannot run."""
    harness.install_or_skip()
    import exllamav2

    return exllamav2


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as `write_tiny_llama` makes it by default. Not to be changed."""
    pytest.importorskip("torch")
    from tests.exllamav2 import models

    return models.write_tiny_llama(tmp_path_factory.mktemp("tiny"))
