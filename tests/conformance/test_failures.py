"""Peers that die, stop, leave, come late or do something else, over either transport of processes.

Of threads: ``unit/comm/test_threads.py``.
"""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.stage import TIMEOUT_S, Seen, Stage, watch
from evener.comm.base import Communicator
from evener.errors import CollectiveError
from helpers.ranks import Rank

LEAVES = ("gloo", "shared", "hosts")
SOON_S = 50.0  # far below the deadline of 100 s, far above what a busy machine needs
DEADLINE_S = 1.5  # twice as long as ranks that set out together may arrive one after the other

leaves = pytest.mark.parametrize("leaf", LEAVES)


def others(stage: Stage, rank: int) -> list[int]:
    return [r for r in range(stage.world_size) if r != rank]


def assert_ended(seen: Seen) -> None:
    """The communicator refuses further calls, at once and for the same reason."""
    assert seen.kind_after == seen.kind
    assert seen.took_after_s < SOON_S


# ── death ────────────────────────────────────────────────────────────────────────────────────────


def buckets(gradient: torch.Tensor, count: int) -> list[tuple[str, torch.Tensor]]:
    return [("gradients", part) for part in gradient.chunk(count)]


def reduce_for_ever(comm: Communicator, rank: Rank, count: int) -> Seen:
    gradient = torch.zeros(2_000_000)
    comm.all_reduce(gradient, what="first gradients")
    rank.send("reducing")
    return watch(comm, rank, lambda: comm.all_reduce_each(buckets(gradient, count)))


@leaves
@pytest.mark.parametrize(
    ("world_size", "victim", "count"),
    # In a ring of four, one survivor is no neighbour of the victim. Rank 0 hosts the store.
    [(3, 0, 1), (4, 1, 5)],
)
def test_survivors_of_a_death_lose_a_peer(
    leaf: str, world_size: int, victim: int, count: int
) -> None:
    with Stage(leaf, reduce_for_ever, world_size, count) as stage:
        for rank in range(world_size):
            assert stage.receive(rank) == "reducing"
        stage.kill(victim)
        for seen in stage.all_seen(others(stage, victim)):
            assert seen.kind == "PeerLostError", seen
            assert "lost a peer in 'gradients'" in seen.message
            assert seen.took_s < SOON_S
            assert_ended(seen)


def reduce_alone(comm: Communicator, rank: Rank) -> Seen | None:
    gradient = torch.zeros(500_000)
    comm.all_reduce(gradient, what="first gradients")
    rank.send("ready")
    if comm.rank != 3:
        rank.receive()
        return None
    return watch(comm, rank, lambda: comm.all_reduce(gradient, what="gradients"))


@leaves
def test_a_death_is_noticed_while_others_are_busy(leaf: str) -> None:
    with Stage(leaf, reduce_alone, 4) as stage:
        for rank in range(4):
            assert stage.receive(rank) == "ready"
        stage.kill(1)
        (seen,) = stage.all_seen([3])
        assert seen.kind == "PeerLostError", seen
        assert "lost a peer in 'gradients'" in seen.message
        assert_ended(seen)
        for rank in (0, 2):
            stage.send(rank, "go")


def leave_early(comm: Communicator, rank: Rank) -> Seen | None:
    comm.barrier(what="start")
    if comm.rank == 0:
        comm.close()
        comm.close()
        return None
    return watch(comm, rank, lambda: comm.all_gather_rows([1.0], what="header of window 3"))


@leaves
def test_a_peer_that_closes_is_lost(leaf: str) -> None:
    with Stage(leaf, leave_early, 3) as stage:
        for seen in stage.all_seen([1, 2]):
            assert seen.kind == "PeerLostError", seen
            assert "'header of window 3'" in seen.message
            assert_ended(seen)


# ── silence ──────────────────────────────────────────────────────────────────────────────────────


