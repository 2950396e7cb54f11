"""docs/troubleshooting.md quotes the product: each message that it names is one that the source has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def source() -> str:
    """All Python and Lua; pieces of one string that stand on several lines are joined."""
    files = (
        f for d in ("api", "workers", "shared", "scripts") for f in (ROOT / d).rglob("*") if f.suffix in (".py", ".lua")
    )
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))


SOURCE = source()


def quoted() -> list[str]:
    """Messages, codes and events: what stands in the first two columns of the tables."""
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith(("| `", "| 5", "| 4")):
            found += [text for cell in cells[:2] for text in re.findall(r"`([^`]+)`", cell)]
    return sorted(set(found))


@pytest.mark.parametrize("text", quoted())
def test_what_is_quoted_is_in_the_source(text: str) -> None:
    wanted = re.escape(text).replace(r"\ 3\ ", r" \{[^}]+\} ")  # a number that the source fills in
    assert re.search(wanted, SOURCE), text


def test_there_is_something_to_compare() -> None:
    assert len(quoted()) > 30
