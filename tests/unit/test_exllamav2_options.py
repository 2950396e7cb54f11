"""What the settings make of the exllamav2 engine, and the arithmetic of its context, pool and steps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from shared.settings import Settings
from workers.engines import make
from workers.engines.exllamav2.errors import LoadError
from workers.engines.exllamav2.options import ExLlamaV2Options, LoraOption
from workers.engines.exllamav2.sizes import SCORED_ROWS, Sizes, sizes

MODEL = Path("/models/m")


def sized(native: int = 4096, **options: Any) -> Sizes:
    return sizes(ExLlamaV2Options(MODEL, "m", Path("/cache"), **options), native)


def from_settings(**settings: Any) -> ExLlamaV2Options:
    return ExLlamaV2Options.from_settings(Settings(**settings), MODEL, "m")


def test_settings_that_are_not_set() -> None:
    options = from_settings()
    assert (options.lanes, options.chunk, options.cache_mode, options.cache_tokens) == (32, 2048, "FP16", None)
    assert (options.gpu_split, options.loras, options.draft_model, options.ngram_draft) == ((), (), None, False)


@pytest.mark.parametrize(("asked", "chunk"), [(16, 256), (256, 256), (257, 512), (2048, 2048)])
def test_a_chunk_is_whole_pages(asked: int, chunk: int) -> None:
    assert from_settings(prefill_chunk=asked).chunk == chunk


def test_adapters_with_and_without_a_scale(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    options = from_settings(exl2_loras=["/l/one", "/l/two=0.5", str(odd), f"{odd}=2"])
    assert options.loras == (
        LoraOption(Path("/l/one")), LoraOption(Path("/l/two"), 0.5), LoraOption(odd), LoraOption(odd, 2.0),
    )  # fmt: skip
    with pytest.raises(LoadError, match="DIR=SCALE"):
        from_settings(exl2_loras=["/l/one=much"])


def test_two_ways_to_draft_exclude_each_other() -> None:
    with pytest.raises(LoadError, match="exclude each other"):
        from_settings(exl2_draft_model="/d", exl2_ngram_draft=True)


def test_the_engine_needs_a_model() -> None:
    with pytest.raises(FileNotFoundError, match="--model DIR"):
        make("exllamav2", None, Settings())


def test_a_pool_that_nobody_chose_holds_one_request_of_full_length() -> None:
    assert sized(32768).pool == 32768
    assert sized(32768, context_length=20000).pool == 20224
    # Short ones are cheap: some of them side by side.
    assert sized(2048).pool == 8192


@pytest.mark.parametrize("native", [2048, 4096, 131072])
@pytest.mark.parametrize("draft", [{}, {"draft_model": Path("/d")}, {"ngram_draft": True, "draft_tokens": 7}])
@pytest.mark.parametrize("asked", [{}, {"context_length": 777}, {"cache_tokens": 1000}, {"cache_tokens": 300}])
@pytest.mark.parametrize("wide", [{}, {"lanes": 1}, {"lanes": 4096}, {"chunk": 256}])
def test_what_the_generator_asserts_always_holds(native: int, draft: Any, asked: Any, wide: Any) -> None:
    size = sized(native, **draft, **asked, **wide)
    lanes = wide.get("lanes", 32)
    drafted = size.width - 1
    # exllamav2/generator/dynamic.py, and what it does not assert: positions written by drafting (ENGINE: RoPE table).
    assert size.pool % 256 == 0
    assert size.chunk % 256 == 0
    assert size.chunk <= size.input_len <= size.positions
    assert size.width * lanes <= size.batch_size * size.input_len
    # exllamav2/model.py: the rows of logits of one request, and those that `load_autosplit` tries of a whole step.
    assert max(size.width, SCORED_ROWS) <= size.output_len <= size.input_len
    assert size.context + drafted <= size.positions
    assert size.context + drafted <= size.pool
    assert size.context + drafted <= native
    assert size.pool <= asked.get("cache_tokens", size.pool)


def test_drafting_ends_the_context_earlier() -> None:
    assert sized(4096).context == 4096
    assert sized(4096, draft_model=Path("/d"), draft_tokens=5).context == 4091
    assert sized(4096, draft_model=Path("/d"), draft_tokens=5, context_length=1000).context == 1000


def test_a_pool_smaller_than_the_context_shortens_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert sized(4096, cache_tokens=1000).context == 768
    assert "768 tokens, not 4096" in caplog.text


def test_a_context_longer_than_the_models_takes_a_rope_setting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert sized(4096, context_length=8192).context == 4096
    assert "the model has no more" in caplog.text
    assert sized(4096, context_length=8192, rope_alpha=2.6).context == 8192


def test_no_room_for_a_request() -> None:
    with pytest.raises(LoadError, match="SLUICE_CONTEXT_CELLS"):
        sized(4096, cache_tokens=256, ngram_draft=True, draft_tokens=255)


def test_many_lanes_make_steps_wider_before_they_make_more_of_them() -> None:
    # A batch size of 2 would cost the memory of everything that is sized by it twice.
    assert sized(4096, lanes=2500).batch_size == 1
    assert sized(2048, lanes=2500).batch_size == 2
