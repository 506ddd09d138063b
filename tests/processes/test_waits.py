"""A rank for which others wait is named at the terminal; nothing ends for it."""

from evener.planning import silence
from evener.team import coordinator
from evener.team.backends import connect_team
from evener.team.environment import DistributedTrainConfig
from evener.team.membership import WaitWatch
from helpers.limits import PATIENCE_S
from helpers.ranks import Rank, RankTeam


def wait_for_rank_1(rank: Rank) -> None:
    """Rank 1 comes late, twice; rank 0, whose process has the coordinator, tells what it says."""
    import torch

    coordinator.say = lambda text: rank.send(text)  # type: ignore[attr-defined]
    silence.FIRST_S = 0.5  # type: ignore[misc]
    place, cpu = DistributedTrainConfig.from_env(), torch.device("cpu")
    comm, membership = connect_team(place, "cpu", "by hand", cpu, PATIENCE_S)
    comm.report_waits_to(WaitWatch(membership))
    for _ in range(2):
        if rank.rank == 1:
            rank.receive()
        comm.barrier(what="the end of a window")
    comm.close()
    rank.send("the end")


def test_the_coordinator_names_who_is_late() -> None:
    with RankTeam(wait_for_rank_1, 3) as team:
        for _ in range(2):
            said = team.receive(0)
            assert said.startswith("evener coordinator: rank 0 and rank 2 wait for rank 1 (")
            assert f"/{team.pids[1]}); " in said
            assert said.endswith("they do so until timeout_s is over")
            team.send(1, "go on")
        assert [team.receive(rank) for rank in range(3)] == ["the end"] * 3
        team.wait()
