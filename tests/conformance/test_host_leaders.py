"""What only ranks on several hosts have: leaders, and a link that each host uses once."""

import signal
from typing import Any

import pytest
import torch

from conformance.stage import Seen, Stage, watch
from evener.comm.base import Communicator
from helpers.ranks import Rank, run_ranks

DEADLINE_S = 1.5
SOON_S = 50.0
CPU = torch.device("cpu")

# Of four ranks, 0 and 2 are the first ones of their hosts.


def end_inside_a_sum(comm: Communicator, rank: Rank, victim: int, way: signal.Signals) -> Seen:
    """Sums of many chunks; a victim gets its signal somewhere in the middle of one."""
    gradient = comm.allocate(3_000_000, torch.float32, CPU)
    comm.all_reduce(gradient, what="first gradients")
    rank.send("summing")
    timeout_s = DEADLINE_S if way is signal.SIGSTOP else None
    return watch(comm, rank, lambda: comm.all_reduce(gradient, what="sum", timeout_s=timeout_s))


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_rank_that_dies_is_named_on_its_host_and_nobody_else_is_blamed(victim: int) -> None:
    with Stage("hosts", end_inside_a_sum, 4, victim, signal.SIGKILL) as stage:
        for rank in range(4):
            assert stage.receive(rank) == "summing"
        stage.kill(victim)
        survivors = [rank for rank in range(4) if rank != victim]
        for rank, seen in zip(survivors, stage.all_seen(survivors), strict=True):
            assert seen.kind == "PeerLostError", seen
            assert "lost a peer in 'sum'" in seen.message
            if rank // 2 == victim // 2:
                assert f"rank {victim} has died" in seen.message
            elif victim:  # rank 0's process keeps what ranks write for one another
                assert "has closed this communicator" not in seen.message
            assert seen.took_s < SOON_S


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_stops_is_named_by_all(victim: int) -> None:
    with Stage("hosts", end_inside_a_sum, 4, victim, signal.SIGSTOP) as stage:
        for rank in range(4):
            assert stage.receive(rank) == "summing"
        stage.stop(victim)
        for seen in stage.all_seen([rank for rank in range(4) if rank != victim]):
            assert (seen.kind, seen.missing) == ("CollectiveTimeoutError", (victim,)), seen


def sums_in(rank: Rank, layout: str, dtype: torch.dtype) -> list[bytes]:
    with rank.connect(backend=f"hosts {layout}") as comm:
        assert comm.backend == "hosts"
        found = []
        for place in (True, False):  # in shared memory, and elsewhere
            torch.manual_seed(comm.rank)
            tensor = torch.randn(1_500_007).to(dtype)
            if place:
                tensor = comm.allocate(tensor.numel(), dtype, CPU).copy_(tensor)
            comm.all_reduce_each([("front", tensor[:900_001]), ("back", tensor[900_001:])])
            found.append(bytes(tensor.view(torch.uint8).numpy()))
        return found


@pytest.mark.parametrize("layout", ["2+1", "1+2", "2+1+1"])
def test_chunks_are_summed_to_the_same_bits_on_all_ranks(layout: str) -> None:
    first, *others = run_ranks(sums_in, sum(map(int, layout.split("+"))), layout, torch.float32)
    assert first[0] == first[1]
    assert all(each == first for each in others)


def broadcast_from_each(rank: Rank) -> list[list[float]]:
    with rank.connect(backend="hosts 2+2") as comm:
        found = []
        for src in range(4):
            tensor = torch.full((400_000,), float(comm.rank))
            comm.broadcast(tensor, src, what="weights")
            found.append([float(tensor.min()), float(tensor.max())])
        return found


def test_every_rank_may_be_the_source_of_a_broadcast() -> None:
    assert run_ranks(broadcast_from_each, 4) == [[[float(src)] * 2 for src in range(4)]] * 4


def refuse_on_one_rank(rank: Rank) -> tuple[str, str, float]:
    from evener.comm import host_leaders, shared_barrier

    with rank.connect() as comm:
        if rank.rank == 3:

            def refuse(*_: Any) -> None:
                raise OSError(12, "Cannot allocate memory")

            shared_barrier.map_file = refuse
        comm, how = host_leaders.connect_hosts(comm, f"host {rank.rank // 2}")
        tensor = torch.ones(3000)
        comm.all_reduce(tensor, what="over Gloo")
        comm.barrier(what="end")
        return comm.backend, how, float(tensor[0])


def test_one_rank_that_cannot_share_keeps_all_on_gloo() -> None:
    how = (
        "rank 3 could not connect its memory ([Errno 12] Cannot allocate memory), so ranks "
        "exchange through sockets"
    )
    assert run_ranks(refuse_on_one_rank, 4) == [("gloo", how, 4.0)] * 4
