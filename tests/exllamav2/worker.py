"""`python -m tests.exllamav2.worker` is `python -m workers` with exllamav2 on the CPU, and a forward pass that can be
made to fail once, from outside (`fail_once`).

Knows nothing of engines; the worker behind it is the product's own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Literal

from shared.parent import die_with_parent

Stage = Literal["prefill", "decode"]

#: What a step fails with, as torch words it.
CUDA_ERROR = "CUDA error: an illegal memory access was encountered"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def fail_once(data_dir: Path, stage: Stage, error: Literal["cuda", "memory"]) -> None:
    """The next pass of that stage, in the one worker that gets to it first, raises. `data_dir`: the workers' setting."""
    data_dir.mkdir(parents=True, exist_ok=True)
    waiting = _order(data_dir, stage).with_suffix(".part")
    waiting.write_text(error)
    waiting.rename(_order(data_dir, stage))


def has_failed(data_dir: Path, stage: Stage) -> bool:
    return not _order(data_dir, stage).exists()


def _order(data_dir: Path, stage: Stage) -> Path:
    return data_dir / f"fail-{stage}"


def _fail_where_told(data_dir: Path) -> None:
    """Wraps the package's forward pass."""
    import exllamav2
    import torch

    plain = exllamav2.ExLlamaV2.forward_chunk

    def forward_chunk(self: Any, input_ids: Any, *arguments: Any, **named: Any) -> Any:
        # A worker generates from one token of each lane; chunks of a prompt come alone.
        order = _order(data_dir, "prefill" if named.get("preprocess_only") else "decode")
        with contextlib.suppress(FileNotFoundError):
            error = order.read_text()
            order.unlink()  # it is for whoever gets it away
            raise torch.OutOfMemoryError(OUT_OF_MEMORY) if error == "memory" else RuntimeError(CUDA_ERROR)
        return plain(self, input_ids, *arguments, **named)

    exllamav2.ExLlamaV2.forward_chunk = forward_chunk


def main() -> int:
    die_with_parent()
    from tests.exllamav2 import harness
    from workers.__main__ import main as worker

    harness.install()
    if data_dir := os.environ.get("SLUICE_DATA_DIR"):
        _fail_where_told(Path(data_dir))
    return worker()


if __name__ == "__main__":
    sys.exit(main())
