"""Puts every module of an exllamav2 model on the CPU: device index -1, which the package itself maps to "cpu".

Replaces the handful of functions that ask for a CUDA device. Knows nothing of kernels or attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

#: What is replaced, as `module:attribute` and the parameters that the replacement counts on.
REPLACED = {
    "exllamav2.model:ExLlamaV2.set_device_map": ("self", "allocation", "embed_cpu"),
    "exllamav2.model:ExLlamaV2.get_device_context": ("self", "device_idx", "scratch"),
    "exllamav2.model:ExLlamaV2.load_autosplit_gen": (
        *("self", "cache", "reserve_vram", "last_id_only", "callback", "callback_gen"),
    ),
    "exllamav2.model:safe_move_tensor": ("tensor", "device", "non_blocking"),
    "exllamav2.attn_params:safe_move_tensor": ("tensor", "device", "non_blocking"),
    "exllamav2.compat:safe_move_tensor": ("tensor", "device", "non_blocking"),
}


def place_on_cpu() -> None:
    """Imports exllamav2 (its `exllamav2_ext` must be there) and replaces what REPLACED names. Once a process."""
    import exllamav2.attn_params
    import exllamav2.compat
    import exllamav2.model

    model = exllamav2.model.ExLlamaV2
    model.set_device_map = _set_device_map
    model.get_device_context = _get_device_context
    model.load_autosplit_gen = _load_autosplit_gen
    for module in (exllamav2.model, exllamav2.attn_params, exllamav2.compat):
        module.safe_move_tensor = _safe_move_tensor
    if not torch.cuda.is_available():
        torch.cuda.synchronize = _synchronize  # STFile.get_tensor calls it whatever the device


def _set_device_map(self: Any, allocation: list[float], embed_cpu: bool = True) -> list[float]:
    self.cache_map = {}
    self.device_context = []
    for module in self.modules:
        module.set_device_idx(-1)
    self.set_cache_map()
    return [0.0 for _ in allocation]


def _get_device_context(self: Any, device_idx: int, scratch: bool = True) -> Any:
    """One context a model, with the tables of sines and cosines; the real one has None for the CPU."""
    from exllamav2.device import ExLlamaV2DeviceContext

    if not self.device_context:
        # without __init__, which makes a CUDA stream
        context = ExLlamaV2DeviceContext.__new__(ExLlamaV2DeviceContext)
        context.model, context.device_idx, context.ready = self, -1, False
        context.scratch, context.scratch_bytes, context.scratch_idx = None, 0, 0
        context.archparams, context.stream = self.config.arch.lm, None
        self.device_context.append(context)
    context = self.device_context[0]
    if not context.ready:
        context.prepare(False)
    return context


def _load_autosplit_gen(
    self: Any,
    cache: Any,
    reserve_vram: int | list[int] | None = None,
    last_id_only: bool = False,
    callback: Callable[[int, int], None] | None = None,
    callback_gen: Callable[[int, int], Iterator[Any]] | None = None,
) -> Iterator[Any]:
    """There is nothing to split: a plain load, after which the lazy cache gets its tensors."""
    self.config.max_input_len = min(self.config.max_input_len, self.config.max_seq_len)
    yield from self.load_gen(callback=callback, callback_gen=callback_gen)
    with torch.inference_mode():
        cache.update_cache_tensors()


def _safe_move_tensor(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
    """Everything is where it belongs. The original takes -1 for the number of a device and fails."""
    return tensor


def _synchronize(device: Any = None) -> None:
    pass
