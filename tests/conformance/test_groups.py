"""What only ranks in processes have: a coordinator, a port, a network device, signals."""

import re
import signal
import socket
import tempfile
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch

from evener.comm import groups
from evener.comm.groups import GroupTransport
from evener.errors import CollectiveError, LaunchError, PeerLostError
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.limits import PATIENCE_S
from helpers.ports import free_port
from helpers.ranks import Rank, RankTeam, join_at, run_ranks, run_ranks_to_end

SOON_S = 50.0  # far below what the ranks wait for one another


# ── meeting ──────────────────────────────────────────────────────────────────────────────────────


def beside_a_default_group(rank: Rank, port: int) -> list[float]:
    import torch.distributed as dist

    options = {"rank": rank.rank, "world_size": rank.world_size}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)
    with rank.connect() as comm:
        ours, theirs = torch.ones(3000), torch.ones(3000)
        pending = dist.all_reduce(theirs, async_op=True)
        comm.all_reduce(ours, what="ours")
        pending.wait()
    dist.all_reduce(theirs)  # closing ours leaves theirs
    dist.destroy_process_group()
    return [float(ours[0]), float(theirs[0])]


def test_a_default_process_group_is_left_alone() -> None:
    assert run_ranks(beside_a_default_group, 2, free_port()) == [[2.0, 4.0]] * 2


def one_team_after_another(rank: Rank, port: int) -> int:
    met = 0
    for _ in range(3):
        # Rank 0 binds the port itself, and gives it back for the next team.
        with join_at(rank.rank, rank.world_size, "localhost", port, timeout_s=PATIENCE_S) as comm:
            met += len(comm.all_gather_rows([1.0], what="row"))
            comm.barrier(what="end")  # rank 0 hosts the coordinator
    return met


def test_teams_follow_one_another_on_one_port() -> None:
    assert run_ranks(one_team_after_another, 2, free_port()) == [6, 6]


def meet_at(rank: Rank, port: int) -> int:
    host = {"agent_store": True, "timeout_s": PATIENCE_S}
    with join_at(rank.rank, rank.world_size, "127.0.0.1", port, **host) as comm:
        rank.send("connected")
        rank.receive()
        return len(comm.all_gather_rows([1.0], what="row"))


def join_twice(rank: Rank) -> list[int]:
    from evener.team.environment import DistributedTrainConfig
    from evener.team.fixed import meet

    place = DistributedTrainConfig.from_env()
    with meet(place, PATIENCE_S)[0] as first, meet(place, PATIENCE_S)[0] as second:
        return [len(comm.all_gather_rows([1.0], what="row")) for comm in (first, second)]


def test_ranks_meet_at_the_coordinator_of_their_launcher() -> None:
    with serving(2, 2, Deadlines(), token=b"0123456789abcdef") as address:
        with tempfile.NamedTemporaryFile() as token_file:
            token_file.write(b"0123456789abcdef")
            token_file.flush()
            env = {"EVENER_COORDINATOR": address, "EVENER_TOKEN_FILE": token_file.name}
            assert run_ranks(join_twice, 2, env=env) == [[2, 2]] * 2
        refused = run_ranks_to_end(join_twice, 2, env={"EVENER_COORDINATOR": address})
    for outcome in refused:
        assert isinstance(outcome.exception, LaunchError)
        assert "the token differs" in str(outcome.exception)


def serve_a_store(rank: Rank) -> None:
    store = torch.distributed.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    rank.send(store.port)
    rank.receive()


def test_a_store_that_outlives_teams_misleads_nobody() -> None:
    # torchrun's agent keeps its store over restarts: the keys of dead workers are all still there.
    with RankTeam(serve_a_store, 1) as agent:
        port = agent.receive(0)
        for die in (True, False, True, False):
            with RankTeam(meet_at, 2, port) as team:
                assert [team.receive(rank) for rank in range(2)] == ["connected"] * 2
                for rank in range(2):
                    if die:
                        team.send_signal(rank, signal.SIGKILL)
                    else:
                        team.send(rank, "go on")
                for outcome in team.wait():
                    assert outcome.died_of is (signal.SIGKILL if die else None), outcome.story()
                    assert outcome.value == (None if die else 2)
        agent.send(0, "end")
        agent.wait()


def try_to_connect(rank: Rank, world_sizes: list[int], timeout_s: float) -> str:
    try:
        join_at(
            rank.rank,
            world_sizes[rank.rank],
            rank.address,
            rank.port,
            timeout_s=timeout_s,
        )
    except LaunchError as error:
        return str(error)
    return "connected"


def test_ranks_with_unlike_world_sizes_are_told_so() -> None:
    messages = run_ranks(try_to_connect, 2, [3, 2], PATIENCE_S)
    for mine, text in zip(
        messages, ["rank 0 was started for 3 ranks and rank 1 for 2"] * 2, strict=True
    ):
        assert text in mine


def test_a_rank_that_does_not_come_is_named() -> None:
    first, second = run_ranks(try_to_connect, 2, [3, 3], 1.0)
    # On a busy machine rank 1 may be late itself.
    assert re.search(r"rank 0 waited 1 s for rank(s 1 and)? 2 of 3 to join", first), first
    # Rank 0 hosts the coordinator: rank 1 comes to its own deadline, or finds the coordinator gone.
    alternatives = (
        r"rank 1 waited 1 s for rank(s 0 and)? 2 of 3 to join|rank 1 lost the coordinator"
    )
    assert re.search(alternatives, second), second


@pytest.mark.usefixtures("no_leaks")
def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"cannot listen on 127.0.0.1 port {port} \(Address already"
        ):
            join_at(0, 2, "127.0.0.1", port, timeout_s=PATIENCE_S)


def test_a_coordinator_that_is_not_there_is_named() -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(
        LaunchError, match=rf"rank 1 waited 0 s .* at 127.0.0.1:{port} \(Connection ref"
    ):
        join_at(1, 2, "127.0.0.1", port, timeout_s=0.3)
    assert time.monotonic() - started < SOON_S


def test_an_unknown_address_is_named() -> None:
    with pytest.raises(
        LaunchError, match=r"at no\.such\.host\.invalid:1 \(the name .* unknown here"
    ):
        join_at(1, 2, "no.such.host.invalid", 1, timeout_s=0.5)


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


# ── nothing is kept ──────────────────────────────────────────────────────────────────────────────


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
