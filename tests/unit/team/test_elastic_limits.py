"""A script that asks for an elastic team runs only as a worker of such a team, or starts one."""

import os
import sys

import pytest
import torch

from evener import ConfigError, Ddp
from evener.team import starting
from evener.team.elastic_membership import check_team_limits
from evener.team.environment import ELASTIC


def set_up(elastic: object) -> None:
    model = torch.nn.Linear(1, 1)
    Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), elastic=elastic, quiet=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, r"start the script by itself or by `evener launch --elastic 1:3 SCRIPT`"),
        ({ELASTIC: "1:2"}, r"the team was started for 1:2 workers"),
    ],
)
def test_another_team(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_team_limits("1:3", environ)


@pytest.mark.parametrize("given", ["3:1", 3, "1:10000", f"1:{'9' * 5000}"])
def test_no_team(given: object) -> None:
    says = f"elastic is {repr(given)[:9]}.*; give the fewest and the most"
    with pytest.raises(ConfigError, match=says):
        set_up(given)


def test_a_script_that_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ELASTIC, raising=False)
    with pytest.raises(
        ConfigError, match=r"elastic is '1:3', but .*put the training into a script"
    ):
        set_up((1, 3))


def test_a_script_that_was_started_plainly_becomes_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BecomesError(Exception):
        pass

    def execv(program: str, words: list[str]) -> None:
        raise BecomesError(program, words)

    monkeypatch.delenv(ELASTIC, raising=False)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(starting, "how_started", lambda: ["train.py", "--lr", "1"])
    with pytest.raises(BecomesError) as becomes:
        set_up("1:3")
    program, words = becomes.value.args
    assert program == sys.executable
    launcher = words.index("evener.team.launch")
    assert words[launcher + 1] == "1:3"
    assert words[-4:] == ["evener.team.script", "train.py", "--lr", "1"]
