"""Elastic teams of processes: stopped, busy and disturbed members, and their coordinator."""

import ctypes
import os
import random
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from evener import WindowResult
from evener.comm.base import Communicator
from evener.errors import CollectiveError
from evener.protocol.formation import Deadlines, ProcessState
from evener.team import elastic_membership
from evener.team.connection import AgentConnection
from evener.team.host import KernelState, state_of
from helpers.coordinators import serving
from helpers.elastic_ranks import WINDOWS, die, set_up, summary, wait_until
from helpers.elastic_runs import loop
from helpers.forking import is_stopped
from helpers.limits import PATIENCE_S
from helpers.ranks import Outcome, Rank, RankTeam

#: The first generation forms only when the most workers are there, however slow this machine is.
DEADLINES = Deadlines(gather_s=60.0)


def all_returned(outcomes: list[Outcome]) -> list[Any]:
    assert all(outcome.returned for outcome in outcomes), [o.story() for o in outcomes]
    return [outcome.value for outcome in outcomes]


def train_stopped(rank: Rank, address: str) -> tuple[Any, Any]:
    ddp, model = set_up(rank, address, "1:3")

    def commit(result: WindowResult) -> None:
        if rank.rank == 1 and result.window == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank.rank == 0 and result.window == 4:
            rank.send("the others have gone on")
            wait_until(lambda: ddp.assembly.team.membership.wants_change)

    with ddp:
        return summary(loop(ddp, model, commit))


def test_a_stopped_worker_is_left_out_and_joins_again_when_it_continues() -> None:
    with (
        serving(1, 3, DEADLINES) as address,
        AgentConnection(address, token=None, timeout_s=PATIENCE_S) as supervisor,
        RankTeam(train_stopped, 3, address) as team,
    ):
        wait_until(lambda: len(team.pids) == 3 and is_stopped(team.pids[1]))
        supervisor.tell("w1", ProcessState.STOPPED)
        assert team.receive(0) == "the others have gone on"
        team.send_signal(1, signal.SIGCONT)
        supervisor.tell("w1", ProcessState.CONTINUED)
        (windows, state), (some, own), others = all_returned(team.wait())
    assert others == (windows, state)
    assert windows == WINDOWS
    assert set(some) < set(WINDOWS)
    assert own == state


def stop_while_memory_is_shared(rank: Rank, address: str) -> str:
    def stop(_: Communicator) -> NoReturn:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError

    if rank.rank == 1:
        elastic_membership.share_memory = stop
    try:
        set_up(rank, address, "1:2")
    except CollectiveError as error:
        return str(error)
    return ""


def test_a_worker_that_stops_while_a_generation_connects_holds_the_others_up_no_longer() -> None:
    with (
        serving(1, 2, DEADLINES) as address,
        AgentConnection(address, token=None, timeout_s=PATIENCE_S) as supervisor,
        RankTeam(stop_while_memory_is_shared, 2, address) as team,
    ):
        wait_until(lambda: len(team.pids) == 2 and is_stopped(team.pids[1]))
        supervisor.tell("w1", ProcessState.STOPPED)
        waited, _ = team.wait(PATIENCE_S / 2)  # exchanges have PATIENCE_S
    assert "in 'where ranks run'" in waited.value


def train_until_told(rank: Rank, address: str) -> tuple[Any, Any]:
    ddp, model = set_up(rank, address, "1:2")

    def commit(result: WindowResult) -> None:
        if rank.rank == 0 and result.window == 2:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with ddp:
            return summary(loop(ddp, model, commit)), ddp.assembly.team.membership.generation
    except KeyboardInterrupt as left:
        return str(left), ddp.window


def test_the_main_process_leaves_after_its_window_when_it_is_told_to() -> None:
    with serving(1, 2, DEADLINES) as address, RankTeam(train_until_told, 2, address) as team:
        (words, window), ((windows, _), generation) = all_returned(team.wait())
    assert words == f"rank 0 has left the team in window {window}"
    assert 3 < window < len(WINDOWS)
    assert (windows, generation) == (WINDOWS, 2)


def train_busy(rank: Rank, address: str) -> tuple[Any, int]:
    ddp, model = set_up(rank, address, "1:2")
    holding = ctypes.PyDLL(None)  # its calls keep the GIL, so that no heartbeat is sent

    def commit(result: WindowResult) -> None:
        if rank.rank == 0 and result.window == 2:
            time.sleep(1.5)
        if result.window == 4 + rank.rank:
            holding.sleep(1)

    with ddp:
        windows, _ = summary(loop(ddp, model, commit))
        return windows, ddp.assembly.team.membership.generation


