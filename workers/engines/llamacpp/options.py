"""What the llamacpp engine is started with: the part of the settings that it reads, and the model.

Knows nothing of the library.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shared.settings import Settings

#: Lanes where the settings name none.
DEFAULT_LANES = 16


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """`model`: a GGUF file, or a folder with one. `model_id`, `aliases`: the names it is served under.

    `threads`: None = at most the cores this process may use, fewer while others want them. `context_cells`: tokens of all lanes together.
    `context_length`: longest prompt + completion; None = the model's. `batch_tokens`: tokens decoded in one step,
    at most; of them `prefill_chunk` prompt tokens while other lanes decode. `libllama`: another library than the
    wheel's. `cache_dir`: where converted models are kept. `prefix_cache`: finished sequences kept in memory for
    requests that begin like them; 0 = none, and running ones are not shared either.
    """

    model: Path
    model_id: str
    cache_dir: Path
    aliases: tuple[str, ...] = ()
    lanes: int = DEFAULT_LANES
    threads: int | None = None
    context_cells: int = 8192
    context_length: int | None = None
    batch_tokens: int = 512
    prefill_chunk: int = 128
    libllama: Path | None = None
    prefix_cache: int = 16

    @classmethod
    def from_settings(
        cls, settings: Settings, model: Path, model_id: str, aliases: tuple[str, ...] = ()
    ) -> LlamaCppOptions:
        return cls(
            model=model,
            model_id=model_id,
            aliases=aliases,
            cache_dir=settings.cache_dir,
            lanes=settings.lanes or DEFAULT_LANES,
            threads=settings.threads,
            context_cells=settings.context_cells,
            context_length=settings.context_length,
            batch_tokens=settings.batch_tokens,
            prefill_chunk=settings.prefill_chunk,
            libllama=settings.libllama,
            prefix_cache=settings.prefix_cache,
        )


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, capped by the container's CPU quota (cgroup v2).

    More threads than cores would spend their time waiting for each other at every layer's barrier.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()[:2]
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return cores
