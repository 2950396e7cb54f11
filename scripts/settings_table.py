"""Writes docs/settings.md from shared/settings.py: `python -m scripts.settings_table`. A test compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """# Settings

Made from `shared/settings.py` by `python -m scripts.settings_table`; do not edit.

A setting is read from the environment (`SLUICE_PORT=9000`), else from `sluice.toml` in the current folder
(`port = 9000`), else it has its default. Times are in seconds. Lists are JSON: `SLUICE_ALLOWED_HOSTS='["a.example"]'`.
`REDIS_URL` is read as well as `SLUICE_REDIS_URL`.

| environment | `sluice.toml` | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_row(name, field) for name, field in Settings.model_fields.items())


def _row(name: str, field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    choices = [str(value) for value in get_args(field.annotation) if isinstance(value, str)]
    if choices:
        meaning += f" One of: {', '.join(choices)}."
    return f"| `SLUICE_{name.upper()}` | `{name}` | {_default(field)} | {meaning} |\n"


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined:
        # Made at run time: an empty list, or a path of this machine that has no place on the page.
        made: Any = field.get_default(call_default_factory=True, validated_data={})
        return "(empty)" if made in ([], {}) else "(see right)"
    if value is None:
        return "(unset)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
