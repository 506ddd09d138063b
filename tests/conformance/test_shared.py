"""What only ranks that share memory have: mapped pages, forks, sandboxes, limits."""

import errno
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.stage import TIMEOUT_S, Seen, Stage, watch
from evener.comm import shared, shared_barrier, shared_memory
from evener.comm.base import Communicator
from evener.errors import CollectiveError
from helpers.ranks import Rank, run_ranks

DEADLINE_S = 1.5
SOON_S = 50.0
CPU = torch.device("cpu")
LEAVES = [("shared", 2), ("hosts 2+1", 3)]


# ── in the middle of a sum ───────────────────────────────────────────────────────────────────────


def end_inside_a_sum(comm: Communicator, rank: Rank, way: signal.Signals) -> Seen | None:
    """Rank 1 gets a signal when it has summed one piece of many."""
    gradient = comm.allocate(2_000_000, torch.float32, CPU)
    comm.all_reduce(gradient, what="first gradients")
    if comm.rank == 1:
        add = torch.Tensor.add_

        def fail(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            os.kill(os.getpid(), way)
            return add(self, other)

        torch.Tensor.add_ = fail
    return watch(comm, rank, lambda: comm.all_reduce(gradient, what="sum", timeout_s=DEADLINE_S))


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_inside_a_sum_is_named(way: signal.Signals) -> None:
    with Stage("shared", end_inside_a_sum, 3, way) as stage:
        if way is signal.SIGSTOP:
            stage.stopped.add(1)
        for seen in stage.all_seen([0, 2]):
            if way is signal.SIGKILL:
                assert seen.kind == "PeerLostError", seen
                assert "rank 1 has died" in seen.message
            else:
                assert seen.kind == "CollectiveTimeoutError", seen
                assert seen.missing == (1,)
            assert seen.took_s < SOON_S


# ── forks and threads ────────────────────────────────────────────────────────────────────────────


def fork_with_memory(rank: Rank, leaf: str) -> tuple[int, float, float]:
    with rank.connect(backend=leaf) as comm:
        gradient = comm.allocate(70_000, torch.float32, CPU)
        gradient.fill_(rank.rank + 1)
        child = os.fork()
        if child == 0:
            with pytest.raises(CollectiveError, match="was forked from rank"):
                comm.barrier(what="in the child")
            gradient.fill_(100)  # its own copy, whatever it does there
            os._exit(0 if float(gradient.min()) == 100 else 1)
        comm.all_reduce(gradient, what="sum")
        _, status = os.waitpid(child, 0)
        comm.all_reduce(gradient, what="sum after the child has written and ended")
        return os.waitstatus_to_exitcode(status), float(gradient[0]), float(gradient[-1])


def test_a_forked_child_writes_to_copies() -> None:
    assert run_ranks(fork_with_memory, 2, "shared") == [(0, 6.0, 6.0)] * 2


def test_a_forked_child_on_one_of_several_hosts_writes_to_copies() -> None:
    ends = run_ranks(fork_with_memory, 3, "hosts 2+1")
    assert ends == [(0, 18.0, 18.0)] * 3


def exchange_in_two_threads(rank: Rank, leaf: str) -> list[float]:
    comm = rank.connect(backend=leaf)
    beside = comm.split(range(comm.world_size), name="background")
    assert beside is not None
    sums = []

    def work(own: Communicator) -> None:
        tensor = comm.allocate(50_000, torch.float32, CPU)
        for number in range(40):
            tensor.fill_(number)
            own.all_reduce(tensor, what=f"exchange {number}")
            assert (tensor == number * comm.world_size).all()
        sums.append(float(tensor[-1]))

    # Every rank allocates in the same order, so the memory of the second comes from the split.
    background = threading.Thread(target=work, args=(beside,))
    background.start()
    background.join(TIMEOUT_S)
    own = comm.allocate(50_000, torch.float32, CPU)
    other = comm.allocate(50_000, torch.float32, CPU)

    def both(which: Communicator, tensor: torch.Tensor) -> None:
        for number in range(40):
            tensor.fill_(number)
            which.all_reduce(tensor, what=f"exchange {number}")
        sums.append(float(tensor[-1]))

    background = threading.Thread(target=both, args=(beside, other))
    background.start()
    both(comm, own)
    background.join(TIMEOUT_S)
    comm.barrier(what="end")
    beside.close()
    comm.close()
    return sums


@pytest.mark.parametrize(("leaf", "world_size"), LEAVES)
def test_threads_exchange_at_the_same_time_over_a_split(leaf: str, world_size: int) -> None:
    sums = [39.0 * world_size] * 3
    assert run_ranks(exchange_in_two_threads, world_size, leaf) == [sums] * world_size


def count_what_is_kept(rank: Rank, leaf: str) -> list[tuple[int, int]]:
    counts = []
    with rank.connect(backend=leaf) as comm:
        for _ in range(6):
            part = comm.split(range(comm.world_size)[::-1], name="generation")
            assert part is not None
            with part:
                part.all_reduce(torch.ones(3_000_000), what="sum")
            del part
            descriptors = len(list(Path("/proc/self/fd").iterdir()))
            counts.append((descriptors, Path("/proc/self/maps").read_text().count("memfd:")))
            comm.barrier(what="next")
    return counts


@pytest.mark.parametrize(("leaf", "world_size"), LEAVES)
def test_splits_that_end_leave_nothing(leaf: str, world_size: int) -> None:
    for counts in run_ranks(count_what_is_kept, world_size, leaf):
        assert counts == [counts[0]] * len(counts)


def outlive_the_team(rank: Rank, leaf: str) -> tuple[float, int]:
    comm = rank.connect(backend=leaf)
    tensor = comm.allocate(10_000, torch.float32, CPU)
    tensor.fill_(rank.rank + 1)
    comm.all_reduce(tensor, what="sum")
    comm.barrier(what="end")
    comm.close()
    kept = float(tensor.sum())
    del tensor, comm
    return kept, Path("/proc/self/maps").read_text().count("memfd:")


def test_tensors_outlive_the_team_and_take_their_memory_along() -> None:
    assert run_ranks(outlive_the_team, 2, "shared") == [(30_000.0, 0)] * 2
    assert run_ranks(outlive_the_team, 3, "hosts 2+1") == [(60_000.0, 0)] * 3


# ── where memory cannot be shared ────────────────────────────────────────────────────────────────


def without_descriptors() -> None:
    taken = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, resource.getrlimit(7)[1]))


