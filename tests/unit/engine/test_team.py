"""A team of threads: who is present, and what waits for whom."""

import threading
from types import SimpleNamespace

import pytest

from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.engine import team as module
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
            assert set(team.places()) == set(team.members)
        smaller = team.comm
        team.call(is_parked=bool(team.parked & {comm.rank}))
        team.rejoin()
        assert team.comm is team.whole is comm
        assert smaller is comm or smaller.has_ended
        assert (team.members, team.parked) == ((0, 1, 2), frozenset())
        return seen

    away, stays, second = run_team(3, body)
    assert away == [((1, 2), frozenset({0}), 3)]
    assert stays == [((1, 2), frozenset({0}), 2), ((1,), frozenset({0, 2}), 1)]
    assert second[1] == ((1,), frozenset({0, 2}), 3)


def test_a_parked_rank_waits_at_the_door_longer_than_any_exchange_may_take() -> None:
    waits: list[float | None] = []

    def body(comm: Communicator) -> None:
        comm_barrier = comm.barrier

        def barrier(*, what: str, timeout_s: float | None = None) -> None:
            waits.append(timeout_s)
            comm_barrier(what=what, timeout_s=timeout_s)

        comm.barrier = barrier  # type: ignore[method-assign]
        Team(comm).call(is_parked=comm.rank == 1)

    run_team(2, body)
    assert sorted(waits, key=str) == [module.PARKED_TIMEOUT_S, None]
    assert module.PARKED_TIMEOUT_S > 24 * 3600


def test_parked_ranks_are_called_when_somebody_is_parked_and_time_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    def body(comm: Communicator) -> tuple[bool, ...]:
        nonlocal now
        team = Team(comm)
        seen = [team.call_is_due]
        team.park({1})
        seen.append(team.call_is_due)
        team.call(is_parked=comm.rank == 1)
        seen.append(team.call_is_due)
        comm.barrier(what="the hands of the clock")
        now = 100.0 + module.CALL_S
        seen.append(team.call_is_due)
        comm.barrier(what="the end")
        return tuple(seen)

    assert run_team(2, body) == [(False, True, False, True)] * 2


def test_a_closed_team_has_ended_and_says_no_places() -> None:
    ranks = ThreadTeam(2)
    team, other = Team(ranks.communicator(0)), ranks.communicator(1)
    assert not team.has_ended
    team.close()
    assert team.has_ended
    assert team.comm.has_ended
    assert team.places() == {}
    other.close()


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
