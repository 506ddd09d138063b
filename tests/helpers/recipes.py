"""Runs recipes as their users do, and measures how far a ported script is from its plain twin."""

import contextlib
import difflib
import io
import runpy
import sys
from pathlib import Path

from helpers.ranks import Rank, run_ranks

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def output(path: Path, *arguments: str) -> str:
    """What a script prints, run in this process."""
    before, sys.argv = sys.argv, [path.name, "--smoke", *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def output_of_ranks(path: Path, *arguments: str, world_size: int = 2) -> list[str]:
    """What each rank prints."""

    def run(_: Rank) -> str:
        return output(path, *arguments)

    return run_ranks(run, world_size)


def lines_of_team(texts: list[str]) -> list[str]:
    """The lines that ranks print, rank by rank.

    The main rank prints, and another rank takes over when it is parked, which may happen with so
    small a model: so a line may come from any rank, but from one only.
    """
    lines = [line for text in texts for line in text.splitlines()]
    assert len(lines) == len(set(lines)), f"a line was printed twice: {texts}"
    return lines


def new_lines(before: str, after: str) -> list[str]:
    """Lines of code of ``after`` that ``before`` lacks; indentation and comments do not count."""
    old, new = (
        [stripped for line in _code(text) if (stripped := line.partition("  # ")[0].strip())]
        for text in (before, after)
    )
    marked = difflib.ndiff(old, new)
    return [line[2:] for line in marked if line.startswith("+ ")]


def _code(text: str) -> list[str]:
    """A script's lines after its docstring."""
    if text.lstrip().startswith('"""'):
        text = text.split('"""', 2)[2]
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]
