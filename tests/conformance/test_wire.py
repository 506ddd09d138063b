"""Sums whose numbers travel between hosts in few bits: how exact they are, and what comes later."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from conformance.cases import assert_same_everywhere
from evener.comm.base import Communicator
from helpers.ranks import Rank, run_ranks

LEAVES = pytest.mark.parametrize(
    ("leaf", "world_size"), [("gloo", 2), ("gloo", 3), ("hosts 2+1", 3), ("hosts 2+2", 4)]
)
BITS = (16, 8, 4)
#: The largest relative error of a number that is rounded to bfloat16.
ROUNDING = 2.0**-8
#: Larger than any of the random numbers, and than any sum of four of them.
LARGEST = 11.0
NUMEL = 700_003


def own_numbers(rank: int, turn: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(NUMEL, generator=generator)


def total_of(comm: Communicator, turn: int) -> tuple[Tensor, Tensor]:
    """The sum in float64, and the sum of sizes, to which errors are in proportion."""
    parts = [own_numbers(rank, turn).double() for rank in range(comm.world_size)]
    return torch.stack(parts).sum(0), torch.stack(parts).abs().sum(0)


def allowed(sizes: Tensor, bits: int, world_size: int) -> Tensor:
    """Errors of a sum whose parts are rounded on each rank, and rounded as a sum."""
    if bits == 16:
        return 2.01 * ROUNDING * sizes
    half_a_step = LARGEST / (2 ** (bits - 1) - 1) / 2
    return torch.full_like(sizes, (world_size + 1) * half_a_step)


def sum_once(rank: Rank, leaf: str) -> list[tuple[float, int, int]]:
    with rank.connect(backend=leaf) as comm:
        return [sum_in(comm, bits) for bits in BITS]


def sum_in(comm: Communicator, bits: int) -> tuple[float, int, int]:
    exact, sizes = total_of(comm, 0)
    plain, before = own_numbers(comm.rank), comm.sent_bytes
    comm.all_reduce(plain, what="exact")
    plain_bytes = comm.sent_bytes - before
    rounded, lost = own_numbers(comm.rank), torch.zeros(NUMEL)
    comm.all_reduce(rounded, what="rounded", lost=lost, bits=bits)
    rounded_bytes = comm.sent_bytes - before - plain_bytes
    assert_same_everywhere(comm, rounded)
    # Rounded by each host, and as a sum; 1e-6 for the additions in float32.
    assert ((rounded - exact).abs() <= allowed(sizes, bits, comm.world_size) + 1e-6).all()
    assert (plain - exact).abs().max() < (rounded - exact).abs().max() / 100
    assert bool(lost.any()) == comm.can_round
    return float((rounded - exact).abs().mean()), plain_bytes, rounded_bytes


@LEAVES
def test_a_rounded_sum_has_the_same_bits_everywhere(leaf: str, world_size: int) -> None:
    ranks = run_ranks(sum_once, world_size, leaf)
    for bits, *found in zip(BITS, *ranks, strict=True):
        part = bits / 32 + (0 if bits == 16 else 1 / 128)  # a scale for 128 numbers
        assert len({error for error, *_ in found}) == 1
        if leaf == "gloo":
            for _, plain_bytes, rounded_bytes in found:
                assert abs(rounded_bytes / plain_bytes - part) < 1e-4
        else:  # rank 1 sends inside its host alone; rank 0 to the other host, too
            (_, *leader), (_, *other) = found[:2]
            assert other == pytest.approx([4 * NUMEL] * 2, rel=1e-4)
            assert leader == pytest.approx([8 * NUMEL, 4 * NUMEL * (1 + part)], rel=1e-4)


def sum_often(rank: Rank, leaf: str) -> None:
    with rank.connect(backend=leaf) as comm:
        for bits in BITS:
            sum_often_in(comm, bits)


def sum_often_in(comm: Communicator, bits: int) -> None:
    lost, buffer = torch.zeros(NUMEL), comm.allocate(NUMEL, torch.float32, torch.device("cpu"))
    results, exact = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    largest = torch.zeros(NUMEL).double()
    for turn in range(6):
        # Pieces of other sizes each time, so that other ranks own an element.
        cuts = [NUMEL // (turn + 2) * part for part in range(turn + 2)] + [NUMEL]
        buffer.copy_(own_numbers(comm.rank, turn))
        for first, last in pairwise(cuts):
            piece = slice(first, last)
            comm.all_reduce(buffer[piece], what="piece", lost=lost[piece], bits=bits)
        total, sizes = total_of(comm, turn)
        results += buffer
        exact += total
        largest = torch.maximum(largest, sizes)
    # Not six times what one exchange loses: only the last one's is missing.
    limit = 1.1 * allowed(largest, bits, comm.world_size)
    assert ((results - exact).abs() <= limit + 1e-5).all()
    missing = lost.double() if comm.can_round else torch.zeros(NUMEL).double()
    comm.all_reduce(missing, what="what is missing")
    assert (results + missing - exact).abs().max() < 1e-5


@LEAVES
def test_what_is_lost_is_added_to_the_next_sum_of_the_same_place(
    leaf: str, world_size: int
) -> None:
    run_ranks(sum_often, world_size, leaf)


def sum_what_is_not_finite(rank: Rank, leaf: str) -> None:
    with rank.connect(backend=leaf) as comm:
        for bits in BITS:
            sum_infinities(comm, bits)


def sum_infinities(comm: Communicator, bits: int) -> None:
    lost = torch.zeros(4000)
    # The last is finite in float32, and rounded to infinity.
    for number, value in enumerate((float("inf"), float("nan"), 3.4e38)):
        tensor = torch.full((4000,), 0.1)
        tensor[comm.rank * 1000 + number] = value
        comm.all_reduce(tensor, what="not finite", lost=lost, bits=bits)
        assert_same_everywhere(comm, tensor)
        assert not tensor[comm.rank * 1000 + number].isfinite() or value < float("inf")
        assert lost.isfinite().all()
        assert lost.abs().max() < (0.01 if bits == 16 else 0.1) or value < float("inf")
    lost.zero_()
    tensor = torch.full((4000,), 0.1)
    comm.all_reduce(tensor, what="finite", lost=lost, bits=bits)
    assert (tensor / comm.world_size - 0.1).abs().max() < 0.001


@LEAVES
def test_what_is_lost_stays_finite(leaf: str, world_size: int) -> None:
    run_ranks(sum_what_is_not_finite, world_size, leaf)


def sum_where_nothing_is_rounded(rank: Rank) -> None:
    with rank.connect(backend="shared") as comm:
        tensor, lost = own_numbers(comm.rank), torch.ones(NUMEL)
        comm.all_reduce(tensor, what="inside a host", lost=lost)
        assert torch.equal(tensor, own_numbers(0) + own_numbers(1))
        assert (lost == 1).all()


def test_inside_a_host_sums_are_exact() -> None:
    run_ranks(sum_where_nothing_is_rounded, 2)


def descend(rank: Rank) -> dict[str, float]:
    """Gradient descent on a least-squares problem; how far each way ends from the solution."""
    with rank.connect() as comm:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(64, 512, generator=generator)
        y = x @ torch.randn(512, generator=generator) + 100.0  # large gradients that cancel out
        own = slice(32 * comm.rank, 32 * comm.rank + 32)
        ends = {}
        for way in ("exact", "feedback", "none"):
            weights, lost = torch.zeros(512), torch.zeros(512)
            for _ in range(300):
                gradient = x[own].T @ (x[own] @ weights - y[own])
                comm.all_reduce(gradient, what=way, lost=None if way == "exact" else lost)
                weights -= 2e-4 * gradient
                if way == "none":
                    lost.zero_()
            ends[way] = weights
        return {way: float((ends[way] - ends["exact"]).norm()) for way in ("feedback", "none")}


def test_descent_with_feedback_stays_closer_to_the_exact_one() -> None:
    first, second = run_ranks(descend, 2)
    assert first == second
    assert first["feedback"] < first["none"] / 2
