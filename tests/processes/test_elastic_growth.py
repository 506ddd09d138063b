"""A team of processes that grows from one rank to four and shrinks to one again."""

import signal

import pytest

from evener import WindowResult
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.elastic_growth import DEATHS, SIZES, Grown, check, make_model, train
from helpers.elastic_ranks import die, set_up, wait_until
from helpers.ranks import Rank, RankTeam


def work(rank: Rank, address: str) -> Grown:
    if rank.rank:
        rank.receive()  # when to begin
    ddp, _ = set_up(rank, address, "1:4", make=make_model)
    team = ddp.assembly.team

    def commit(result: WindowResult) -> None:
        if rank.rank == 0:
            if result.window in SIZES:
                rank.send(SIZES[result.window])
            # Another generation begins with each of those that come one after the other.
            wanted = [size for window, size in SIZES.items() if window <= result.window]
            wait_until(
                lambda: len(team.members) >= max(wanted, default=1) or team.membership.wants_change
            )
        if rank.rank in DEATHS.get(result.window, ()):
            die()

    with ddp:
        return train(ddp, commit)


def be_alone(rank: Rank, address: str) -> Grown:
    ddp, _ = set_up(rank, address, "1:1", make=make_model)
    with ddp:
        return train(ddp)


@pytest.mark.long
def test_growing_and_shrinking_trains_as_one_rank_alone() -> None:
    with serving(1, 4, Deadlines(gather_s=0.1)) as address, RankTeam(work, 4, address) as team:
        begun = 1
        for size in SIZES.values():
            assert team.receive(0) == size
            for rank in range(begun, size):
                team.send(rank, "begin")
            begun = size
        *ended, last = team.wait()
    assert [outcome.died_of for outcome in ended] == [signal.SIGKILL] * 3
    assert last.returned, last.story()
    with serving(1, 1, Deadlines()) as address, RankTeam(be_alone, 1, address) as team:
        (alone,) = team.wait()
    check(last.value, alone.value)
    assert (max(last.value.sizes), last.value.sizes[-1]) == (4, 1)