def wait_in_vain(comm: Communicator, rank: Rank, victim: int, count: int) -> Seen | None:
    gradient = torch.zeros(500_000)
    survivors = comm.split([r for r in range(comm.world_size) if r != victim], name="survivors")
    comm.all_reduce(gradient, what="first gradients")
    if survivors is None:
        rank.send("ready")
        rank.receive()
        return None
    rank.receive()

    def call() -> None:
        if count:
            parts = [("exchange 12", part) for part in gradient.chunk(count)]
            comm.all_reduce_each(parts, timeout_s=DEADLINE_S)
        else:
            comm.all_gather_rows([1.0], what="exchange 12", timeout_s=DEADLINE_S)

    with survivors:
        survivors.barrier(what="setting out together")
        return watch(comm, rank, call)


@leaves
@pytest.mark.parametrize(
    ("world_size", "victim", "count"),  # of tensors; 0 is a row of numbers
    [(3, 0, 0), (4, 2, 4)],
)
def test_a_stopped_peer_is_named(leaf: str, world_size: int, victim: int, count: int) -> None:
    with Stage(leaf, wait_in_vain, world_size, victim, count) as stage:
        assert stage.receive(victim) == "ready"
        stage.stop(victim)
        for rank in others(stage, victim):
            stage.send(rank, "go")
        all_seen = stage.all_seen(others(stage, victim))
        for rank, seen in zip(others(stage, victim), all_seen, strict=True):
            assert seen.kind == "CollectiveTimeoutError", seen
            assert seen.missing == (victim,)
            text = rf"rank {rank} waited (\d+\.\d) s in 'exchange 12' for rank {victim}\b"
            said = re.search(text, seen.message)
            assert said, seen.message
            # One rank may start a moment later than the one whose deadline passes first.
            assert DEADLINE_S / 2 < float(said[1]) < SOON_S
            assert seen.took_s < SOON_S
            assert_ended(seen)
        assert max(seen.took_s for seen in all_seen) > DEADLINE_S - 0.01


def come_late(comm: Communicator, rank: Rank) -> Seen:
    comm.barrier(what="start")
    if comm.rank == 1:
        rank.receive()
    return watch(
        comm, rank, lambda: comm.all_gather_rows([1.0], what="exchange 5", timeout_s=DEADLINE_S)
    )


@leaves
def test_who_comes_late_learns_that_the_others_gave_up(leaf: str) -> None:
    with Stage(leaf, come_late, 3) as stage:
        for rank in (0, 2):
            assert stage.receive(rank) == "seen"
        stage.send(1, "go")
        assert stage.receive(1) == "seen"
        for rank in range(3):
            stage.send(rank, "go")
        on_time, late, _ = stage.end([0, 1, 2])
    assert on_time.kind == late.kind == "CollectiveTimeoutError"
    assert on_time.missing == (1,)
    assert late.missing == ()
    assert "rank 1 came to 'exchange 5' after the others had given up" in late.message
    assert late.took_s < SOON_S


def give_up(comm: Communicator, rank: Rank, way: str) -> tuple[str, str, float] | None:
    comm.barrier(what="start")
    if comm.rank == 1:
        rank.send("ready")
        rank.receive()
        return None
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            comm.all_gather_rows([1.0], what="exchange 7")
        except CollectiveError as error:
            ends.append(error)

    rank.receive()
    started = time.monotonic()
    thread = threading.Thread(target=wait)
    thread.start()
    if way == "close":
        comm.close()
    else:
        comm.hurry(DEADLINE_S)
    thread.join(TIMEOUT_S)
    return type(ends[0]).__name__, str(ends[0]), time.monotonic() - started


@leaves
@pytest.mark.parametrize("way", ["close", "hurry"])
def test_a_wait_for_a_hung_peer_can_be_ended_from_outside(leaf: str, way: str) -> None:
    """Also the process ends then, though the peer still holds its connections."""
    with Stage(leaf, give_up, 2, way) as stage:
        assert stage.receive(1) == "ready"
        stage.stop(1)
        stage.send(0, "go")
        ((kind, message, took_s),) = stage.end([0])
    assert took_s < SOON_S
    if way != "close":
        assert kind == "CollectiveTimeoutError"
        assert "in 'exchange 7' for rank 1" in message
    else:
        assert kind == "CollectiveError"
        assert "closed" in message


# ── misunderstanding ─────────────────────────────────────────────────────────────────────────────

