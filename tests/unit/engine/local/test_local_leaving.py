"""Loops of CADENCE and ASYNC that are left early: no step lost, no sample twice, one consensus."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from helpers.clocks import RankClocks
from helpers.limits import PATIENCE_S
from helpers.teams import run_team, setup

LOCAL = ("cadence", "async")
LR = 2.0**-6
SIZE = 400


class Counted(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Samples that know their index."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.full((3,), index + 1.0, dtype=torch.float64)


class OneStep(nn.Module):
    """Each step moves the weight by -LR, whatever the batch; counts forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() + 0.0 * self.norm(x).sum()


class Walk:
    """Trains on one rank and keeps account: what was stepped on, and what windows came to."""

    def __init__(
        self, comm: Communicator, policy: str, clocks: RankClocks | None = None, **options: Any
    ) -> None:
        self.clocks = clocks  # where they are given, each step takes as long
        if clocks is not None:
            clocks.start()
        self.model = OneStep()
        self.seen: list[int] = []
        self.windows: list[tuple[int, ...]] = []
        short = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1, **options}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.ddp: Ddp = setup(comm, self.model, optimizer, policy=policy, **short)
        self.ddp.on_commit(self._note)
        self.loader = self.ddp.loader(Counted(), batch_size=4)

    def _note(self, result: WindowResult) -> None:
        self.windows.append(tuple(record.steps for record in result.ranks))

    def step(self, ids: Tensor, x: Tensor) -> WindowResult | None:
        if self.clocks is not None:
            self.clocks.spend(0.01)
        self.ddp.backward(self.model(x))
        result = self.ddp.step()
        self.seen.extend(ids.tolist())
        return result

    @property
    def in_flight(self) -> bool:
        return self.ddp.assembly.engine.rounds.state.flight is not None

    def check(self) -> tuple[float, int]:
        """No step was lost: see ``test_no_local_step_is_lost``. Returns what ranks must share."""
        weight = self.model.weight.item()
        expected = -LR * sum(sum(n * n for n in w) / sum(w) for w in self.windows if sum(w))
        assert weight == pytest.approx(expected, rel=1e-9)
        steps = sum(map(sum, self.windows))
        assert int(self.model.norm.num_batches_tracked) == steps == self.ddp.progress.steps
        return weight, steps


@pytest.mark.parametrize("others", ["break, too", "go on"])
@pytest.mark.parametrize("policy", LOCAL)
def test_break_in_mid_window_then_the_rest_of_the_epoch(
    policy: str, others: str, tmp_path: Path
) -> None:
    """Rank 0 leaves in the middle of a batch; in ASYNC its exchange is under way, and rank 1 has
    not come to it. Rank 1 leaves a few steps later, or is led out of the loop."""
    has_left = threading.Event()

    def body(comm: Communicator) -> tuple[list[int], list[int], tuple[float, int]]:
        walk = Walk(comm, policy)
        with walk.ddp as ddp:
            late = 0
            for ids, x in walk.loader.epoch(0):
                if ddp.window >= 2 and comm.rank == 0:
                    if policy == "cadence" or walk.in_flight:
                        ddp.backward(walk.model(x))
                        break
                elif ddp.window >= 2:
                    has_left.wait(20)
                    late += 1
                    if late == 3 and others == "break, too":
                        break
                walk.step(ids, x)
            has_left.set()
            assert ddp.weighted_mean(1.0) == 1.0
            assert not ddp.stopping
            agreed, first = walk.check(), list(walk.seen)
            assert 0 < len(first) < SIZE
            ddp.save(tmp_path)
            for ids, x in walk.loader.epoch(0):
                walk.step(ids, x)
            assert list(walk.loader.epoch(0)) == []
            walk.check()
        return first, walk.seen, agreed

    (first, seen, agreed), (second, others_seen, same) = run_team(2, body)
    assert agreed == same
    assert len(first) + len(second) == 4 * agreed[1], "what was stepped on is what was averaged"
    assert Counter(seen + others_seen) == dict.fromkeys(range(SIZE), 1)

    def resume(comm: Communicator) -> list[int]:
        walk = Walk(comm, policy)
        with walk.ddp as ddp:
            ddp.load(tmp_path)
            assert walk.model.weight.item() == agreed[0]
            for ids, x in walk.loader.epoch(0):
                walk.step(ids, x)
        return walk.seen

    rest = [i for seen in run_team(3, resume) for i in seen]
    assert Counter(first + second + rest) == dict.fromkeys(range(SIZE), 1)


