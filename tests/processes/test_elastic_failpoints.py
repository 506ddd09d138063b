"""Elastic teams of processes: a member dies at a named point (``helpers/elastic_ranks.py``)."""

import signal
from dataclasses import dataclass
from typing import Any

import pytest

from evener import WindowResult
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.elastic_ranks import (
    WINDOWS,
    come_late,
    covers_each_once,
    die_at,
    die_in_update,
    let_steps_last_alike,
    set_up,
    summary,
    wait_until,
)
from helpers.elastic_runs import BATCH, loop
from helpers.ranks import Rank, RankTeam

POLICIES = ("sync", "cadence", "async")


@dataclass(frozen=True)
class Point:
    """Who dies, and where.

    Attributes:
        when: Before, inside or after an exchange; or ``"mid-update"``.
        what: Part of the words for the exchange; the policy says which, if that is empty.
        skip: How many such exchanges pass first.
        founders: Members of the first generation.
        healing: Who dies while another one joins at the third window: the donor of the state, its
            receiver, or a third member; empty where nobody joins.
    """

    when: str
    what: str = ""
    skip: int = 0
    founders: int = 3
    healing: str = ""

    @property
    def limits(self) -> tuple[int, int]:
        """Fewest and most members: the first generation has exactly the founders."""
        return (self.founders, self.founders + 1) if self.healing else (1, self.founders)


POINTS = {
    "before": Point("before"),
    "inside": Point("inside"),
    "after": Point("after", founders=2),
    "mid-update": Point("mid-update"),
    # Rounds of rows: SYNC calibrates and plans in four, and has one for each window. Local steps
    # are planned in one, and each window has two.
    "before publishing": Point("before", "a round", skip=7),
    "mid-heal, the donor": Point("before", "of the team's state", founders=2, healing="donor"),
    "mid-heal, the receiver": Point("after", "of the team's state", founders=2, healing="receiver"),
    "mid-heal, another one": Point("before", "of the team's state", founders=2, healing="other"),
}
#: What the suite runs; the rest takes `--all`.
USUAL = {
    "sync": ("inside", "mid-heal, the donor"),
    "cadence": ("before publishing",),
    "async": ("inside",),
}


def train(rank: Rank, address: str, name: str, policy: str) -> tuple[Any, Any]:
    pids, point = rank.receive(), POINTS[name]
    joins = rank.rank >= point.founders
    what = point.what or ("gradients" if policy == "sync" else "parameters") + " of window 2"
    if point.healing:
        if joins:
            rank.receive()  # the team has begun
        if joins and point.healing == "receiver":
            die_at(point.when, what)
    elif rank.rank == 1:
        die_in_update(3) if point.when == "mid-update" else die_at(point.when, what, point.skip)
    elif rank.rank == 0 and point.when == "inside":
        come_late(what, pids[1])
    if policy != "sync":
        let_steps_last_alike()
    least, most = point.limits
    ddp, model = set_up(rank, address, f"{least}:{most}", policy)

    def commit(result: WindowResult) -> None:
        if point.healing and not joins and result.window == 1:
            if point.healing == ("donor" if ddp.is_main_process else "other"):
                die_at(point.when, what)
            if rank.rank == 0:
                rank.send("begun")
            wait_until(lambda: ddp.assembly.team.membership.wants_change)

    with ddp:
        batch_size = BATCH if policy == "sync" else 2  # which is one of a rank's steps
        return summary(loop(ddp, model, commit, batch_size=batch_size))


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (policy, name)
        if name in USUAL[policy]
        else pytest.param(policy, name, marks=pytest.mark.long)
        for policy in POLICIES
        for name in POINTS
    ],
)
def test_a_process_dies_at_a_named_point(name: str, policy: str) -> None:
    point = POINTS[name]
    size = point.founders + bool(point.healing)
    deadlines = Deadlines(gather_s=0.1 if point.healing else 60.0)
    with (
        serving(*point.limits, deadlines) as address,
        RankTeam(train, size, address, name, policy) as team,
    ):
        for rank in range(size):
            team.send(rank, team.pids)
        if point.healing:
            assert team.receive(0) == "begun"
            team.send(point.founders, "join")
        outcomes = team.wait()
    told = [outcome.story() for outcome in outcomes]
    assert [o.died_of for o in outcomes if not o.returned] == [signal.SIGKILL], told
    values = [outcome.value for outcome in outcomes if outcome.returned]
    windows, state = values[0]
    assert windows == WINDOWS if policy == "sync" else covers_each_once(windows)
    for some, own in values:
        assert some == windows[len(windows) - len(some) :]
        assert own == state
