"""Model engines behind one interface (`base.py`). They import `generation` and `shared` only."""

from __future__ import annotations

from pathlib import Path

from shared.errors import InvalidRequest
from shared.settings import Settings
from workers.engines.base import Engine


def make(kind: str, model: str | None, settings: Settings) -> Engine:
    """The engine of that kind for `model` ("DIR[=ID]"); the model is not loaded yet.

    Engines are imported here and not before: each needs libraries that the others do without.
    Raises OSError or SluiceError for what is missing on this machine."""
    path, _, model_id = (model or "").partition("=")
    if kind == "scripted":
        from workers.engines.scripted import ScriptedEngine

        return ScriptedEngine(lanes=settings.lanes or 64)
    if kind == "llamacpp":
        from workers.engines.llamacpp.engine import LlamaCppEngine, Options

        return LlamaCppEngine(Options.of(settings, model=Path(path) if path else None, model_id=model_id or None))
    raise InvalidRequest(f"The engine {kind!r} is not built in yet.")
