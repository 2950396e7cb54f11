"""`python -m tests.scaling.worker` is `python -m workers` with a scripted engine that takes as long to load its model as
`set_load` says, or fails.

The worker behind it is the product's own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shared.cards import ModelCard
from shared.parent import die_with_parent
from workers.engines.base import Progress
from workers.engines.scripted import ScriptedEngine

STEPS = 20


def set_load(data_dir: Path, seconds: float | None) -> None:
    """How long the next loads take; None: they fail. `data_dir`: the workers' setting."""
    data_dir.mkdir(parents=True, exist_ok=True)
    part = data_dir / "load.part"
    part.write_text("fails" if seconds is None else str(seconds))
    part.rename(data_dir / "load")


def _install(data_dir: Path) -> None:
    plain = ScriptedEngine.load

    def load(self: ScriptedEngine, progress: Progress) -> ModelCard:
        told = (data_dir / "load").read_text() if (data_dir / "load").exists() else "0"
        if told == "fails":
            raise OSError("the model's file is damaged")
        for step in range(STEPS):
            progress(step / STEPS, "loading")
            time.sleep(float(told) / STEPS)
        return plain(self, progress)

    ScriptedEngine.load = load  # type: ignore[method-assign]


def main() -> int:
    die_with_parent()
    from workers.__main__ import main as worker

    _install(Path(os.environ["SLUICE_DATA_DIR"]))
    return worker()


if __name__ == "__main__":
    sys.exit(main())
