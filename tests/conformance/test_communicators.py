"""Every case of the table on every leaf."""

import pytest

from conformance.cases import run_cases
from evener.comm.base import Communicator
from helpers.ranks import Rank, run_ranks
from helpers.teams import run_team

WORLDS = {
    "single": (1,),
    "threads": (3,),
    "gloo": (2, 3),
    "shared": (2, 4),
    "hosts 2+1": (3,),
    "hosts 2+2": (4,),
    "hosts 3+1": (4,),
}


def on_threads(comm: Communicator) -> dict[str, str]:
    return run_cases(comm)


def on_processes(rank: Rank, leaf: str) -> dict[str, str]:
    with rank.connect(backend=leaf) as comm:
        assert (comm.rank, comm.world_size) == (rank.rank, rank.world_size)
        assert comm.backend == leaf.partition(" ")[0]
        return run_cases(comm)


def failures(leaf: str, world_size: int) -> list[dict[str, str]]:
    """What failed, by rank and case; one team runs the whole table."""
    if leaf.startswith(("gloo", "shared", "hosts")):
        return run_ranks(on_processes, world_size, leaf)
    if leaf == "single":
        with Communicator() as comm:
            return [run_cases(comm)]
    return run_team(world_size, on_threads)


@pytest.mark.parametrize(
    ("leaf", "world_size"), [(leaf, w) for leaf, worlds in WORLDS.items() for w in worlds]
)
def test_the_table(leaf: str, world_size: int) -> None:
    failed = [
        f"{name} on rank {rank}:\n{trace}"
        for rank, cases in enumerate(failures(leaf, world_size))
        for name, trace in cases.items()
    ]
    assert not failed, "\n".join(failed)


def sum_late_numbers(comm: Communicator) -> float:
    """The error of a sum of numbers that a stream still computes when the exchange begins."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.full((2048, 2048), comm.rank + 1.0, device="cuda")
        for _ in range(50):
            x = x @ torch.eye(2048, device="cuda")
        flat = x.view(-1)
        comm.all_reduce(flat, what="late numbers")
        return float((flat - sum(range(1, comm.world_size + 1))).abs().max().item())


def sum_late_numbers_over_gloo(rank: Rank) -> float:
    with rank.connect() as comm:
        return sum_late_numbers(comm)


@pytest.mark.gpu
def test_exchanges_wait_for_the_stream_that_makes_the_numbers() -> None:
    assert run_team(3, sum_late_numbers) == [0.0, 0.0, 0.0]
    assert run_ranks(sum_late_numbers_over_gloo, 2) == [0.0, 0.0]


def on_nccl(rank: Rank) -> dict[str, str]:
    import torch

    torch.cuda.set_device(rank.rank)
    with rank.connect(backend="nccl") as comm:
        assert comm.backend == "nccl"
        return run_cases(comm, "cuda")


def with_cuda_tensors(rank: Rank, leaf: str) -> dict[str, str]:
    with rank.connect(backend=leaf) as comm:
        return run_cases(comm, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("leaf", ["gloo", "shared"])
def test_cuda_tensors_by_way_of_host_memory(leaf: str) -> None:
    assert run_ranks(with_cuda_tensors, 2, leaf) == [{}, {}]


@pytest.mark.gpu
def test_nccl() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a device for each rank")
    assert run_ranks(on_nccl, 2) == [{}, {}]
