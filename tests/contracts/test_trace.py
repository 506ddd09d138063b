"""A step of the plainest loop can be read from end to end: it runs through few source files."""

import sys
import time
from types import FrameType
from typing import Any

import torch
from torch import nn

import evener
from helpers.ranks import Rank, run_ranks
from helpers.source import PACKAGE

#: Files of evener that ``ddp.step()`` of a plain script may pass through. The leaf that carries the
#: exchange counts as one, whatever it consists of: a reader stops at the seam, ``comm/base.py``.
MOST_FILES = 12
LEAF = ("comm/shared", "comm/groups")
#: The first windows measure devices, make plans and cache what every later one finds ready.
FIRST_TRACED = 4
#: So long takes a sample, that both ranks are worth the exchange and none is parked.
SAMPLE_S = 0.02


def traced_steps(rank: Rank) -> list[dict[str, list[str]]]:
    """By step, the functions that ran in each file."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = evener.Ddp.setup(model, optimizer, quiet=True, devices="cpu")
    data = [(torch.randn(4), torch.randn(1)) for _ in range(96)]
    steps = []
    for x, y in ddp.loader(data, batch_size=8).epoch(0):
        time.sleep(SAMPLE_S * len(x))
        ddp.backward(nn.functional.mse_loss(model(x), y))
        seen: dict[str, set[str]] = {}

        def note(frame: FrameType, event: str, _: Any, seen: dict[str, set[str]] = seen) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(f"{PACKAGE}/"):
                seen.setdefault(file.removeprefix(f"{PACKAGE}/"), set()).add(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            ddp.step()
        finally:
            sys.setprofile(None)
        steps.append({file: sorted(names) for file, names in seen.items()})
    ddp.close()
    assert len(steps) > FIRST_TRACED
    return steps[FIRST_TRACED:]


def test_a_step_passes_through_few_files() -> None:
    for steps in run_ranks(traced_steps, 2):
        for files in steps:
            listed = [f"{file}: {', '.join(names)}" for file, names in sorted(files.items())]
            places = {"the leaf" if file.startswith(LEAF) else file for file in files}
            assert len(places) <= MOST_FILES, f"{len(places)} files\n" + "\n".join(listed)
            assert "loop/loop.py" in files, "the trace sees evener"
