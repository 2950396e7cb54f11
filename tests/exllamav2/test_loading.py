"""Models loaded and unloaded with the genuine package, on the CPU: what is refused, and that nothing stays behind."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.exllamav2 import harness
from workers.engines.exllamav2.directory import ModelDirectory
from workers.engines.exllamav2.errors import LoadError
from workers.engines.exllamav2.options import ExLlamaV2Options, LoraOption

if (reason := harness.missing()) is not None:
    pytest.skip(f"no ExLlamaV2 on CPU: {reason}", allow_module_level=True)

from tests.exllamav2 import models


@pytest.fixture(scope="module")
def loading() -> ModuleType:
    harness.install_or_skip()
    from workers.engines.exllamav2 import loading

    return loading


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def load(loading: ModuleType, model: Path, report: Callable[[float, str], None] | None = None, **options: Any) -> Any:
    settings = {"lanes": 4, "chunk": 256, "cache_tokens": 2048, **options}
    asked = ExLlamaV2Options(model, "m", Path("/nowhere"), **settings)
    return loading.load(asked, ModelDirectory(model), report or (lambda part, word: None))


def tensor_bytes() -> int:
    """Bytes of all tensors that live."""
    import torch

    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta"
    }
    return sum(storages.values())


def greedy(loaded: Any, prompt: list[int], count: int) -> list[int]:
    """`count` tokens of the package's own generator."""
    import torch
    from exllamav2 import ExLlamaV2Tokenizer
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

    generator = ExLlamaV2DynamicGenerator(
        loaded.model,
        loaded.cache,
        ExLlamaV2Tokenizer(loaded.model.config),
        max_batch_size=4,
        max_chunk_size=loaded.chunk,
        max_q_size=loaded.width,
        draft_model=loaded.draft_model,
        draft_cache=loaded.draft_cache,
        num_draft_tokens=loaded.draft_tokens,
    )
    generator.current_loras = loaded.loras or None
    generator.enqueue(
        ExLlamaV2DynamicJob(
            torch.tensor([prompt]), count + loaded.draft_tokens, gen_settings=ExLlamaV2Sampler.Settings.greedy()
        )
    )
    tokens: list[int] = []
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if "token_ids" in result:
                tokens += result["token_ids"][0].tolist()
    return tokens[:count]


def test_a_model_loads_with_progress(loading: ModuleType, model: Path) -> None:
    parts: list[float] = []
    words: list[str] = []
    loaded = load(loading, model, lambda part, word: (parts.append(part), words.append(word)))  # type: ignore[func-returns-value]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert len(parts) > 6
    assert "loading fp16 weights" in words
    assert (loaded.context, loaded.chunk, loaded.width, loaded.draft_tokens) == (2048, 256, 1, 0)
    assert loaded.cache.max_seq_len == 2048
    assert loaded.model.config.no_sdpa
    assert loaded.attention
    assert len(greedy(loaded, [5, 6, 7], 10)) == 10
    loading.unload(loaded)


def test_attention_that_is_not_paged_is_causal(loading: ModuleType, model: Path) -> None:
    """Without flash-attn and xformers, exllamav2 0.2.9 to 0.3.2 forgets the mask of a prefill (`_attn_torch`)."""
    import torch
    from exllamav2 import ExLlamaV2Cache

    loaded = load(loading, model)
    ids = torch.arange(20, 40).unsqueeze(0)
    other = ids.clone()
    other[0, -1] = 99
    with torch.inference_mode():
        one, two = (
            loaded.model.forward(tokens, ExLlamaV2Cache(loaded.model, max_seq_len=256)) for tokens in (ids, other)
        )
    torch.testing.assert_close(one[:, :-1], two[:, :-1])
    assert not torch.allclose(one[:, -1], two[:, -1])
    loading.unload(loaded)


@pytest.mark.parametrize("mode", ["FP16", "Q4", "Q6", "Q8"])
def test_the_cache_is_of_the_asked_mode(mode: str, loading: ModuleType, model: Path) -> None:
    loaded = load(loading, model, cache_mode=mode)
    assert type(loaded.cache).__name__ == ("ExLlamaV2Cache" if mode == "FP16" else f"ExLlamaV2Cache_{mode}")
    loading.unload(loaded)


