"""The recipe of a managed run learns, on two workers, and saves on the way."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import torch

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "managed.py"


def test_the_managed_recipe_learns_and_saves(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", [RECIPE.name, "--smoke", "--devices", "2", "--out", str(tmp_path)]
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(RECIPE), run_name="__main__")
    lines = printed.getvalue().splitlines()
    epochs = [re.findall(r"-?\d+(?:\.\d+)?", line) for line in lines if "epoch" in line]
    assert [numbers[0] for numbers in epochs] == ["0", "1", "2"]
    losses = [float(numbers[1]) for numbers in epochs]
    assert losses[2] < losses[1] < losses[0]
    assert float(epochs[2][3]) > 80, "of the characters of new sequences; 14 is guessing"
    assert len(lines[-2]) == len("(()(()))()")
    assert lines[-1].startswith("57 steps")
    assert set(torch.load(tmp_path / "last.pt")) == {
        *("embed.weight", "head.weight", "head.bias"),
        *(f"rnn.{kind}_{way}_l0" for kind in ("weight", "bias") for way in ("ih", "hh")),
    }
