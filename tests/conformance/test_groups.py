"""What only ranks in processes have: a coordinator, a port, a network device, signals."""

import signal
import socket
import time
from types import FrameType
from typing import Any

import pytest

from evener.comm import groups
from evener.comm.groups import GroupTransport
from evener.errors import CollectiveError, LaunchError, PeerLostError
from helpers.ranks import Rank, RankTeam, run_ranks, run_ranks_to_end

SOON_S = 50.0  # far below what the ranks wait for one another


# ── meeting ──────────────────────────────────────────────────────────────────────────────────────


def test_nccl_without_nccl_is_refused() -> None:
    refusal = "'nccl', which this build of torch does not have"

    def body(rank: Rank) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evener.comm.c10d.is_nccl_available", lambda: False)
            with rank.connect() as comm:
                assert refusal in comm.add_nccl()
        return "refused"

    assert run_ranks(body, 2) == ["refused"] * 2


# ── the network device ───────────────────────────────────────────────────────────────────────────


def meet_over_loopback_device(rank: Rank) -> int:
    with rank.connect() as comm:
        return len(comm.all_gather_rows([1.0], what="row"))


def test_an_unknown_interface_is_named() -> None:
    env = {"GLOO_SOCKET_IFNAME": "no-such-if"}
    for outcome in run_ranks_to_end(meet_over_loopback_device, 2, env=env):
        assert isinstance(outcome.exception, LaunchError)
        assert "GLOO_SOCKET_IFNAME is 'no-such-if'" in str(outcome.exception)


# ── signals ──────────────────────────────────────────────────────────────────────────────────────


def wait_for_a_signal(rank: Rank) -> str:
    comm = rank.connect()
    comm.barrier(what="start")
    if rank.rank == 0:
        rank.receive()
        with pytest.raises(PeerLostError, match="lost a peer in 'barrier'"):
            comm.barrier(what="barrier")
        return "lost"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is GroupTransport._wait.__code__:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)  # harmless until it finds the wait
    with pytest.raises(KeyboardInterrupt):
        comm.barrier(what="barrier")
    with pytest.raises(CollectiveError, match="was interrupted in 'barrier'"):
        comm.barrier(what="next")
    rank.send("interrupted")
    return "interrupted"


def test_signals_are_heard_inside_a_wait() -> None:
    with RankTeam(wait_for_a_signal, 2) as team:
        started = time.monotonic()
        assert team.receive(1) == "interrupted"
        assert time.monotonic() - started < SOON_S
        # Its process ends at once, though the operation that it has left has not.
        assert team.wait(SOON_S, [1])[0].value == "interrupted"
        team.send(0, "go")
        outcomes = team.wait()
        assert [o.value for o in outcomes] == ["lost", "interrupted"], [o.story() for o in outcomes]


# ── sockets of others ────────────────────────────────────────────────────────────────────────────


def open_sockets_meanwhile(rank: Rank) -> tuple[int, bool, bytes]:
    """A thread of the user's opens sockets while groups form, without delay as torch's are."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[tuple[socket.socket, socket.socket]] = []
    form = groups.form_gloo

    def form_beside_a_thread(*arguments: Any) -> Any:
        for _ in range(2):
            client = socket.create_connection(listener.getsockname())
            both = client, listener.accept()[0]
            for end in both:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.append(both)
        return form(*arguments)

    groups.form_gloo = form_beside_a_thread
    comm = rank.connect()
    wires = comm._transport._wires
    num_own = len(wires._own())
    (gone, _), (mine, theirs) = opened
    gone.close()
    is_broken = wires.is_broken  # an exchange that takes long would fail
    comm.barrier(what="both have looked")
    wires.cut()
    with pytest.raises(PeerLostError):
        comm.barrier(what="over connections that are cut")
    mine.sendall(b"still there")
    return num_own, is_broken, theirs.recv(100)


def test_sockets_of_other_threads_are_not_taken_for_those_of_the_group() -> None:
    assert run_ranks(open_sockets_meanwhile, 3) == [(2, False, b"still there")] * 3
