"""From a checked folder to a model on the GPUs: weights, cache, draft model and adapters, tried out once at full size.

Import it after `extension.load_package`. Knows nothing of requests, of the generator and of text.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from exllamav2 import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Lora
from exllamav2.attn import ExLlamaV2Attention
from exllamav2.cache import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
)
from exllamav2.stloader import cleanup_stfiles

from workers.engines.base import Progress
from workers.engines.exllamav2 import attention
from workers.engines.exllamav2.directory import ModelDirectory
from workers.engines.exllamav2.errors import LoadError
from workers.engines.exllamav2.faults import is_out_of_memory
from workers.engines.exllamav2.options import PAGE, ExLlamaV2Options, LoraOption, check_loras
from workers.engines.exllamav2.sizes import SCORED_ROWS, Sizes, sizes
from workers.engines.exllamav2.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_CACHES = {"FP16": ExLlamaV2Cache, "Q4": ExLlamaV2Cache_Q4, "Q6": ExLlamaV2Cache_Q6, "Q8": ExLlamaV2Cache_Q8}
#: Values that share a scale in a quantised cache.
_CACHE_GROUP = 32
#: Parts of the whole progress: the draft model, the model, then the try.
_DRAFT_DONE, _MODEL_DONE = 0.15, 0.95


@dataclass(slots=True)
class Loaded:
    """What `load` made. `context`: longest prompt + completion, tokens. `attention`: the name of what computes it.

    For the generator: `chunk` is its max_chunk_size, `width` its max_q_size, `draft_tokens` its num_draft_tokens (0: no
    speculation). With drafting it ends that many tokens early, so it is to be asked for that many more: positions and
    cache have room for them. `loras`: in the order of the options; `lora_names` likewise, for the card."""

    model: ExLlamaV2
    cache: Any
    context: int
    chunk: int
    width: int
    draft_tokens: int
    attention: str
    draft_model: ExLlamaV2 | None = None
    draft_cache: Any = None
    loras: list[ExLlamaV2Lora] = field(default_factory=list)
    lora_names: tuple[str, ...] = ()


def load(
    options: ExLlamaV2Options,
    directory: ModelDirectory,
    report: Progress,
    model_class: type[ExLlamaV2] = ExLlamaV2,
) -> Loaded:
    """Loads what `options` ask for. `report` gets the part done (0..1) and a word.

    Raises LoadError; nothing stays in memory then."""
    parts = _Parts()
    try:
        return _load(options, directory, report, model_class, parts)
    except LoadError as error:
        sentence = str(error)
    # The package says it with AssertionError, ValueError, KeyError and RuntimeError; torch with OutOfMemoryError.
    except Exception as error:
        sentence = _sentence(error, options)
        if not is_out_of_memory(error):
            log.exception("The model cannot be loaded.")
    # Not in the handler: the exception's traceback holds the frames, and those hold the tensors.
    parts.free()
    raise LoadError(sentence)


def unload(loaded: Loaded) -> None:
    """Gives the memory back. Nothing of `loaded` can be used afterwards."""
    parts = _Parts(
        [model for model in (loaded.model, loaded.draft_model) if model is not None],
        [cache for cache in (loaded.cache, loaded.draft_cache) if cache is not None],
        list(loaded.loras),
    )
    loaded.loras.clear()
    loaded.cache = loaded.draft_cache = loaded.draft_model = None
    parts.free()


@dataclass(slots=True)
class _Parts:
    """What holds memory so far."""

    models: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    loras: list[Any] = field(default_factory=list)

    def free(self) -> None:
        for lora in self.loras:
            with contextlib.suppress(Exception):  # one that was never whole
                lora.unload()
        for model in self.models:
            # A module that was never loaded may not know how to be unloaded: the rest is freed all the same.
            for module in model.modules:
                with contextlib.suppress(Exception):
                    module.unload()
            for context in model.device_context:
                if context is not None:
                    context.free()
            model.modules, model.modules_dict, model.device_context, model.cache_map = [], {}, [], {}
            if model.tp_context is not None:
                model.tp_context.unload()
                model.tp_context = None
        for cache in self.caches:
            for one in getattr(cache, "caches", None) or [cache]:
                if one is not None:
                    for tensors in (one.key_states, one.value_states, one.key_scales, one.value_scales):
                        tensors.clear()
        self.loras.clear()
        self.models.clear()
        self.caches.clear()
        cleanup_stfiles()
        gc.collect()  # modules and model point at each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _load(
    options: ExLlamaV2Options,
    directory: ModelDirectory,
    report: Progress,
    model_class: type[ExLlamaV2],
    parts: _Parts,
) -> Loaded:
    report(0.0, "opening")
    check_loras(options.loras)
    name = attention.install()
    config = _config(options, directory)
    size = sizes(options, config.max_seq_len)
    _fit(config, size)
    _check_cache_mode(options, config, directory)
    if options.tensor_parallel:
        _check_tensor_parallel(options, config, name)
    draft_model = draft_cache = None
    if options.draft_model is not None:
        draft = ModelDirectory(options.draft_model)
        known = check_draft_vocabulary(directory, draft)
        draft_model, draft_cache = _draft(options, draft, known, size, report, parts)
    begin = 0.0 if draft_model is None else _DRAFT_DONE
    progress = _modules(report, begin, _MODEL_DONE, f"loading {directory.description} weights")
    model = model_class(config)
    parts.models.append(model)
    cache = _weights_and_cache(options, model, size, progress, parts)
    loras = [_lora(model, lora, parts) for lora in options.loras]
    for lora, option in zip(loras[1:], options.loras[1:], strict=True):
        if lora.lm_head is not None or lora.embed_tokens is not None:
            # Of all others it leaves those two out without a word (0.3.2, `loras[0]` in linear.py and embedding.py).
            raise LoadError(
                f"{option.path} replaces the embedding or the head, which exllamav2 takes of the first adapter only: name "
                "it first in SLUICE_EXL2_LORAS."
            )
    report(_MODEL_DONE, "trying a full step")
    _rehearse(model, cache, size, options.lanes, loras)
    if draft_model is not None:
        _rehearse(draft_model, draft_cache, size, options.lanes, [])
    report(1.0, "loaded")
    return Loaded(
        model=model,
        cache=cache,
        context=size.context,
        chunk=size.chunk,
        width=size.width,
        draft_tokens=size.width - 1,
        attention=name,
        draft_model=draft_model,
        draft_cache=draft_cache,
        loras=loras,
        lora_names=tuple(lora.path.name for lora in options.loras),
    )


class _DraftModel(ExLlamaV2):
    """Proposes no id from `known` on. The heads of one family are padded differently, and the generator takes the
    likeliest id of the draft model's: one beyond the model's own head ends everybody's step with an IndexError in its
    embedding (0.3.2, iterate_draftmodel_gen)."""

    known: int

    def forward_chunk(self, *arguments: Any, **options: Any) -> Any:
        made = super().forward_chunk(*arguments, **options)
        if isinstance(made, dict) and made.get("logits") is not None:
            made["logits"][..., self.known :] = torch.finfo(torch.half).min
        return made


def _config(options: ExLlamaV2Options, directory: ModelDirectory) -> ExLlamaV2Config:
    config = ExLlamaV2Config(str(directory.path))
    # Its prefill forgets the causal mask where flash-attn and xformers are missing: wrong text and no error (0.2.9 to
    # 0.3.2, ExLlamaV2Attention._attn_torch).
    config.no_sdpa = True
    if options.rope_scale is not None:
        config.scale_pos_emb = options.rope_scale
    if options.rope_alpha is not None:
        config.scale_alpha_value = options.rope_alpha
    config.arch_compat_overrides(quiet=True)
    return config


def _fit(config: ExLlamaV2Config, size: Sizes) -> None:
    config.max_seq_len = size.positions
    config.max_input_len = size.input_len
    config.max_batch_size = size.batch_size
    config.max_output_len = size.output_len


def _check_cache_mode(options: ExLlamaV2Options, config: ExLlamaV2Config, directory: ModelDirectory) -> None:
    if options.cache_mode != "FP16" and config.head_dim % _CACHE_GROUP:
        raise LoadError(
            f"{directory.path} has heads of {config.head_dim} values, and a {options.cache_mode} cache needs a multiple of "
            f"{_CACHE_GROUP}: set SLUICE_EXL2_CACHE_MODE=FP16."
        )


def _check_tensor_parallel(options: ExLlamaV2Options, config: ExLlamaV2Config, name: str) -> None:
    if options.loras:
        # Its split layers take the adapters and leave them out (0.3.2, ExLlamaV2Linear.forward_tp).
        raise LoadError("exllamav2 has no LoRA with tensor parallelism: unset SLUICE_EXL2_TENSOR_PARALLEL.")
    if not config.arch.lm.supports_tp:
        raise LoadError(f"exllamav2 cannot split {config.architecture} by tensors: unset SLUICE_EXL2_TENSOR_PARALLEL.")
    if not name.startswith("flash-attn"):
        raise LoadError(
            "tensor parallelism needs the package flash-attn: install it, or unset SLUICE_EXL2_TENSOR_PARALLEL."
        )


def check_draft_vocabulary(directory: ModelDirectory, draft: ModelDirectory) -> int:
    """How many ids the draft model may propose. Raises LoadError for one whose ids mean other tokens.

    Heads may be padded differently; ids that only one of them has must lie inside the other's head, as padding."""
    ours, theirs = Vocabulary(directory), Vocabulary(draft)
    for token, (piece, other) in enumerate(zip(ours.pieces, theirs.pieces, strict=False)):
        if piece != other:
            raise LoadError(
                f"the draft model {draft.path} has another vocabulary than {directory.path}: token {token} is {other!r}, not "
                f"{piece!r}. A draft model must be of the same family (SLUICE_EXL2_DRAFT_MODEL)."
            )
    if ours.vocab_size > theirs.head or theirs.vocab_size > ours.head:
        raise LoadError(
            f"the draft model {draft.path} has {theirs.vocab_size} tokens, {directory.path} has {ours.vocab_size}: their "
            "vocabularies are not the same (SLUICE_EXL2_DRAFT_MODEL)."
        )
    return ours.vocab_size


