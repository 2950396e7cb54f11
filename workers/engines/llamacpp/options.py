"""What the llamacpp engine is started with: the part of the settings that it reads, and the model.

Knows nothing of the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.settings import Settings

#: Lanes where the settings name none.
DEFAULT_LANES = 16
#: Cells, and prompt tokens beside decoding lanes, likewise.
DEFAULT_CELLS = 8192
DEFAULT_CHUNK = 128


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """`model`: a GGUF file, or a folder with one. `model_id`: the name it is served under.

    `threads`: None = at most the cores this process may use, fewer while others want them. `context_cells`: tokens of all lanes together.
    `context_length`: longest prompt + completion; None = the model's. `batch_tokens`: tokens decoded in one step,
    at most; of them `prefill_chunk` prompt tokens while other lanes decode. `libllama`: another library than the
    wheel's. `cache_dir`: where converted models are kept. `prefix_cache`: finished sequences kept in memory for
    requests that begin like them; 0 = none, and running ones are not shared either.
    """

    model: Path
    model_id: str
    cache_dir: Path
    lanes: int = DEFAULT_LANES
    threads: int | None = None
    context_cells: int = DEFAULT_CELLS
    context_length: int | None = None
    batch_tokens: int = 512
    prefill_chunk: int = DEFAULT_CHUNK
    libllama: Path | None = None
    prefix_cache: int = 16

    @classmethod
    def from_settings(cls, settings: Settings, model: Path, model_id: str) -> LlamaCppOptions:
        return cls(
            model=model,
            model_id=model_id,
            cache_dir=settings.cache_dir,
            lanes=settings.lanes or DEFAULT_LANES,
            threads=settings.threads,
            context_cells=settings.context_cells or DEFAULT_CELLS,
            context_length=settings.context_length,
            batch_tokens=settings.batch_tokens,
            prefill_chunk=settings.prefill_chunk or DEFAULT_CHUNK,
            libllama=settings.libllama,
            prefix_cache=settings.prefix_cache,
        )
