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
from typing import Any

import pytest

from evener import WindowResult
from evener.protocol.formation import Deadlines, ProcessState
from evener.team.connection import SupervisorConnection
from evener.team.process_state import KernelState, state_of
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
            wait_until(lambda: ddp.assembly.team.wants_change)

    with ddp:
        return summary(loop(ddp, model, commit))


def test_a_stopped_worker_is_left_out_and_joins_again_when_it_continues() -> None:
    with (
        serving(1, 3, DEADLINES) as address,
        SupervisorConnection(address, token=None, timeout_s=PATIENCE_S) as supervisor,
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
            rank.send((result.window, ddp.assembly.team.membership.generation))
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
        assert team.receive(0) == (2, 1)
        first.close()
        port = int(address.rpartition(":")[2])
        stack.enter_context(serving(1, 3, replace(DEADLINES, lease_s=1.0), port=port))
        team.send(0, "continue")
        assert team.receive(0) == (5, 2)
        team.send(0, "continue")
        *outcomes, victim = team.wait()
        assert victim.died_of is signal.SIGKILL
        first_rank, second_rank = all_returned(outcomes)
        assert first_rank == second_rank
        assert first_rank[0] == WINDOWS


def test_strangers_at_the_connections_between_members_do_no_harm() -> None:
    """Gloo's listeners take every connection: what strangers send is not taken for a member's."""
    with serving(1, 3, DEADLINES) as address, RankTeam(train_on, 3, address) as team:
        crowd: list[socket.socket] = []
        seen = []
        for window in (2, 5):
            assert team.receive(0)[0] == window
            before = [len(descriptors(pid)) for pid in team.pids[:2]]
            ports = {port for pid in team.pids[:2] for port in listening_ports(pid)}
            assert ports
            crowd += flood(ports)
            seen.append((len(ports), before, [len(descriptors(pid)) for pid in team.pids[:2]]))
            team.send(0, "continue")
        *outcomes, _ = team.wait()
        for stranger in crowd:
            stranger.close()
    print(f"by flood: listeners, descriptors of members before, and after it: {seen}")
    first_rank, second_rank = all_returned(outcomes)
    assert first_rank == second_rank
    assert first_rank[0] == WINDOWS


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(str(path.readlink()))
    return found


def listening_ports(pid: int) -> list[int]:
    """Ports on which a process listens."""
    sockets = {name[8:-1] for name in descriptors(pid) if name.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets
    ]


def flood(ports: set[int], each: int = 40) -> list[socket.socket]:
    """Connects to each port many times; some are silent, others send what no member would."""
    noise, crowd = random.Random(0), []
    for port in sorted(ports):
        for number in range(each):
            stranger = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            crowd.append(stranger)
            with suppress(OSError):
                if number % 2:
                    stranger.sendall(noise.randbytes(4096))
                if number % 4 == 3:
                    stranger.close()
    return crowd


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