def _draft(
    options: ExLlamaV2Options, draft: ModelDirectory, known: int, size: Sizes, report: Progress, parts: _Parts
) -> tuple[ExLlamaV2, Any]:
    """The draft model and its cache, on the first GPU: small, and asked for a token at a time."""
    config = ExLlamaV2Config(str(draft.path))
    config.no_sdpa = True
    config.arch_compat_overrides(quiet=True)
    if config.max_seq_len < size.positions:
        log.warning(
            "The draft model's context is %d tokens: beyond them it will propose little of use.", config.max_seq_len
        )
    _fit(config, size)
    _check_cache_mode(options, config, draft)
    model = _DraftModel(config)
    model.known = known
    parts.models.append(model)
    model.load(callback=_modules(report, 0.0, _DRAFT_DONE, "loading the draft model"))
    return model, _cache(options, model, size, parts)


def _weights_and_cache(
    options: ExLlamaV2Options,
    model: ExLlamaV2,
    size: Sizes,
    progress: Callable[[int, int], None],
    parts: _Parts,
) -> Any:
    """Loads the model in the way that options and machine ask for. Returns its cache."""
    split = list(options.gpu_split) or None
    kind = _CACHES[options.cache_mode]
    if options.tensor_parallel:
        model.load_tp(split, callback=progress, expect_cache_tokens=size.pool, expect_cache_base=kind)
        cache = ExLlamaV2Cache_TP(model, base=kind, max_seq_len=size.pool)
        parts.caches.append(cache)
        return cache
    if split is None and torch.cuda.device_count() > 1:
        cache = kind(model, max_seq_len=size.pool, lazy=True)
        parts.caches.append(cache)
        reserved = [options.reserve_mb << 20] * torch.cuda.device_count()
        model.load_autosplit(cache, reserve_vram=reserved, callback=progress)
        return cache
    model.load(split, callback=progress)
    return _cache(options, model, size, parts)


