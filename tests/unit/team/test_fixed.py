"""How the ranks of a fixed team find one another, as threads of the test."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from evener.errors import LaunchError
from evener.protocol.formation import Deadlines, FixedPlace, Formation
from evener.protocol.roster import Roster
from evener.team import fixed
from evener.team.elastic import CoordinatorLink
from evener.team.environment import DistributedTrainConfig
from evener.team.fixed import meet
from helpers.coordinators import serving
from helpers.limits import PATIENCE_S
from helpers.ports import free_port

Answer = Formation | str


def at_once(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returned or raised, on threads that start together."""
    results: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except LaunchError as error:
            results[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return results


def come(address: str, timeout_s: float, place: FixedPlace, name: str = "") -> Answer:
    """What a rank hears from a coordinator; it stays connected until all have heard."""
    meeting = fixed._Meeting(
        DistributedTrainConfig.of_rank(place.rank, place.world_size),
        place.team,
        time.monotonic() + timeout_s,
    )
    meeting._find = lambda: fixed.Whereabouts(address, None)  # type: ignore[method-assign]
    try:
        meeting.meet()
        return meeting._formation
    finally:
        time.sleep(0.2)
        meeting.close()


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are ranks here, so each needs a name of its own."""
    numbers = iter(range(1000))
    monkeypatch.setattr(fixed.os, "getpid", lambda: next(numbers))


def test_teams_of_one_coordinator_do_not_mix() -> None:
    with serving(2, 2, Deadlines()) as address:
        places = [FixedPlace(team, rank, 2) for rank in range(2) for team in ("0", "1")]
        first, second, *others = at_once(
            [lambda p=place: come(address, PATIENCE_S, p) for place in places]
        )
        assert others == [first, second]
        assert not set(first.members) & set(second.members)


def test_unlike_world_sizes_are_told_on_both_sides() -> None:
    with serving(2, 2, Deadlines()) as address:
        places = [FixedPlace("0", 0, 2), FixedPlace("0", 1, 3)]
        for said in at_once([lambda p=place: come(address, PATIENCE_S, p) for place in places]):
            assert "rank 0 was started for 2 ranks and rank 1 for 3: give all the same" in said


def test_a_number_that_two_processes_have_is_refused_to_the_second() -> None:
    now_s = 0.0
    roster = Roster(2, 2, Deadlines(), now_s, is_fixed=True)
    facts = {"world_size": 2}
    assert not roster.arrive(now_s, "a/1", "first", facts, None, 1)
    why = roster.arrive(now_s, "b/2", "second", facts, None, 1)
    assert why.startswith("two processes were started as rank 1, a/1 and b/2: give each")
    # One that goes before all have come may be started again.
    roster.depart(now_s, "a/1")
    assert not roster.arrive(now_s, "b/2", "second", facts, None, 1)
    assert roster.missing == [0, 1]
    roster.report(now_s, "b/2", 0, None)
    assert roster.missing == [0]
    assert not roster.arrive(now_s, "c/3", "third", facts, None, 0)
    roster.report(now_s, "c/3", 0, None)
    roster.tick(now_s)
    assert roster.formation is not None
    assert roster.formation.members == ("c/3", "b/2")
    assert "two processes were started as rank 0" in roster.arrive(
        now_s, "d/4", "fourth", facts, None, 0
    )


def test_a_store_of_torchrun_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"127.0.0.1:{port} does not answer .* \(silent for"):
            fixed.meet(place(1, port, agent_store=True), 1.0)


def test_a_coordinator_that_ended_ranks_have_left_in_torchruns_store_is_asked_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, agents = b"of another team, long ago", HashStore()
    monkeypatch.setattr(fixed, "TCPStore", lambda *_, **__: agents)
    places = [place(rank, free_port(), agent_store=True) for rank in range(2)]
    ranks = [fixed._Meeting(each, "0", time.monotonic() + PATIENCE_S) for each in places]
    with closing(ranks[0]), closing(ranks[1]), serving(2, 2, Deadlines(), token=secret) as left:
        store = fixed._AgentStore(places[0], "0", PATIENCE_S)
        store.publish(fixed.Whereabouts(left, b"of this team, and so refused"))
        follows = threading.Thread(target=ranks[1].meet)
        follows.start()
        time.sleep(0.5)  # longer than rank 1 needs to be refused
        ranks[0].meet()
        follows.join(PATIENCE_S)
        assert ranks[0]._formation == ranks[1]._formation


def test_ranks_that_leave_at_their_end_do_not_end_the_team_and_lost_ones_do() -> None:
    roster = Roster(3, 3, Deadlines(), 0.0, is_fixed=True)
    for rank, member in enumerate("abc"):
        assert not roster.arrive(0.0, member, member, {"world_size": 3}, None, rank)
        roster.report(0.0, member, 0, None)
    roster.tick(0.0)
    assert roster.generation == 1
    roster.leave(1.0, "a", finished=True)
    roster.depart(1.0, "a")
    roster.tick(100.0)
    assert not roster.why_over
    roster.depart(101.0, "b")
    roster.tick(103.0)
    assert roster.why_over.startswith("b is lost: its connection has ended")


def place(rank: int, port: int, **more: Any) -> DistributedTrainConfig:
    known = {"coordinator_addr": "127.0.0.1", "coordinator_port": port, **more}
    return DistributedTrainConfig.of_rank(rank, 2, **known)


def test_rank_0_at_the_address_of_another_host_says_so_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 192.0.2.0/24 is set aside for documentation: no host has such an address.
    monkeypatch.setattr(fixed, "_OWN_HOST_S", 1.0)
    elsewhere = place(0, free_port(), coordinator_addr="192.0.2.7")
    with pytest.raises(LaunchError, match=r"rank 0 waited 1 s .* at 192\.0\.2\.7:.*check the"):
        meet(elsewhere, PATIENCE_S)
    assert not fixed._hosted


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    return path


def test_the_token_of_the_environment_guards_the_team(
    monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setenv("EVENER_TOKEN_FILE", str(token_file))
    with closing(fixed.host(place(0, free_port()), PATIENCE_S)) as hosted:
        assert hosted.where.token == b"0123456789abcdef"
        with pytest.raises(Exception, match="the token differs"):
            CoordinatorLink(
                hosted.where.address,
                token=None,
                member="x",
                facts={},
                timeout_s=PATIENCE_S,
                place=FixedPlace("0", 1, 2),
            )


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "the user", "evener"])
def test_a_coordinator_that_strangers_reach_is_warned_of(
    launcher: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token_file: Path,
) -> None:
    everywhere = place(0, free_port(), coordinator_addr="0.0.0.0", launched_by=launcher)
    fixed.host(everywhere, PATIENCE_S).close()
    said = capsys.readouterr().err
    warned = f"warning: anyone who reaches 0.0.0.0 port {everywhere.coordinator_port} can join"
    assert (warned in said) == (launcher != "evener")
    assert said.count("\n") <= 1
    fixed.host(place(0, free_port(), launched_by=launcher), PATIENCE_S).close()
    monkeypatch.setenv("EVENER_TOKEN_FILE", str(token_file))
    fixed.host(everywhere, PATIENCE_S).close()
    assert not capsys.readouterr().err


def test_a_coordinator_ends_with_the_last_team_that_uses_it() -> None:
    where = place(0, free_port())
    first, second = fixed.host(where, PATIENCE_S), fixed.host(where, PATIENCE_S)
    assert first is second
    first.close()
    socket.create_connection(("127.0.0.1", where.coordinator_port), PATIENCE_S).close()
    second.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", where.coordinator_port), PATIENCE_S)