def test_nobody_is_ended_who_is_busy_for_five_leases_or_holds_the_gil() -> None:
    # A link connects again where this machine lets it hear nothing for so long.
    deadlines = Deadlines(lease_s=0.2, beat_s=0.05, reconnect_s=60.0, gather_s=60.0)
    with serving(1, 2, deadlines) as address, RankTeam(train_busy, 2, address) as team:
        assert all_returned(team.wait()) == [(WINDOWS, 1)] * 2


def train_on(rank: Rank, address: str) -> tuple[Any, Any]:
    ddp, model = set_up(rank, address, "1:3")

    def commit(result: WindowResult) -> None:
        if rank.rank == 0 and result.window in (2, 5):
            rank.send((result.window, ddp.assembly.team.membership.generation, rank.port))
            rank.receive()
        if rank.rank == 2 and result.window == 4:
            die()

    with ddp:
        return summary(loop(ddp, model, commit))


def test_workers_outlive_their_coordinator_and_the_next_one_forms_generations() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        address = first.enter_context(serving(1, 3, DEADLINES))
        team = stack.enter_context(RankTeam(train_on, 3, address))
        assert team.receive(0)[:2] == (2, 1)
        first.close()
        port = int(address.rpartition(":")[2])
        stack.enter_context(serving(1, 3, replace(DEADLINES, lease_s=1.0), port=port))
        team.send(0, "continue")
        assert team.receive(0)[:2] == (5, 2)
        team.send(0, "continue")
        *outcomes, victim = team.wait()
        assert victim.died_of is signal.SIGKILL
        first_rank, second_rank = all_returned(outcomes)
        assert first_rank == second_rank
        assert first_rank[0] == WINDOWS


def test_strangers_at_the_connections_between_members_do_no_harm() -> None:
    """Gloo's listeners take every connection: what strangers send is not taken for a member's.

    Each costs the member one descriptor, and the next generation has none of them.
    """
    with (
        ExitStack() as crowd,
        serving(1, 3, DEADLINES) as address,
        RankTeam(train_on, 3, address) as team,
    ):
        earlier: set[int] = set()
        for window in (2, 5):
            at, _, unused = team.receive(0)
            assert at == window
            for pid in team.pids[:2]:
                assert not held(pid, earlier)
                ports = listening_ports(pid) - {unused}  # on which fixed teams meet
                assert ports
                strangers = {port for each in ports for port in flood(each, crowd)}
                wait_until(lambda pid=pid, those=strangers: held(pid, those) == those)
                earlier |= strangers
            team.send(0, "continue")
        *outcomes, _ = team.wait()
    first_rank, second_rank = all_returned(outcomes)
    assert first_rank == second_rank
    assert first_rank[0] == WINDOWS


def connections(pid: int) -> list[tuple[int, int, bool]]:
    """Local port, the other end's port, and whether it listens: of each TCP socket of a process."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [
        (int(row[1].partition(":")[2], 16), int(row[2].partition(":")[2], 16), row[3] == "0A")
        for row in rows
        if row[9] in sockets
    ]


def listening_ports(pid: int) -> set[int]:
    """Ports on which a process listens."""
    return {port for port, _, listens in connections(pid) if listens}


def held(pid: int, strangers: set[int]) -> set[int]:
    """Those of the strangers' ports to which a process holds a connection."""
    return {port for _, port, _ in connections(pid)} & strangers


def flood(port: int, crowd: ExitStack, count: int = 40) -> set[int]:
    """Connects to a port many times; some are silent, others send what no member would.

    Returns the ports of those that stay; some end at once.
    """
    noise, stay = random.Random(0), set()
    for number in range(count):
        stranger = crowd.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        with suppress(OSError):
            if number % 2:
                stranger.sendall(noise.randbytes(4096))
            if number % 4 == 3:
                stranger.close()
            else:
                stay.add(stranger.getsockname()[1])
    return stay


def train_with_processes(rank: Rank, address: str) -> tuple[Any, Any]:
    ddp, model = set_up(rank, address, "1:2")

    def commit(result: WindowResult) -> None:
        if rank.rank == 1 and result.window == 5:
            own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
            rank.send([int(pid) for pid in own.read_text().split()])
            die()

    with ddp:
        return summary(loop(ddp, model, commit, num_workers=2))


@pytest.mark.long
def test_a_worker_is_killed_whose_data_comes_from_processes() -> None:
    with serving(1, 2, DEADLINES) as address, RankTeam(train_with_processes, 2, address) as team:
        children = team.receive(1)
        survivor, victim = team.wait()
        assert victim.died_of is signal.SIGKILL
        ((windows, _),) = all_returned([survivor])
        assert windows == WINDOWS
        assert len(children) >= 2
        wait_until(lambda: all(state_of(pid) is KernelState.GONE for pid in children))
