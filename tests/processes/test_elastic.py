"""Elastic teams of processes: members that die at a named point, stop, or are busy for long.

The points: ``helpers/elastic_ranks.py``.
"""

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from evener import WindowResult
from evener.protocol.formation import Deadlines, ProcessState
from evener.team.connection import AgentConnection
from helpers.coordinators import serving
from helpers.elastic_ranks import (
    BATCH,
    WINDOWS,
    come_late,
    covers_each_once,
    die_at,
    let_steps_last_alike,
    set_up,
    train,
)
from helpers.forking import is_stopped
from helpers.limits import PATIENCE_S, wait_until
from helpers.ranks import Outcome, Rank, RankTeam

#: The first generation forms only when the most workers are there, however slow this machine is.
DEADLINES = Deadlines(gather_s=60.0)


@dataclass(frozen=True)
class Point:
    """Who dies, and where.

    Attributes:
        when: Before, inside or after an exchange.
        what: Part of the words for the exchange; the policy says which, if that is empty.
        skip: How many such exchanges pass first.
        founders: Members of the first generation.
        recovery: Who dies while another one joins at the third window: the source of the state, or
            its receiver; empty where nobody joins.
    """

    when: str
    what: str = ""
    skip: int = 0
    founders: int = 3
    recovery: str = ""

    @property
    def limits(self) -> tuple[int, int]:
        """Fewest and most members: the first generation has exactly the founders."""
        return (self.founders, self.founders + 1) if self.recovery else (1, self.founders)


POINTS = {
    "inside": Point("inside"),
    # Rounds of rows: SYNC calibrates and plans in four, and has one for each window. Local steps
    # are planned in one, and each window has two.
    "before publishing": Point("before", "a round", skip=7),
    "recovery, source": Point("before", "of the team's state", founders=2, recovery="source"),
    "recovery, receiver": Point("after", "of the team's state", founders=2, recovery="receiver"),
}
#: Every point, and each policy at least once; ``unit/engine/test_elastic.py`` has more.
CASES = (
    ("sync", "inside"),
    ("sync", "recovery, source"),
    ("cadence", "before publishing"),
    ("cadence", "recovery, receiver"),
    ("async", "inside"),
)


def die_somewhere(rank: Rank, address: str, name: str, policy: str) -> tuple[Any, Any]:
    pids, point = rank.receive(), POINTS[name]
    joins = rank.rank >= point.founders
    what = point.what or ("gradients" if policy == "sync" else "parameters") + " of window 2"
    if point.recovery:
        if joins:
            rank.receive()  # the team has begun
        if joins and point.recovery == "receiver":
            die_at(point.when, what)
    elif rank.rank == 1:
        die_at(point.when, what, point.skip)
    elif rank.rank == 0 and point.when == "inside":
        come_late(what, pids[1])
    if policy != "sync":
        let_steps_last_alike()
    least, most = point.limits
    ddp, model = set_up(rank, address, f"{least}:{most}", policy)

    def commit(result: WindowResult) -> None:
        if point.recovery and not joins and result.window == 1:
            if point.recovery == "source" and ddp.is_main_process:
                die_at(point.when, what)
            if rank.rank == 0:
                rank.send("begun")
            wait_until(lambda: ddp.assembly.team.membership.wants_change)

    with ddp:
        batch_size = BATCH if policy == "sync" else 2  # which is one of a rank's steps
        return train(ddp, model, commit, batch_size=batch_size)


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_a_process_dies_at_a_named_point(name: str, policy: str) -> None:
    point = POINTS[name]
    size = point.founders + bool(point.recovery)
    deadlines = Deadlines(gather_s=0.1) if point.recovery else DEADLINES
    with (
        serving(*point.limits, deadlines) as address,
        RankTeam(die_somewhere, size, address, name, policy) as team,
    ):
        for rank in range(size):
            team.send(rank, team.pids)
        if point.recovery:
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


def all_returned(outcomes: list[Outcome]) -> list[Any]:
    assert all(outcome.returned for outcome in outcomes), [o.story() for o in outcomes]
    return [outcome.value for outcome in outcomes]


def stop_in_mid_run(rank: Rank, address: str) -> tuple[Any, Any]:
    ddp, model = set_up(rank, address, "1:3")

    def commit(result: WindowResult) -> None:
        if rank.rank == 1 and result.window == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank.rank == 0 and result.window == 4:
            rank.send("the others have gone on")
            wait_until(lambda: ddp.assembly.team.membership.wants_change)

    with ddp:
        return train(ddp, model, commit)


def test_a_stopped_worker_is_left_out_and_joins_again_when_it_continues() -> None:
    with (
        serving(1, 3, DEADLINES) as address,
        AgentConnection(address, token=None, timeout_s=PATIENCE_S) as supervisor,
        RankTeam(stop_in_mid_run, 3, address) as team,
    ):
        wait_until(lambda: len(team.pids) == 3 and is_stopped(team.pids[1]))
        supervisor.report_state("w1", ProcessState.STOPPED)
        assert team.receive(0) == "the others have gone on"
        team.send_signal(1, signal.SIGCONT)
        supervisor.report_state("w1", ProcessState.CONTINUED)
        (windows, state), (some, own), others = all_returned(team.wait())
    assert others == (windows, state)
    assert windows == WINDOWS
    assert set(some) < set(WINDOWS)
    assert own == state


def be_busy(rank: Rank, address: str) -> tuple[Any, int]:
    ddp, model = set_up(rank, address, "1:2")
    holding = ctypes.PyDLL(None)  # its calls keep the GIL, so that no heartbeat is sent

    def commit(result: WindowResult) -> None:
        if rank.rank == 0 and result.window == 2:
            time.sleep(1.5)
        if result.window == 4 + rank.rank:
            holding.sleep(1)

    with ddp:
        windows, _ = train(ddp, model, commit)
        return windows, ddp.assembly.team.membership.generation


def test_nobody_is_ended_who_is_busy_for_five_leases_or_holds_the_gil() -> None:
    # A link connects again where this machine lets it hear nothing for so long.
    deadlines = Deadlines(lease_s=0.2, beat_s=0.05, reconnect_s=60.0, gather_s=60.0)
    with serving(1, 2, deadlines) as address, RankTeam(be_busy, 2, address) as team:
        assert all_returned(team.wait()) == [(WINDOWS, 1)] * 2
