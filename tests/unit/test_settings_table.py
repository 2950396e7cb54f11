"""docs/settings.md is what shared/settings.py says."""

from __future__ import annotations

from scripts.settings_table import PAGE, page
from shared.settings import Settings


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.settings_table"


def test_every_setting_is_described() -> None:
    assert not [name for name, field in Settings.model_fields.items() if not field.description]
