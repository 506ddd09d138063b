"""A script that asks for an elastic team runs only as a worker of such a team."""

import pytest

from evener import ConfigError, Ddp
from evener.team.elastic_membership import check_team_limits
from evener.team.environment import ELASTIC


def test_the_team_that_the_script_asks_for() -> None:
    check_team_limits("1:3", {ELASTIC: "1:3"})
    check_team_limits((1, 3), {ELASTIC: "1:3"})


@pytest.mark.parametrize(
    ("given", "found", "says"),
    [
        ("1:3", {}, r"start the script by `evener launch --elastic 1:3 SCRIPT`"),
        ((1, 3), {ELASTIC: "1:2"}, r"the team was started for 1:2 workers"),
        ("3:1", {}, r"give the fewest and the most workers"),
        (3, {}, r"elastic is 3; give the fewest"),
    ],
)
def test_another_team(given: object, found: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_team_limits(given, found)


def test_setup_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv(ELASTIC, raising=False)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="was not started for an elastic team"):
        Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), elastic="1:3")
