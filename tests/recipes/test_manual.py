"""The recipes that average by hand print what their plain twins print."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

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


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize(
    ("name", "arguments", "num_lines"),
    [
        ("gan_manual.py", ["--shares", "3,1"], 10),
        ("reinforce_manual.py", [], 10),
    ],
)
def test_two_processes_print_what_plain_pytorch_prints(name, arguments, num_lines):
    plain = output(RECIPES / "plain" / name)

    def run(_: Rank) -> str:
        return output(RECIPES / name, *arguments)

    texts = run_ranks(run, 2)
    assert plain.count("\n") == texts[0].count("\n") == num_lines
    assert texts[1] == ""
    # Four digits are printed; Adam amplifies the last bits of the first steps a little.
    assert numbers(texts[0]) == pytest.approx(numbers(plain), rel=2e-3)
