"""What an exception says beside its message: the rank, and the line of the user's code."""

from pathlib import Path

import pytest
import torch
from torch import nn

from evener import EvenerError, UsageError
from evener.comm.base import Communicator
from helpers.teams import run_team, setup


def line_of(mark: str) -> str:
    """File and number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{__file__}:{number}"


def train(comm: Communicator, error: Exception | None) -> list[str]:
    """Rank 1 does something wrong; returns what the exception of this rank notes."""
    model = nn.Linear(2, 1)
    ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), shares=[1, 1])
    with pytest.raises(Exception) as caught, ddp:  # noqa: PT011, PT012  # looked at below
        for x in ddp.loader([torch.ones(2)] * 8, batch_size=4):
            if comm.rank == 1:
                if error is not None:
                    raise error
                ddp.step()  # too early
            ddp.backward(model(x).mean())
            ddp.step()  # together
    assert isinstance(caught.value, EvenerError) or caught.value is error
    return list(getattr(caught.value, "__notes__", []))


def test_an_error_of_evener_names_the_rank_and_the_line_that_has_raised_it() -> None:
    first, second = run_team(2, lambda comm: train(comm, None))
    assert f"evener: raised on rank 0 at {line_of('together')}" in first
    assert f"evener: raised on rank 1 at {line_of('too early')}" in second


@pytest.mark.parametrize(("kind", "is_noted"), [(UsageError, True), (ValueError, False)])
def test_an_error_of_the_user_has_a_traceback_and_no_note(
    kind: type[Exception], is_noted: bool
) -> None:
    _, notes = run_team(2, lambda comm: train(comm, kind("wrong")))
    assert any("raised on rank 1 at" in note for note in notes) == is_noted