Calls = tuple[Callable[[Communicator], object], Callable[[Communicator], object]]
MISMATCHES: dict[str, Calls] = {
    "rows of unlike lengths": (
        lambda comm: comm.all_gather_rows([1.0], what="row"),
        lambda comm: comm.all_gather_rows([1.0, 2.0], what="row"),
    ),
    "other rows": (
        lambda comm: comm.all_gather_rows([1.0], what="header of window 8"),
        lambda comm: comm.all_gather_rows([1.0], what="accuracy"),
    ),
    "an evaluation": (
        lambda comm: comm.all_reduce(torch.zeros(2), what="accuracy"),
        lambda comm: comm.all_gather_rows([1.0, 2.0], what="header of window 8"),
    ),
    "another dtype": (
        lambda comm: comm.all_reduce(torch.zeros(2), what="x"),
        lambda comm: comm.all_reduce(torch.zeros(1, dtype=torch.float64), what="x"),
    ),
    "other members": (
        lambda comm: comm.split([0, 1], name="half"),
        lambda comm: comm.split([1, 0], name="half"),
    ),
}


def disagree(comm: Communicator, rank: Rank, name: str) -> Seen:
    calls = MISMATCHES[name]
    return watch(comm, rank, lambda: calls[comm.rank == 1](comm))


@leaves
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_in_different_operations_are_told_so(leaf: str, name: str) -> None:
    with Stage(leaf, disagree, 2, name) as stage:
        for seen in stage.all_seen([0, 1]):
            assert seen.kind == "CollectiveMismatchError", seen
            assert "rank 0" in seen.message
            assert "rank 1" in seen.message
            assert seen.took_s < SOON_S
            assert_ended(seen)


def evaluate_on_one_rank(comm: Communicator, rank: Rank) -> Seen:
    gradient = torch.zeros(50_000)
    comm.all_reduce_each(buckets(gradient, 4))

    def call() -> None:
        if comm.rank == 1:
            comm.all_reduce(torch.zeros(2), what="accuracy", timeout_s=DEADLINE_S)
        else:
            parts = [("gradients of window 2", part) for part in gradient.chunk(4)]
            comm.all_reduce_each(parts, timeout_s=DEADLINE_S)

    return watch(comm, rank, call)


@leaves
def test_an_evaluation_by_one_rank_alone_is_found_at_the_deadline(leaf: str) -> None:
    with Stage(leaf, evaluate_on_one_rank, 3) as stage:
        for seen in stage.all_seen([0, 1, 2]):
            assert seen.kind == "CollectiveMismatchError", seen
            assert "'accuracy'" in seen.message
            assert "'gradients of window 2'" in seen.message
            assert_ended(seen)


# ── splits and the end ───────────────────────────────────────────────────────────────────────────


def lose_a_part(comm: Communicator, rank: Rank) -> Any:
    part = comm.split([0, 1], name="inner")
    if part is None:
        rank.send("seen")
        rank.receive()
        comm.barrier(what="the whole lives on")
        return None
    if comm.rank == 1:
        part.close()
        rank.send("seen")
        rank.receive()
        comm.barrier(what="the whole lives on")
        return None
    seen = watch(part, rank, lambda: part.barrier(what="inner barrier"))
    comm.barrier(what="the whole lives on")
    return seen


@leaves
def test_a_split_fails_by_itself(leaf: str) -> None:
    with Stage(leaf, lose_a_part, 3) as stage:
        seen = stage.all_seen([0, 1, 2])[0]
        assert seen.kind == "PeerLostError"
        assert "'inner barrier'" in seen.message


def use_after_close(comm: Communicator, rank: Rank) -> Seen:
    comm.barrier(what="start")
    rank.receive()  # nobody closes while another is still in there
    comm.close()
    return watch(comm, rank, lambda: comm.all_gather_rows([1.0], what="header"))


@leaves
def test_a_closed_communicator_says_so(leaf: str) -> None:
    with Stage(leaf, use_after_close, 2) as stage:
        for rank in (0, 1):
            stage.send(rank, "close")
        for rank, seen in enumerate(stage.all_seen([0, 1])):
            assert seen.kind == "CollectiveError"
            text = f"rank {rank} cannot start 'header': rank {rank} has closed this communicator"
            assert seen.message == text
            assert seen.took_s < SOON_S
