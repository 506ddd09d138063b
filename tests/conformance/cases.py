"""What every communicator must do while nothing goes wrong: one table for all leaves.

A case is a function of one rank's communicator and device; all ranks run it. ``run_cases`` runs the
whole table on one team, so that a team of processes is started once.
"""

import hashlib
import math
import struct
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from evener.comm.base import Communicator
from evener.errors import ConfigError

Case = Callable[[Communicator, str], None]
CASES: dict[str, Case] = {}

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases(comm: Communicator, device: str = "cpu") -> dict[str, str]:
    """Runs the table; the trace of what failed, by case."""
    failures = {}
    for name, function in CASES.items():
        try:
            function(comm, device)
        except BaseException:
            failures[name] = traceback.format_exc()
        # One rank's failed assertion must not be the next case's puzzle.
        comm.barrier(what=f"end of {name}")
    return failures


def whole_numbers(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small enough that every dtype adds them without rounding, whatever the order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 9, tuple(shape), generator=generator).to(dtype)


def noise(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2000 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same_everywhere(comm: Communicator, tensor: Tensor) -> None:
    digests = comm.all_gather_bytes(hashlib.sha256(bits(tensor)).digest(), what="digests")
    assert len(set(digests)) == 1


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────


@case
def sums_are_exact_for_whole_numbers(comm: Communicator, device: str) -> None:
    # Up to 976 bytes, here 122, 244 and 488 numbers, go another way than more (group leaf).
    for shape in ((), (1,), (3, 5), (122,), (123,), (244,), (245,), (488,), (489,), (40, 50)):
        for dtype in DTYPES:
            tensor = whole_numbers(comm.rank, shape, dtype).to(device)
            comm.all_reduce(tensor, what=f"{shape} {dtype}")
            parts = [whole_numbers(r, shape, dtype) for r in range(comm.world_size)]
            assert torch.equal(tensor.cpu(), torch.stack(parts).sum(0).to(dtype)), (shape, dtype)


@case
def sums_have_the_same_bits_on_every_rank(comm: Communicator, device: str) -> None:
    for numel in (7, 100_003):
        for dtype in FLOATS:
            tensor = noise(comm.rank, numel, dtype).to(device)
            comm.all_reduce(tensor, what=f"noise in {dtype}")
            assert_same_everywhere(comm, tensor)
            exact = sum(noise(r, numel, dtype).double() for r in range(comm.world_size))
            # Each addition rounds once, and partial sums stay below 32.
            error = 32 * torch.finfo(dtype).eps * comm.world_size
            assert torch.allclose(tensor.cpu().double(), exact, rtol=0, atol=error)


@case
def sums_of_many_megabytes(comm: Communicator, device: str) -> None:
    numel = 5_500_003  # 22 MB, and no rank count divides it
    ramp = torch.arange(numel, dtype=torch.float32, device=device).remainder_(1024)
    tensor = ramp * (comm.rank + 1)
    comm.all_reduce(tensor, what="22 MB")
    assert torch.equal(tensor, ramp * (comm.world_size * (comm.world_size + 1) // 2))


@case
def sums_of_several_tensors_at_once(comm: Communicator, device: str) -> None:
    """Large, small and empty ones, of several types, as often as there are windows."""
    shapes = [((40, 50), torch.float32), ((3,), torch.float32), ((0,), torch.float32)]
    shapes += [((7000,), torch.bfloat16), ((2000,), torch.float32), ((), torch.int64)]
    for window in range(3):
        own, sums = [], []
        for number, (shape, dtype) in enumerate(shapes):
            parts = [
                whole_numbers(10 * r + number + window, shape, dtype)
                for r in range(comm.world_size)
            ]
            own.append((f"bucket {number}", parts[comm.rank].clone().to(device)))
            sums.append(torch.stack(parts).sum(0).to(dtype))
        comm.all_reduce_each(own)
        for (_, tensor), expected in zip(own, sums, strict=True):
            assert torch.equal(tensor.cpu(), expected)
    comm.all_reduce_each([])


@case
def sums_of_several_tensors_have_the_same_bits_on_every_rank(
    comm: Communicator, device: str
) -> None:
    buffer = noise(comm.rank, 100_003, torch.float32).to(device)
    parts = torch.split(buffer, [30_000, 16, 50_000, 19_987])
    comm.all_reduce_each([(f"part {number}", part) for number, part in enumerate(parts)])
    assert_same_everywhere(comm, buffer)


@case
def sums_of_infinities_and_nans(comm: Communicator, device: str) -> None:
    for numel in (4, 4000):
        tensor = torch.zeros(numel, device=device)
        tensor[0] = math.inf if comm.rank == 0 else 1.0
        tensor[1] = math.nan if comm.rank == comm.world_size - 1 else 1.0
        tensor[2] = math.inf if comm.rank == 0 else -math.inf
        comm.all_reduce(tensor, what="not finite")
        assert tensor[0] == math.inf
        assert tensor[1].isnan()
        assert tensor[2].isnan() or comm.world_size == 1
        assert tensor[3] == 0


@case
def sums_of_complex_numbers(comm: Communicator, device: str) -> None:
    tensor = torch.full((300,), complex(1, comm.rank), dtype=torch.complex64, device=device)
    comm.all_reduce(tensor, what="complex")
    total = comm.world_size * (comm.world_size - 1) // 2
    assert (tensor == complex(comm.world_size, total)).all()


@case
def sums_of_nothing(comm: Communicator, device: str) -> None:
    comm.all_reduce(torch.empty(0, 3, device=device), what="nothing")
    comm.broadcast(torch.empty(0, device=device), 0, what="nothing")
    comm.all_gather_parts(torch.empty(0, device=device), what="nothing")


@case
def parameters_that_require_gradients(comm: Communicator, device: str) -> None:
    for numel in (3, 3000):
        parameter = torch.nn.Parameter(torch.ones(numel, device=device))
        comm.all_reduce(parameter, what="parameter")
        assert (parameter == comm.world_size).all()
        comm.broadcast(parameter, 0, what="parameter")
        assert parameter.is_leaf


@case
def views_into_a_buffer(comm: Communicator, device: str) -> None:
    for numel in (5, 5000):
        buffer = torch.ones(numel + 2, device=device)
        comm.all_reduce(buffer[1:-1], what="view")
        assert (buffer[1:-1] == comm.world_size).all()
        assert buffer[0] == buffer[-1] == 1


@case
def tensors_with_holes_are_refused(comm: Communicator, device: str) -> None:
    holes = torch.zeros(4, 4, device=device)[:, ::2]
    with pytest.raises(ConfigError, match=r"'holes' has shape \(4, 2\)"):
        comm.all_reduce(holes, what="holes")


# ── copies ───────────────────────────────────────────────────────────────────────────────────────

NAN_WITH_PAYLOAD = struct.unpack("=d", struct.pack("=Q", 0x7FF8_0000_DEAD_BEEF))[0]
SPECIAL = (-0.0, NAN_WITH_PAYLOAD, 2.0**53, math.inf, -math.inf, 5e-324, 1.1, -1e308)


@case
def broadcasts_copy_bits(comm: Communicator, device: str) -> None:
    for src in range(comm.world_size):
        for numel in (len(SPECIAL), 4000):
            tensor = torch.full((numel,), float(comm.rank), dtype=torch.float64)
            if comm.rank == src:
                tensor[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
            tensor = tensor.to(device)
            comm.broadcast(tensor, src, what="special numbers")
            front = bits(tensor[: len(SPECIAL)])
            assert front == struct.pack(f"={len(SPECIAL)}d", *SPECIAL)
            assert (tensor[len(SPECIAL) :] == src).all()


@case
def broadcasts_carry_every_dtype(comm: Communicator, device: str) -> None:
    src = comm.world_size - 1
    for dtype in (*DTYPES, torch.uint8, torch.bool, torch.int16, torch.complex64):
        for shape in ((), (2, 3), (50, 60)):
            sent = whole_numbers(src, shape, torch.int64).to(dtype)
            tensor = sent.clone() if comm.rank == src else torch.zeros(shape, dtype=dtype)
            tensor = tensor.to(device)
            comm.broadcast(tensor, src, what=f"{dtype}")
            assert torch.equal(tensor.cpu(), sent)


@case
def an_unknown_source_is_refused(comm: Communicator, device: str) -> None:
    for src in (-1, comm.world_size):
        with pytest.raises(ConfigError, match=f"no rank {src} to broadcast 'x' from"):
            comm.broadcast(torch.zeros(1), src, what="x")


@case
def parts_reach_all_ranks_bit_for_bit(comm: Communicator, device: str) -> None:
    for size in (1, 8, 114, 115, 2000):
        whole = torch.full((comm.world_size * size,), math.nan, dtype=torch.float64)
        own = torch.arange(size, dtype=torch.float64) + 1000 * comm.rank
        own[: len(SPECIAL)] = torch.tensor(SPECIAL[:size], dtype=torch.float64)
        whole[comm.rank * size : (comm.rank + 1) * size] = own
        whole = whole.to(device)
        comm.all_gather_parts(whole, what=f"parts of {size}")
        for r in range(comm.world_size):
            expected = torch.arange(size, dtype=torch.float64) + 1000 * r
            expected[: len(SPECIAL)] = torch.tensor(SPECIAL[:size], dtype=torch.float64)
            assert bits(whole[r * size : (r + 1) * size]) == bits(expected)
    for dtype in (torch.bfloat16, torch.uint8):
        flat = torch.full((comm.world_size * 3000,), comm.rank, dtype=dtype, device=device)
        comm.all_gather_parts(flat, what=f"parts in {dtype}")
        assert flat.view(comm.world_size, 3000)[:, 7].tolist() == list(range(comm.world_size))


@case
def sums_of_parts_stay_with_their_owners(comm: Communicator, device: str) -> None:
    for size in (1, 100, 30_001):
        for dtype in DTYPES:
            shape = (comm.world_size * size,)
            tensor = comm.allocate(shape[0], dtype, torch.device(device))
            tensor.copy_(whole_numbers(comm.rank, shape, dtype))
            keeps = comm.reduce_scatter_parts(tensor, what=f"{size} of {dtype}")
            parts = [whole_numbers(r, shape, dtype) for r in range(comm.world_size)]
            expected = torch.stack(parts).sum(0).to(dtype).chunk(comm.world_size)[comm.rank]
            found = tensor.cpu().chunk(comm.world_size)
            assert torch.equal(found[comm.rank], expected)
            if keeps:
                given = parts[comm.rank].chunk(comm.world_size)
                others = [r for r in range(comm.world_size) if r != comm.rank]
                assert all(torch.equal(found[r], given[r]) for r in others)
            comm.all_gather_parts(tensor, what="what the owners have")
            assert_same_everywhere(comm, tensor)


@case
def ranks_that_have_met_need_not_announce_parts(comm: Communicator, device: str) -> None:
    shape, place = (comm.world_size * 9000,), torch.device(device)
    shared = comm.allocate(shape[0], torch.float32, place)
    mixed = comm.allocate(shape[0], torch.float32, place) if comm.rank else torch.zeros(shape)
    for turn in range(3):
        for tensor in (shared, mixed):
            parts = [whole_numbers(r + turn, shape, torch.float32) for r in range(comm.world_size)]
            tensor.copy_(parts[comm.rank])
            comm.all_gather_rows([float(turn)], what="gradients are there")
            comm.reduce_scatter_parts(tensor, what="gradients", have_met=True)
            own = tensor.chunk(comm.world_size)[comm.rank]
            assert torch.equal(own.cpu(), torch.stack(parts).sum(0).chunk(len(parts))[comm.rank])
            comm.all_gather_rows([1.0], what="norms")
            own.mul_(turn + 1)
            comm.all_gather_parts(tensor, what="parameters", have_met=True)
            assert torch.equal(tensor.cpu(), torch.stack(parts).sum(0) * (turn + 1))


@case
def allocated_memory_is_zero_and_outlives_its_exchanges(comm: Communicator, device: str) -> None:
    first = comm.allocate(1000, torch.float32, torch.device(device))
    second = comm.allocate(70_000, torch.bfloat16, torch.device(device))
    assert (first.shape, first.dtype, first.device.type) == ((1000,), torch.float32, device)
    assert not first.any()
    assert not second.any()
    for _ in range(2):
        first.fill_(comm.rank)
        second.fill_(1)
        comm.all_reduce_each([("first", first), ("second", second[8:-8])])
        assert (first == comm.world_size * (comm.world_size - 1) // 2).all()
        assert (second[8:-8] == comm.world_size).all()
        assert (second[:8] == 1).all()
    del first
    assert (second[-8:] == 1).all()


@case
def unequal_parts_are_refused(comm: Communicator, device: str) -> None:
    if comm.world_size > 1:
        with pytest.raises(ConfigError, match="pad it to a multiple of world_size"):
            comm.all_gather_parts(torch.zeros(comm.world_size + 1), what="odd")
        with pytest.raises(ConfigError, match="pad it to a multiple of world_size"):
            comm.reduce_scatter_parts(torch.zeros(comm.world_size + 1), what="odd")


# ── rows and bytes ───────────────────────────────────────────────────────────────────────────────


@case
def rows_keep_their_bits(comm: Communicator, device: str) -> None:
    for row in (SPECIAL, SPECIAL * 20):
        for received in comm.all_gather_rows(row, what="special numbers"):
            assert struct.pack(f"={len(row)}d", *received) == struct.pack(f"={len(row)}d", *row)


@case
def rows_of_any_length(comm: Communicator, device: str) -> None:
    for length in (0, 1, 2, 113, 114, 115, 116, 1000, 3, 1000):
        rows = comm.all_gather_rows([comm.rank + i / 3 for i in range(length)], what="rows")
        assert rows == [[r + i / 3 for i in range(length)] for r in range(comm.world_size)]
        assert all(type(value) is float for row in rows for value in row)


@case
def rows_belong_to_the_caller(comm: Communicator, device: str) -> None:
    first = comm.all_gather_rows([1.0], what="first")
    second = comm.all_gather_rows([2.0], what="second")
    first[0].append(3.0)
    assert second == [[2.0]] * comm.world_size
    assert first[1:] == [[1.0]] * (comm.world_size - 1)


@case
def bytes_of_unlike_lengths(comm: Communicator, device: str) -> None:
    for unit in (b"", b"\0\xff", b"cell" * 240, b"greetings" * 400):
        received = comm.all_gather_bytes(unit * comm.rank, what="bytes")
        assert received == [unit * r for r in range(comm.world_size)]
    assert comm.all_gather_bytes(b"last", what="bytes")[-1] == b"last"


@case
def a_barrier_waits_for_all(comm: Communicator, device: str) -> None:
    # That it waits is shown by the stopped peer; here, that it keeps in step with the rest.
    for number in range(8):
        comm.barrier(what=f"barrier {number}")
        assert comm.all_gather_rows([number], what="number") == [[number]] * comm.world_size


# ── splits ───────────────────────────────────────────────────────────────────────────────────────


@case
def splits_number_their_members_anew(comm: Communicator, device: str) -> None:
    everyone = list(range(comm.world_size))
    for members in (everyone, everyone[::-1], everyone[1:] or [0], everyone[::2], [0]):
        part = comm.split(members, name="part")  # the same name each time
        if comm.rank not in members:
            assert part is None
            continue
        assert part is not None
        with part:
            assert (part.rank, part.world_size) == (members.index(comm.rank), len(members))
            # Of ranks on several hosts, some may be on one host, or on one each.
            may_be = {"hosts", "shared", "gloo"} if comm.backend == "hosts" else {comm.backend}
            assert part.backend in ({"none"} if len(members) == 1 else may_be)
            assert part.timeout_s == comm.timeout_s
            assert part.all_gather_rows([comm.rank], what="members") == [[r] for r in members]
            tensor = torch.full((5000,), float(comm.rank), device=device)
            part.all_reduce(tensor, what="sum of members")
            assert (tensor == sum(members)).all()


@case
def splits_may_be_split_and_outlived(comm: Communicator, device: str) -> None:
    everyone = list(range(comm.world_size))
    outer = comm.split(everyone, name="outer")
    assert outer is not None
    inner = outer.split(everyone[::-1], name="outer")
    assert inner is not None
    outer.close()
    rows = inner.all_gather_rows([comm.rank], what="inner lives on")
    assert rows == [[r] for r in everyone[::-1]]
    inner.close()
    comm.barrier(what="the whole lives on")


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


@case
def deadlines_must_be_finite_and_positive(comm: Communicator, device: str) -> None:
    for timeout_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="timeout_s is"):
            comm.all_reduce(torch.zeros(1), what="x", timeout_s=timeout_s)
