"""Micro-batches that do not fit: halved per rank, the share done again, the size remembered."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.comm.base import Communicator
from evener.engine import sync
from evener.engine.memory import MicroBatchLimits, is_out_of_memory
from evener.loop.epochs import EpochLoop
from evener.planning.pieces import Pieces
from helpers.loops import flatten
from helpers.models import mlp, regression_data
from helpers.teams import run_team, setup

X, Y = regression_data(48, dtype=torch.float64)
DATA = torch.utils.data.TensorDataset(X, Y)
PLENTY = 10**9


def fail(_: Tensor) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def fail_in_backward(_module: Any, _inputs: Any, output: Tensor) -> None:
    output.register_hook(fail)


class Rank(EpochLoop):
    """Trains micro-batches of up to ``capacity`` samples and has no memory for larger ones."""

    def __init__(self, comm: Communicator, capacity: int, when: str, **options: Any) -> None:
        self.model = mlp(dtype=torch.float64)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        ddp = setup(comm, self.model, optimizer, **options)
        super().__init__(ddp, num_epochs=None, max_steps=None, checkpoint_every=None)
        self.loader = self.ddp.loader(DATA, batch_size=16)
        self.capacity = capacity
        self.when = when
        self.sizes: list[int] = []

    def train_micro_batch(self, batch: list[Tensor]) -> None:
        x, y = batch
        self.sizes.append(len(x))
        handle = None
        if len(x) > self.capacity:
            if self.when == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            # The last layer has added its gradient by then.
            handle = self.model[1].register_forward_hook(fail_in_backward)
        try:
            self.ddp.backward((self.model(x) - y).square().mean())
        finally:
            if handle is not None:
                handle.remove()

    def train(self, epochs: int) -> Tensor:
        for epoch in range(epochs):
            self.train_epoch(epoch)
        return flatten(self.model)

    @property
    def known(self) -> list[int | None]:
        return self.ddp.assembly.engine.run.limits.sizes


def train(
    comm: Communicator, capacities: Mapping[int, int], when: str = "forward", **options: Any
) -> tuple[Tensor, list[int], list[int | None]]:
    rank = Rank(comm, capacities.get(comm.rank, PLENTY), when, **options)
    with rank.ddp:
        weights = rank.train(2)
        assert rank.ddp.progress.samples == 96
        return weights, rank.sizes, rank.known


LOCKSTEP = {"policy": "cadence", "anchor": 1, "max_anchor": 1, "max_batch_diff": 0}


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    ("options", "capacities", "found"),
    [
        ({"partition_ratios": (1, 1)}, {1: 3}, [8, 2]),
        ({"partition_ratios": (3, 2, 1)}, {0: 3, 2: 1}, [3, 6, 1]),
        # A batch of a local step that does not fit is one step all the same.
        (LOCKSTEP, {0: 5, 1: 1}, [4, 1]),
    ],
)
def test_the_result_is_that_of_enough_memory_and_each_rank_finds_its_own_size(
    options: dict[str, Any], capacities: dict[int, int], found: list[int], when: str
) -> None:
    if "policy" in options:
        expected = run_team(len(found), lambda comm: train(comm, {}, **options))[0][0]
    else:
        expected = run_team(1, lambda comm: train(comm, {}))[0][0]
    results = run_team(len(found), lambda comm: train(comm, capacities, when, **options))
    for rank, (weights, sizes, known) in enumerate(results):
        # Double precision: what is left is the order of the sums.
        assert torch.linalg.vector_norm(weights - expected) <= 1e-9 * expected.norm()
        assert known == found
        failed = [size for size in sizes if size > capacities.get(rank, PLENTY)]
        assert failed == sorted(set(failed), reverse=True)  # none twice: it is remembered
        assert bool(failed) == (rank in capacities)


class Fills(Rank):
    """Has less memory from the third window on; optionally, another rank is stopped then."""

    stops = False

    def train_micro_batch(self, batch: list[Tensor]) -> None:
        if self.ddp.window == 2:
            self.capacity = 3 if self.ddp.rank == 1 else PLENTY
            if self.stops and self.ddp.rank == 0:
                self.ddp.stop()
        super().train_micro_batch(batch)


def train_with_overlap(comm: Communicator, *, stops: bool) -> tuple[Tensor, list[int], int]:
    rank = Fills(comm, PLENTY, "backward", overlap="on", partition_ratios=(1, 1, 0))
    rank.stops, rank.loader = stops, rank.ddp.loader(DATA, batch_size=16, micro_batch_size=8)
    with rank.ddp:
        weights = rank.train(2)
        return weights, rank.sizes, rank.ddp.progress.samples


def test_a_window_whose_gradients_have_left_is_computed_again_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync, "choose_pieces", lambda *known: Pieces(1, 0.0, 0.0))
    expected = run_team(1, lambda comm: train(comm, {}))[0][0]
    found = run_team(3, lambda comm: train_with_overlap(comm, stops=False))
    for weights, _, samples in found:
        assert torch.linalg.vector_norm(weights - expected) <= 1e-9 * expected.norm()
        assert samples == 96
    assert [sizes for _, sizes, _ in found] == [[8] * 7, [8, 8, 8, 4] + [2] * 16, []]


def test_a_team_that_stops_leaves_such_a_window_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "choose_pieces", lambda *known: Pieces(1, 0.0, 0.0))
    found = run_team(3, lambda comm: train_with_overlap(comm, stops=True))
    assert [samples for *_, samples in found] == [32] * 3
    assert all(torch.equal(weights, found[0][0]) for weights, *_ in found)


def test_one_sample_that_does_not_fit_is_an_error_that_says_so() -> None:
    rank = run_team(1, lambda comm: Rank(comm, 0, "forward"))[0]
    with rank.ddp, pytest.raises(torch.OutOfMemoryError) as caught:
        rank.train(1)
    assert rank.sizes == [16, 8, 4, 2, 1]
    assert any("not even a micro-batch of one sample fits" in n for n in caught.value.__notes__)


def test_in_a_loop_of_the_user_the_error_tells_the_remedy() -> None:
    def loop(rank: Rank) -> None:
        with rank.ddp:
            for batch in rank.loader.epoch(0):
                rank.train_micro_batch(batch)
                rank.ddp.step()

    for when, kind in (("forward", torch.OutOfMemoryError), ("backward", RuntimeError)):
        with pytest.raises(kind) as caught:
            loop(run_team(1, lambda comm, when=when: Rank(comm, 7, when))[0])
        (note,) = caught.value.__notes__
        assert "a micro-batch of 16 samples does not fit" in note
        assert "ddp.loader(micro_batch_size=...) a smaller number on this rank, such as 8" in note


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    class Broken(Rank):
        def train_micro_batch(self, batch: list[Tensor]) -> None:
            raise ValueError("shapes")

    rank = run_team(1, lambda comm: Broken(comm, PLENTY, "forward"))[0]
    with rank.ddp, pytest.raises(ValueError, match="shapes") as caught:
        rank.train_epoch(0)
    assert not getattr(caught.value, "__notes__", [])
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))


def test_limits_go_by_member() -> None:
    limits = MicroBatchLimits(3)
    limits.start_with(16)
    assert limits.learn({1: 4})
    assert not limits.learn({1: 4})
    assert limits.sizes == [16, 4, 16]
    other = MicroBatchLimits(2)
    other.load_state_dict(limits.state_dict(["a", "b", "c"]), ["b", "z"], rank=0)
    assert (other.own, other.known) == (4, [4, 0])
