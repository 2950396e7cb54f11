"""What batches cost, as `scripts/bench batch` measures it. Slow, and best run on a machine that does nothing else; each
has three tries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.benchmarks.batch import bare_rate, batch_rate, interactive, prompt
from scripts.client import Client
from tests.stack import SCRIPTED, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("speed"), (SCRIPTED,), log_level="WARNING") as alone:
        yield alone


def test_interactive_requests_hardly_notice_a_full_batch(alone: Stack) -> None:
    """Median time to the first token, with steps of 20 ms: at most 1.5 times that of the idle machine."""
    client, ratios = Client(f"http://127.0.0.1:{alone.port}"), []
    while len(ratios) < 3 and (not ratios or min(ratios) > 1.5):
        ratios.append(interactive(client, 64)["ratio"])
    assert min(ratios) <= 1.5, ratios


def test_a_batch_is_nearly_as_fast_as_bare_requests(alone: Stack) -> None:
    client, ratios = Client(f"http://127.0.0.1:{alone.port}"), []
    while len(ratios) < 3 and (not ratios or max(ratios) < 0.8):
        prompts = [prompt(20, 20, number) for number in range(2000)]
        ratios.append(batch_rate(client, prompts) / bare_rate(alone.url, prompts))
    assert max(ratios) >= 0.8, ratios