def _cache(options: ExLlamaV2Options, model: ExLlamaV2, size: Sizes, parts: _Parts) -> Any:
    # Lazily, so that what was allocated before memory ran out is known and can be freed.
    cache = _CACHES[options.cache_mode](model, max_seq_len=size.pool, lazy=True)
    parts.caches.append(cache)
    cache.update_cache_tensors()
    return cache


def _lora(model: ExLlamaV2, lora: LoraOption, parts: _Parts) -> ExLlamaV2Lora:
    """Lays an adapter over the model. Raises LoadError for one that does not belong to it."""
    try:
        loaded = ExLlamaV2Lora.from_directory(model, str(lora.path), lora.scale)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise LoadError(
            f"the LoRA adapter {lora.path} does not fit onto this model, it was made for another base "
            f"({_one_line(error)})."
        ) from None
    parts.loras.append(loaded)
    if not loaded.tensors and loaded.lm_head is None and loaded.embed_tokens is None:
        raise LoadError(f"the LoRA adapter {lora.path} changes nothing of this model.")
    return loaded


def _rehearse(model: ExLlamaV2, cache: Any, size: Sizes, lanes: int, loras: list[ExLlamaV2Lora]) -> None:
    """The three largest steps there can be, on garbage: the last chunk of the longest prompt, its last positions scored,
    and a token of every lane beside the longest one.

    Memory that would run out under load runs out here. No page is in use yet, so what is written to them is lost."""
    pages = min(size.pool, size.positions) // PAGE
    rows = min(lanes, size.pool // PAGE)
    with torch.inference_mode():
        _step(model, cache, rows=1, width=size.chunk, pages=pages, loras=loras, logits=False)
        _step(model, cache, rows=1, width=min(SCORED_ROWS, size.chunk), pages=pages, loras=loras, logits=True)
        _step(model, cache, rows=rows, width=size.width, pages=pages, loras=loras, logits=True)
    cache.current_seq_len = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _step(
    model: ExLlamaV2, cache: Any, *, rows: int, width: int, pages: int, loras: list[ExLlamaV2Lora], logits: bool
) -> None:
    """One pass over the last `width` tokens of a sequence of `pages` pages, and `rows - 1` beginnings of others. Their part
    of the table is padded to the longest, as the generator does it, and attention may take memory for all of it."""
    past = pages * PAGE - width
    table = torch.zeros((rows, pages), dtype=torch.int32)
    table[0] = torch.arange(pages, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    lengths[0] = past
    params = ExLlamaV2Attention.PagedParams(
        batch_size=rows,
        block_index=table,
        cache_seqlens=lengths,
        max_cache_seqlen=past,
        page_size=PAGE,
        q_len=width,
    )
    model.forward_chunk(
        torch.zeros((rows, width), dtype=torch.long),
        cache=cache,
        attn_params=params,
        preprocess_only=not logits,
        loras=loras or None,
    )


def _modules(report: Progress, begin: float, end: float, word: str) -> Callable[[int, int], None]:
    """A callback for the package, which counts modules, as a part of the whole progress."""
    return lambda done, total: report(begin + (end - begin) * done / max(total, 1), word)


def _sentence(error: Exception, options: ExLlamaV2Options) -> str:
    if is_out_of_memory(error):
        return (
            f"the GPUs have too little memory for {options.model} with these settings: make the cache smaller "
            "(SLUICE_CONTEXT_CELLS, or SLUICE_EXL2_CACHE_MODE=Q4), a request shorter (SLUICE_CONTEXT_LENGTH), a step smaller "
            "(SLUICE_PREFILL_CHUNK) or narrower (SLUICE_LANES)."
        )
    return f"{options.model} cannot be loaded: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("## ") or type(error).__name__
