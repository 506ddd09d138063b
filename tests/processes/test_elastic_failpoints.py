"""Elastic teams of processes: a member dies at a named point (``helpers/elastic_ranks.py``)."""

import signal
from dataclasses import astuple, dataclass
from typing import Any

import pytest

from evener import WindowResult
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.elastic_ranks import (
    WINDOWS,
    come_late,
    die_at,
    die_in_update,
    set_up,
    summary,
    wait_until,
)
from helpers.elastic_runs import loop
from helpers.ranks import Rank, RankTeam


@dataclass(frozen=True)
class Point:
    """Who dies, and where.

    Attributes:
        when: Before, inside or after an exchange; or ``"mid-update"``.
        what: Part of the words for the exchange.
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
    "before": Point("before", "gradients of window 2"),
    "inside": Point("inside", "gradients of window 2"),
    "after": Point("after", "gradients of window 2", founders=2),
    "mid-update": Point("mid-update"),
    "before publishing": Point("before", "a meeting", skip=7),
    "mid-heal, the donor": Point("before", "of a recall", founders=2, healing="donor"),
    "mid-heal, the receiver": Point("after", "of a recall", founders=2, healing="receiver"),
    "mid-heal, another one": Point("before", "of a recall", founders=2, healing="other"),
}
#: What the suite runs; the rest takes `--all`.
USUAL = ("inside", "mid-heal, the donor")


def train(rank: Rank, address: str, point: Point) -> tuple[Any, Any]:
    pids, joins = rank.receive(), rank.rank >= point.founders
    if point.healing:
        if joins:
            rank.receive()  # the team has begun
        if joins and point.healing == "receiver":
            die_at(point.when, point.what)
    elif rank.rank == 1:
        die_in_update(3) if point.when == "mid-update" else die_at(*astuple(point)[:3])
    elif rank.rank == 0 and point.when == "inside":
        come_late(point.what, pids[1])
    least, most = point.limits
    ddp, model = set_up(rank, address, f"{least}:{most}")

    def commit(result: WindowResult) -> None:
        if point.healing and not joins and result.window == 1:
            if point.healing == ("donor" if ddp.is_main_process else "other"):
                die_at(point.when, point.what)
            if rank.rank == 0:
                rank.send("begun")
            wait_until(lambda: ddp.assembly.team.wants_change)

    with ddp:
        return summary(loop(ddp, model, commit))


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in POINTS],
)
def test_a_process_dies_at_a_named_point(name: str) -> None:
    point = POINTS[name]
    size = point.founders + bool(point.healing)
    deadlines = Deadlines(gather_s=0.1 if point.healing else 60.0)
    with (
        serving(*point.limits, deadlines) as address,
        RankTeam(train, size, address, point) as team,
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
    assert windows == WINDOWS
    for some, own in values:
        assert some == WINDOWS[len(WINDOWS) - len(some) :]
        assert own == state
