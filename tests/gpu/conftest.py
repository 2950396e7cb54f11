"""Where the tests of this folder run: on an NVIDIA GPU, or, to try the tests themselves, on the CPU harness."""

from __future__ import annotations

import os

import pytest

#: Set to 1, the tests run on the CPU harness, all but those that no CPU can answer.
ON_HARNESS = "EXLLAMAV2_TESTS_ON_HARNESS"


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda", or "cpu" on the harness. Skips where there is neither."""
    torch = pytest.importorskip("torch", reason="torch is not installed (requirements-gpu.txt)")
    if os.environ.get(ON_HARNESS) == "1":
        from tests.exllamav2 import harness

        harness.install_or_skip()
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no NVIDIA GPU ({ON_HARNESS}=1 tries the tests on the CPU)")
    return "cuda"


@pytest.fixture
def gpu(device: str) -> None:
    """For what only a GPU can answer."""
    if device != "cuda":
        pytest.skip("needs a real GPU, not the CPU harness")
