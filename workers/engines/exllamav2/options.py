"""What the exllamav2 engine is started with: the part of the settings that it reads, and the model.

Knows nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.settings import Settings
from workers.engines.exllamav2.errors import LoadError

#: Lanes, and prompt tokens in one step, where the settings name none.
DEFAULT_LANES = 32
DEFAULT_CHUNK = 2048
#: Tokens of a page, the piece in which the package hands out cache; chunks and pools are whole pages.
PAGE = 256

CacheMode = Literal["FP16", "Q4", "Q6", "Q8"]


@dataclass(frozen=True, slots=True)
class LoraOption:
    """An adapter's folder, and the factor on its effect."""

    path: Path
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExLlamaV2Options:
    """`model`: a folder with config.json, weights and tokenizer. `model_id`: the name it is served under.

    `cache_tokens`: the pool, tokens of all lanes together; None = one request of full length. `context_length`:
    longest prompt + completion; None = the model's. `chunk`: prompt tokens of one lane in one step, whole pages.
    `gpu_split`: GB of weights for each GPU; () = fill one GPU after the other, `reserve_mb` left free on each.
    `tensor_parallel`: split every layer over the GPUs instead. `draft_model`: a folder with a small model that proposes
    `draft_tokens` tokens at a time; `ngram_draft`: the text so far proposes them. `loras`: adapters laid over the model.
    `rope_scale`, `rope_alpha`: instead of the model's own. `build_limit_s`: longest wait for the extension's build.
    `cache_dir`: where the built extension is kept.
    """

    model: Path
    model_id: str
    cache_dir: Path
    lanes: int = DEFAULT_LANES
    cache_mode: CacheMode = "FP16"
    cache_tokens: int | None = None
    context_length: int | None = None
    chunk: int = DEFAULT_CHUNK
    gpu_split: tuple[float, ...] = ()
    reserve_mb: int = 192
    tensor_parallel: bool = False
    draft_model: Path | None = None
    draft_tokens: int = 4
    ngram_draft: bool = False
    loras: tuple[LoraOption, ...] = ()
    rope_scale: float | None = None
    rope_alpha: float | None = None
    build_limit_s: float = 1800.0

    @classmethod
    def from_settings(cls, settings: Settings, model: Path, model_id: str) -> ExLlamaV2Options:
        """Raises LoadError for settings that exclude each other."""
        if settings.exl2_draft_model is not None and settings.exl2_ngram_draft:
            raise LoadError("SLUICE_EXL2_DRAFT_MODEL and SLUICE_EXL2_NGRAM_DRAFT exclude each other: keep one of them.")
        chunk = settings.prefill_chunk or DEFAULT_CHUNK
        return cls(
            model=model,
            model_id=model_id,
            cache_dir=settings.cache_dir,
            lanes=settings.lanes or DEFAULT_LANES,
            cache_mode=settings.exl2_cache_mode,
            cache_tokens=settings.context_cells,
            context_length=settings.context_length,
            chunk=-(-chunk // PAGE) * PAGE,
            gpu_split=tuple(settings.exl2_gpu_split),
            reserve_mb=settings.exl2_reserve_mb,
            tensor_parallel=settings.exl2_tensor_parallel,
            draft_model=settings.exl2_draft_model,
            draft_tokens=settings.exl2_draft_tokens,
            ngram_draft=settings.exl2_ngram_draft,
            loras=tuple(_lora(text) for text in settings.exl2_loras),
            rope_scale=settings.exl2_rope_scale,
            rope_alpha=settings.exl2_rope_alpha,
            build_limit_s=settings.exl2_build_limit_s,
        )


def _lora(text: str) -> LoraOption:
    """`DIR` or `DIR=SCALE`; a folder that exists as it is written may hold a `=` itself. Raises LoadError."""
    path, equals, scale = text.rpartition("=")
    if not equals or Path(text).exists():
        return LoraOption(Path(text))
    try:
        return LoraOption(Path(path), float(scale))
    except ValueError:
        raise LoadError(f"SLUICE_EXL2_LORAS: {text!r} is neither a folder nor DIR=SCALE, SCALE a number.") from None


def check_loras(loras: Sequence[LoraOption]) -> None:
    """Raises LoadError for a folder that holds no adapter, which costs nothing to see before a model is loaded."""
    for lora in loras:
        if not (lora.path / "adapter_config.json").is_file():
            raise LoadError(f"{lora.path} holds no LoRA adapter: it has no adapter_config.json (SLUICE_EXL2_LORAS).")
