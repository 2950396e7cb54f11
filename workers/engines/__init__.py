"""Model engines behind one interface (`base.py`). They import `generation` and `shared` only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import InvalidRequest
from shared.settings import Settings
from workers.engines.llamacpp.carried import CARRIED_MODEL_ID, find_carried_model

if TYPE_CHECKING:  # the `sluice` command comes by here on machines without what engines need
    from workers.engines.base import Engine


def make(kind: str, model: str | None, settings: Settings) -> Engine:
    """The engine of that kind for `model` ("DIR[=ID]"); the model is not loaded yet.

    Engines are imported here and not before: each needs libraries that the others do without.
    Raises OSError or SluiceError for what is missing on this machine."""
    path, _ = split_model(model or "")
    if kind == "scripted":
        from workers.engines.scripted import ScriptedEngine

        return ScriptedEngine(lanes=settings.lanes or 64)
    if kind == "llamacpp":
        from workers.engines.llamacpp.engine import LlamaCppEngine
        from workers.engines.llamacpp.options import LlamaCppOptions

        file = Path(path) if path else find_carried_model(settings.cache_dir)
        if file is None:
            raise FileNotFoundError(
                f"no model: name one with --model FILE.gguf, or start with ./scripts/up, which fetches a small one into "
                f"{settings.cache_dir}."
            )
        return LlamaCppEngine(LlamaCppOptions.from_settings(settings, file, served_id(kind, model)))
    if kind == "exllamav2":
        from workers.engines.exllamav2.engine import ExLlamaV2Engine
        from workers.engines.exllamav2.options import ExLlamaV2Options

        if not path:
            raise FileNotFoundError("no model: name a folder with an EXL2, GPTQ or FP16 model with --model DIR.")
        folder = Path(path)
        return ExLlamaV2Engine(ExLlamaV2Options.from_settings(settings, folder, served_id(kind, model)))
    raise InvalidRequest(f"The engine {kind!r} is not built in yet.")


def served_id(kind: str, model: str | None) -> str:
    """The id under which `make` serves that model; "" if it would find none."""
    if kind == "scripted":
        return "scripted"
    path, model_id = split_model(model or "")
    if path:
        return model_id or model_name(Path(path))
    return CARRIED_MODEL_ID if kind == "llamacpp" else ""


def split_model(model: str) -> tuple[str, str]:
    """`DIR` or `DIR=ID` as (path, id or ""); a path that exists as it is written may hold a `=` itself."""
    if Path(model).exists() or "=" not in model:
        return model, ""
    path, _, model_id = model.rpartition("=")
    return path, model_id


def model_name(path: Path) -> str:
    """The id of a model that was given none: its file's name without the format (`Name.Q4_1.gguf` -> `Name`), or its
    folder's."""
    return (
        re.sub(r"[.-](I?Q\d\w*|B?F16|F32)$", "", path.stem, flags=re.IGNORECASE)
        if path.suffix == ".gguf"
        else path.name
    )