def test_fb136_five_loads_leave_nothing_behind(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    """FB-136: a part of a model stayed in the GPU's memory after it was unloaded."""
    draft, lora = models.write_draft_model(tmp_path / "draft"), models.write_lora(tmp_path / "lora")
    seen = []
    held = 0
    for _ in range(5):
        before = tensor_bytes()
        loaded = load(loading, model, draft_model=draft, loras=(LoraOption(lora),))
        held = tensor_bytes() - before
        loading.unload(loaded)
        seen.append(tensor_bytes())  # `loaded` still lives: an engine that is closed holds it too
    assert held > 1_000_000
    assert max(seen) - min(seen) < 0.02 * held
    assert seen[-1] - before < 0.02 * held


def test_fb136_a_load_that_fails_at_the_end_leaves_nothing_behind(
    loading: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FB-136"""
    import torch
    from exllamav2 import ExLlamaV2

    load(loading, model)  # what the package keeps for good, once
    before = tensor_bytes()
    held = 0

    def out_of_memory(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal held
        held = tensor_bytes() - before
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(ExLlamaV2, "forward_chunk", out_of_memory)
    with pytest.raises(LoadError, match="too little memory") as failed:
        load(loading, model)
    for setting in ("SLUICE_CONTEXT_CELLS", "SLUICE_LANES", "SLUICE_PREFILL_CHUNK", "SLUICE_EXL2_CACHE_MODE"):
        assert setting in str(failed.value)
    assert held > 1_000_000
    # The error is still in our hands, as it is in a worker's that logs it.
    assert tensor_bytes() - before < 0.02 * held


def test_the_try_is_as_large_as_a_step_can_be(
    loading: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exllamav2 import ExLlamaV2

    seen = []
    genuine = ExLlamaV2.forward_chunk

    def watched(self: Any, input_ids: Any, **options: Any) -> Any:
        params = options["attn_params"]
        seen.append((tuple(input_ids.shape), params.block_index.shape[1], options["preprocess_only"]))
        assert params.max_cache_seqlen == params.block_index.shape[1] * 256 - input_ids.shape[1]
        return genuine(self, input_ids, **options)

    monkeypatch.setattr(ExLlamaV2, "forward_chunk", watched)
    loaded = load(loading, model, lanes=3, chunk=512)
    # A chunk, a scored chunk, and a token of all lanes with the table as wide as the longest needs it.
    assert seen == [((1, 512), 8, True), ((1, 256), 8, False), ((3, 1), 8, False)]
    assert loaded.cache.current_seq_len == 0
    assert loaded.model.config.max_output_len == 256
    loading.unload(loaded)


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_weights_that_are_not_whole(damage: str, loading: ModuleType, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "damaged")
    file = folder / "model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200_000])
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    before = tensor_bytes()
    with pytest.raises(LoadError, match="cannot be loaded"):
        load(loading, folder)
    assert tensor_bytes() - before < 100_000


def test_fb138_a_draft_model_of_another_vocabulary_is_refused(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    """FB-138: elsewhere such a draft model was accepted without a word."""
    draft = models.write_draft_model(tmp_path / "draft", same_vocabulary=False)
    with pytest.raises(LoadError, match=r"another vocabulary.*token \d+ is b.*SLUICE_EXL2_DRAFT_MODEL"):
        load(loading, model, draft_model=draft)


def test_fb138_a_draft_model_with_fewer_tokens_is_refused(loading: ModuleType, tmp_path: Path) -> None:
    """FB-138: but not for another padding of its head."""
    ours = models.write_tiny_llama(tmp_path / "ours")
    _add_token(ours / "tokenizer.json")
    _set(ours / "config.json", vocab_size=512)
    draft = models.write_draft_model(tmp_path / "draft")
    # Both heads hold 512 rows, so the new token, number 512, is in neither: no difference that counts.
    load(loading, ours, draft_model=draft)
    padded = models.write_tiny_llama(tmp_path / "padded", rows=544)
    _add_token(padded / "tokenizer.json")
    with pytest.raises(LoadError, match=r"has 512 tokens, .* has 513"):
        load(loading, padded, draft_model=draft)


@pytest.mark.parametrize("rows", [None, 544])
def test_fb138_a_draft_model_changes_no_greedy_text(
    rows: int | None, loading: ModuleType, model: Path, tmp_path: Path
) -> None:
    """FB-138"""
    # Random rows of a padded head are often the likeliest: no such id may be proposed.
    draft = models.write_draft_model(tmp_path / "draft", rows=rows)
    plain = load(loading, model)
    expected = greedy(plain, [9, 8, 7], 24)
    loading.unload(plain)
    drafted = load(loading, model, draft_model=draft)
    assert (drafted.context, drafted.width, drafted.draft_tokens) == (2044, 5, 4)
    assert greedy(drafted, [9, 8, 7], 24) == expected
    loading.unload(drafted)


def test_an_adapter_changes_the_text_and_is_named(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    lora = models.write_lora(tmp_path / "pirate")
    plain = load(loading, model)
    expected = greedy(plain, [9, 8, 7], 16)
    loading.unload(plain)
    for scale, same in ((1.0, False), (0.0, True)):
        loaded = load(loading, model, loras=(LoraOption(lora, scale),))
        assert loaded.lora_names == ("pirate",)
        assert (greedy(loaded, [9, 8, 7], 16) == expected) == same
        loading.unload(loaded)


def test_fb139_adapters_of_another_base_are_refused(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    """FB-139: nobody is answered by the base model under the adapter's name."""
    import torch
    from safetensors.torch import load_file, save_file

    deeper = models.write_lora(tmp_path / "deeper", layers=5)
    wider = models.write_lora(tmp_path / "wider")
    file = wider / "adapter_model.safetensors"
    save_file({name: torch.cat([t, t], -1) if "lora_A" in name else t for name, t in load_file(file).items()}, file)
    empty = models.write_lora(tmp_path / "empty")
    save_file({}, empty / "adapter_model.safetensors")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    before = tensor_bytes()
    for folder, says in [
        (deeper, "deeper does not fit onto this model.*another base"),
        (wider, "wider does not fit onto this model.*another base"),
        (empty, "empty changes nothing"),
        (nothing, "no adapter_config.json"),
        (tmp_path / "absent", "no adapter_config.json"),
    ]:
        with pytest.raises(LoadError, match=says):
            load(loading, model, loras=(LoraOption(folder),))
    assert tensor_bytes() - before < 100_000


def test_a_head_that_would_be_left_out_is_refused(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    plain, headed = models.write_lora(tmp_path / "plain"), models.write_lora(tmp_path / "headed")
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    file = headed / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.lm_head.weight": torch.ones(512, width)}, file)
    loading.unload(load(loading, model, loras=(LoraOption(headed), LoraOption(plain))))
    with pytest.raises(LoadError, match=r"headed replaces the embedding or the head.*name it first"):
        load(loading, model, loras=(LoraOption(plain), LoraOption(headed)))


def test_heads_that_a_quantised_cache_cannot_hold(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "odd")
    _set(folder / "config.json", head_dim=48)
    with pytest.raises(LoadError, match=r"heads of 48 values.*SLUICE_EXL2_CACHE_MODE=FP16"):
        load(loading, folder, cache_mode="Q4")


def test_tensor_parallelism_needs_flash_attn(loading: ModuleType, model: Path) -> None:
    with pytest.raises(LoadError, match="flash-attn"):
        load(loading, model, tensor_parallel=True)


def test_tensor_parallelism_would_leave_adapters_out(loading: ModuleType, model: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no LoRA with tensor parallelism"):
        load(loading, model, tensor_parallel=True, loras=(LoraOption(models.write_lora(tmp_path)),))


def test_rope_settings_reach_the_package(loading: ModuleType, model: Path) -> None:
    loaded = load(loading, model, rope_scale=2.0, context_length=4096, cache_tokens=4096)
    assert (loaded.model.config.scale_pos_emb, loaded.model.config.max_seq_len, loaded.context) == (2.0, 4096, 4096)
    loading.unload(loaded)


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _add_token(file: Path) -> None:
    written = json.loads(file.read_text())
    first = max(entry["id"] for entry in written["added_tokens"]) + 1
    written["added_tokens"].append({**written["added_tokens"][-1], "id": first, "content": "<|new|>"})
    file.write_text(json.dumps(written))
