"""A team of threads: who is present, and what waits for whom."""

import threading

import pytest

from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.engine.team import Team
from evener.errors import CollectiveError
from helpers.limits import PATIENCE_S
from helpers.teams import run_team


def test_the_present_ranks_join_in_smaller_and_smaller_communicators() -> None:
    def body(comm: Communicator) -> list[tuple[tuple[int, ...], frozenset[int], int]]:
        team = Team(comm)
        seen = []
        for leaving in (0, 2):
            team.park({leaving})
            seen.append((team.members, team.parked, team.comm.world_size))
            if leaving == comm.rank:
                assert team.comm is team.whole
                break
            told = team.introduce({"rank": comm.rank})
            assert [greeting["rank"] for greeting in told] == list(team.members)
        smaller = team.comm
        team.rejoin()
        assert team.comm is team.whole is comm
        assert smaller is comm or smaller.has_ended
        assert (team.members, team.parked) == ((0, 1, 2), frozenset())
        return seen

    away, stays, second = run_team(3, body)
    assert away == [((1, 2), frozenset({0}), 3)]
    assert stays == [((1, 2), frozenset({0}), 2), ((1,), frozenset({0, 2}), 1)]
    assert second[1] == ((1,), frozenset({0, 2}), 3)


def test_hurrying_ends_a_wait_for_a_rank_that_does_not_come() -> None:
    ranks = ThreadTeam(2)
    team, other = Team(ranks.communicator(0)), ranks.communicator(1)
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(CollectiveError):
            team.introduce({})
        failed.set()

    thread = threading.Thread(target=wait, name="waits")
    thread.start()
    team.hurry(0.05)
    thread.join(PATIENCE_S)
    assert failed.is_set()
    team.close()
    other.close()
