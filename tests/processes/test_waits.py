"""A rank for which others wait is named at the terminal, with its state; nothing ends for it."""

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from evener.comm.base import Call, Communicator, WaitListener
from evener.planning import silence
from evener.team import waits
from evener.team.members import Member
from evener.team.waits import WaitWatch
from helpers.elastic_ranks import wait_until
from helpers.forking import is_stopped, proc_status
from helpers.launched import Sandbox
from helpers.ranks import Rank, RankTeam

MEMBER = Member(
    member="",
    rank=0,
    host="",
    pid=0,
    device="cpu",
    device_name="",
    memory_bytes=0,
    threads=1,
    emulated=1.0,
    versions={},
)


class KnownToWait(WaitListener):
    """Says nothing, and tells the test when others can find that this rank waits."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.is_known = rank, False

    def still_waits(self, comm: Communicator, call: Call, waited_s: float) -> None:
        if not self.is_known and comm.find_absent() is not None:  # which says that it is here
            self.is_known = True
            self.rank.send("waits")

    def wait_over(self, comm: Communicator, *, succeeded: bool) -> None:
        self.is_known = False


def wait_for_rank_1(rank: Rank, backend: str) -> None:
    """Rank 1 is silent before one barrier and stopped before the next; rank 0 tells what it says.

    It comes to each when rank 2 waits there, and rank 1 is where it stays away.
    """
    waits.say = lambda text: rank.send(text)
    comm = rank.connect(backend=backend)
    host = os.uname().nodename
    pids = comm.all_gather_json(os.getpid(), what="pids")
    members = [replace(MEMBER, rank=r, host=host, pid=pid) for r, pid in enumerate(pids)]
    silence.FIRST_S = 0.5
    watch = WaitWatch(rank.rank, members, [])
    comm.report_waits_to(KnownToWait(rank) if rank.rank == 2 else watch)
    for stops in (False, True):
        if rank.rank == 1 and stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank.rank < 2:
            rank.receive()
        comm.barrier(what="the end of a window")
    comm.close()
    rank.send("the end")


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_the_lowest_rank_that_waits_names_who_is_silent_and_who_is_stopped(backend: str) -> None:
    with RankTeam(wait_for_rank_1, 3, backend) as team:
        pid = team.pids[1]
        assert team.receive(2) == "waits"
        wait_until(lambda: proc_status(pid)["State"].startswith("S"))
        team.send(0, "come")
        said = team.receive(0)
        assert said.startswith("evener: ranks 0 and 2 wait since ")
        assert f"for rank 1 in 'the end of a window': rank 1 (pid {pid}) is sleeping" in said
        team.send(1, "go on")
        assert team.receive(0) == "evener: rank 1 has come: training continues"
        assert team.receive(2) == "waits"
        wait_until(lambda: is_stopped(pid))
        team.send(0, "come")
        said = team.receive(0)
        assert f"rank 1 (pid {pid}) is stopped since " in said
        assert "ranks 0 and 2 wait for it until " in said
        assert said.endswith(f"`kill -CONT {pid}` continues it")
        team.send_signal(1, signal.SIGCONT)
        rest: list[Any] = []
        while "the end" not in rest:
            rest.append(team.receive(0))
        assert rest[-2] == "evener: rank 1 has come: training continues"
        assert [team.receive(rank) for rank in (1, 2)] == ["the end"] * 2
        team.wait()


def test_the_launcher_names_a_stopped_rank_at_once_and_ends_nothing(tmp_path: Any) -> None:
    sandbox = Sandbox(tmp_path)
    try:
        script = sandbox.script("tell(os.getpid())\nif RANK == 1: pass_gate()\n")
        running = sandbox.evener("launch", "--nproc", 2, script)
        pid = int(sandbox.mailbox.read(2)[1].split()[1])
        os.kill(pid, signal.SIGSTOP)
        assert running.process.stderr is not None
        said = running.process.stderr.readline().decode()
        assert said.startswith(f"evener: rank 1 (pid {pid}) is stopped since ")
        assert "the other ranks wait for it" in said
        assert f"`kill -CONT {pid}` continues it" in said
        os.kill(pid, signal.SIGCONT)
        assert (
            running.process.stderr.readline() == f"evener: rank 1 (pid {pid}) runs again\n".encode()
        )
        sandbox.open_gate(1)
        assert running.end().code == 0
    finally:
        sandbox.close()
