"""A rank dies at each named point, in each policy; on threads.

``helpers/elastic_ranks.py`` says where the points are. All ranks that remain end with the bits of a
team without any change that goes by the same plans. In SYNC these are those of one process, but for
rounding; what one process makes of local steps is not defined.
"""

import pytest
import torch
from torch import nn

from helpers.clocks import RankClocks
from helpers.elastic import STEP, Kill
from helpers.elastic_local import LocalRuns
from helpers.elastic_runs import alone, check, run

#: Rounds of rows that have passed when a rank has applied window 1, and the others do not know it.
#: SYNC: two to calibrate, two to plan, one for each window; else one to plan, two for each window.
APPLIED = {"sync": 6, "cadence": 5, "async": 5}


def named(point: str, policy: str) -> Kill:
    what = "gradients" if policy == "sync" else "buffers"
    return {
        "before": Kill("w1", f"{what} of window 1"),
        "inside": Kill("w1", f"{what} of window 1", when="inside", told=["w0"]),
        "after": Kill("w1", f"{what} of window 1", when="after"),
        "mid-update": Kill("w1", STEP, skip=1),
        "before publishing": Kill("w1", "a round", skip=APPLIED[policy]),
        "mid-heal, the donor": Kill("w0", "of the team's state"),
        "mid-heal, the receiver": Kill("j", "of the team's state", when="after"),
        "mid-heal, another one": Kill("w1", "of the team's state"),
    }[point]


POINTS = [
    *("before", "inside", "after", "mid-update", "before publishing"),
    *("mid-heal, the donor", "mid-heal, the receiver", "mid-heal, another one"),
]
every_point = pytest.mark.parametrize("point", POINTS)


def left(point: str, victim: str) -> list[str]:
    """Who comes to the end; another rank joins where one dies while that happens."""
    joiner = ["j"] if "heal" in point else []
    return sorted({"w0", "w1", "w2", *joiner} - {victim})


@every_point
def test_sync(point: str) -> None:
    kill = named(point, "sync")
    joins_after = 0 if "heal" in point else None
    team, trained = run(3, [kill], joins_after=joins_after, norm=nn.LayerNorm)
    check(team, trained, norm=nn.LayerNorm)
    assert sorted(trained) == left(point, kill.member)
    one = next(iter(trained.values()))
    for found, expected in zip(one.state, alone(nn.LayerNorm), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


@every_point
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_local_steps(
    policy: str,
    point: str,
    monkeypatch: pytest.MonkeyPatch,
    rank_clocks: RankClocks,
) -> None:
    kill = named(point, policy)
    joins = "heal" in point
    runs = LocalRuns(monkeypatch, rank_clocks, policy, 48)
    runs.run(3, [kill], joins_after=0 if joins else None)
    assert sorted(runs.trained) == left(point, kill.member)