def without_permission() -> None:
    """As the sandboxes of containers forbid the system call."""

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    os.memfd_create = refuse


def without_the_function() -> None:
    del os.memfd_create


REFUSALS = {
    "a sandbox": (without_permission, "PermissionError: [Errno 1] Operation not permitted"),
    "no descriptors": (without_descriptors, "OSError: [Errno 24] Too many open files"),
    "an old C library": (without_the_function, "has no attribute 'memfd_create'"),
}


def try_to_share(rank: Rank, name: str) -> tuple[str, str, float]:
    with rank.connect() as comm:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank.rank == 1:
            REFUSALS[name][0]()
        formed, obstacle = shared.share_memory(comm)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert formed is comm
        tensor = torch.ones(3000)
        formed.all_reduce(tensor, what="over Gloo")
        return formed.backend, obstacle, float(tensor[0])


@pytest.mark.parametrize("name", REFUSALS)
def test_one_rank_that_cannot_share_keeps_all_on_gloo(name: str) -> None:
    found = run_ranks(try_to_share, 3, name)
    assert found == [found[0]] * 3
    backend, obstacle, total = found[0]
    assert (backend, total) == ("gloo", 3.0)
    assert obstacle.startswith("rank 1 cannot share memory (")
    assert REFUSALS[name][1] in obstacle


def connect_in_vain(rank: Rank) -> tuple[str, str, int]:
    with rank.connect() as comm:
        before = len(list(Path("/proc/self/fd").iterdir()))
        if rank.rank == 1:

            def refuse(*_: Any) -> None:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            shared_barrier.map_file = refuse
        formed, obstacle = shared.share_memory(comm)
        comm.barrier(what="over Gloo")
        after = len(list(Path("/proc/self/fd").iterdir()))
        comm.barrier(what="all have counted")  # then rank 0 ends the coordinator
        return formed.backend, obstacle, after - before


def test_a_rank_that_fails_while_connecting_keeps_all_on_gloo() -> None:
    expected = "rank 1 could not connect its memory ([Errno 12] Cannot allocate memory)"
    assert run_ranks(connect_in_vain, 3) == [("gloo", expected, 0)] * 3


def run_out_of_memory(rank: Rank) -> list[float]:
    with rank.connect(backend="shared") as comm:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        # On rank 1 it does not fit into shared memory any more.
        tensor = comm.allocate(1_000_000, torch.float32, CPU)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (comm._transport._memory.find(tensor) == shared_memory.NOWHERE) == (rank.rank == 1)
        sums = []
        for number in range(2):
            tensor.fill_(rank.rank + 1)
            comm.all_reduce(tensor, what="sum")
            sums += [float(tensor.min()), float(tensor.max())]
            whole = tensor[:999_999]
            whole.fill_(rank.rank)
            comm.all_gather_parts(whole, what="parts")
            sums += [float(part.mean()) for part in whole.chunk(3)]
            comm.broadcast(tensor, number, what="copy")
        return sums


def test_memory_that_runs_out_on_one_rank_is_no_end() -> None:
    assert run_ranks(run_out_of_memory, 3) == [[6.0, 6.0, 0.0, 1.0, 2.0] * 2] * 3


def test_nobody_can_take_pages_away() -> None:
    descriptor = shared_memory.create_file("test")
    shared_memory.reserve(descriptor, 0, 1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)  # else whoever maps it would end by SIGBUS
    os.close(descriptor)


# ── other processors ─────────────────────────────────────────────────────────────────────────────


def run_cases_by_bytes(rank: Rank) -> dict[str, str]:
    from conformance.cases import run_cases

    shared_barrier.KEEPS_ORDER = False
    with rank.connect(backend="shared") as comm:
        return run_cases(comm)


def test_where_writes_are_not_ordered_bytes_say_who_has_arrived() -> None:
    assert run_ranks(run_cases_by_bytes, 3) == [{}] * 3


# ── meeting ──────────────────────────────────────────────────────────────────────────────────────


def test_parts_of_a_sum_are_cut_without_gaps() -> None:
    for size in (1, 15, 16, 17, 1000, 700_001):
        slots = [torch.ones(size) for _ in range(3)]
        for rank in range(3):
            shared.Slots(slots, rank, equal_parts=False).sum_for_all()
        # Each element was summed once, whoever did it.
        assert all((slot == 3).all() for slot in slots)
