from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.app import create_app
from shared.settings import Settings
from tests.unit.fakes import FakeStore


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def make_client(store: FakeStore) -> Callable[..., FlaskClient]:
    def make(**settings: Any) -> FlaskClient:
        return create_app(Settings(**settings), gateway=store, hub=store).test_client()  # type: ignore[arg-type]

    return make


@pytest.fixture
def client(make_client: Callable[..., FlaskClient]) -> FlaskClient:
    return make_client()
