"""``docs/coming-from.md`` points to what is there, and calls nothing missing that is there."""

import re

import pytest

import evener
from helpers.source import ROOT

TEXT = (ROOT / "docs" / "coming-from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("|---")
]
NAMES = {
    (row[0], name)
    for row in ROWS
    for name in re.findall(r"`([A-Za-z]\w*(?:\.\w+)?)(?:\([^`]*\))?`", row[1])
    if name.partition(".")[0] in evener.__all__
}
OPTIONS = re.findall(r"`(\w+)\((\w+)=\.\.\.\)`", TEXT)


@pytest.mark.parametrize(("row", "name"), sorted(NAMES))
def test_what_is_here_is_here(row: str, name: str) -> None:
    thing = evener
    for part in name.split("."):
        thing = getattr(thing, part)


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_options_exist(owner: str, option: str) -> None:
    assert option in getattr(evener, owner).__dataclass_fields__


@pytest.mark.parametrize("row", [row for row in ROWS if row[-1] == "not yet"], ids=lambda r: r[0])
def test_what_is_not_yet_here_is_not(row: list[str]) -> None:
    for name in re.findall(r"`(\w+)`", row[0]):
        assert name not in evener.__all__, f"{name} is there: docs/coming-from.md says not yet"


def test_the_tables_are_read() -> None:
    assert len(ROWS) > 60
    assert len(NAMES) > 40
    assert all(len(row) == 3 for row in ROWS)