@pytest.mark.parametrize("policy", LOCAL)
def test_a_checkpoint_in_mid_epoch_with_an_exchange_under_way(
    policy: str, tmp_path: Path, rank_clocks: RankClocks
) -> None:
    """Ranks come to it at one window, one of them with its next exchange begun, the other not.

    Rank 1 stands still until rank 0 has begun; where rank 1 has begun before, both save at once.
    """
    arrived, saves = threading.Event(), threading.Event()
    has_begun: list[bool] = []

    windows: dict[int, int] = {}
    meeting = threading.Barrier(2, timeout=PATIENCE_S)

    def is_time(rank: int, walk: Walk) -> bool:
        if rank not in windows:
            windows[rank] = walk.ddp.window
            meeting.wait()
        if walk.ddp.window < max(windows.values()):
            return False  # the other one has landed a window more: both save in the same one
        if rank == 1:
            has_begun.append(walk.in_flight)
            arrived.set()
            return has_begun[0] or saves.wait(PATIENCE_S)
        arrived.wait(PATIENCE_S)
        if walk.in_flight:
            saves.set()
        return walk.in_flight or has_begun[0]

    def body(comm: Communicator) -> tuple[list[int], list[int], tuple[float, int]]:
        walk = Walk(comm, policy, rank_clocks)
        first: list[int] = []
        with walk.ddp as ddp:
            for ids, x in walk.loader.epoch(0):
                here = ddp.window >= 3 and not first  # a rank that was held up may skip a window
                if here and (policy == "cadence" or is_time(comm.rank, walk)):
                    ddp.save(tmp_path)
                    first = list(walk.seen)
                walk.step(ids, x)
            assert first
        return first, walk.seen, walk.check()

    (_, seen, agreed), (_, others, same) = run_team(2, body)
    assert agreed == same
    assert Counter(seen + others) == dict.fromkeys(range(SIZE), 1)


@pytest.mark.parametrize("policy", LOCAL)
def test_a_stop_and_a_break_at_once(policy: str) -> None:
    def body(comm: Communicator) -> tuple[float, int, bool]:
        walk = Walk(comm, policy)
        with walk.ddp as ddp:
            for number, (ids, x) in enumerate(walk.loader.epoch(0)):
                if number == 5 and comm.rank == 0:
                    break
                if number == 5:
                    ddp.stop()
                walk.step(ids, x)
            assert ddp.weighted_mean(1.0) == 1.0
            for _ in walk.loader.epoch(0) if ddp.stopping else ():
                raise AssertionError("a team that has stopped trains no more")
            return (*walk.check(), ddp.stopping)

    first, second = run_team(2, body)
    assert first == second


@pytest.mark.parametrize("policy", LOCAL)
def test_a_step_that_is_left_out_leaves_no_trace_in_the_buffers(policy: str) -> None:
    """Statistics of a batch that holds a NaN would be NaN for good."""

    def body(comm: Communicator) -> tuple[bool, int, int]:
        walk = Walk(comm, policy, non_finite="skip")
        with walk.ddp as ddp:
            for ids, x in walk.loader.epoch(0):
                walk.step(ids, x * (float("nan") if 0 in ids.tolist() else 1.0))
            finite = all(bool(t.isfinite().all()) for t in walk.model.state_dict().values())
            return finite, int(walk.model.norm.num_batches_tracked), ddp.progress.skipped

    assert run_team(2, body) == [(True, SIZE // 4 - 1, 1)] * 2
