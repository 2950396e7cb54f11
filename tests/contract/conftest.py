from __future__ import annotations

import pytest


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether transcripts are to be written anew."""
    return bool(request.config.getoption("--update-golden"))
