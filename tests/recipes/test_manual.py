"""The recipes that average by hand print what their plain twins print."""

import re

import pytest

from helpers.recipes import RECIPES, output, output_of_ranks


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
    texts = output_of_ranks(RECIPES / name, *arguments)
    assert plain.count("\n") == texts[0].count("\n") == num_lines
    assert texts[1] == ""
    # Four digits are printed; Adam amplifies the last bits of the first steps a little.
    assert numbers(texts[0]) == pytest.approx(numbers(plain), rel=2e-3)
