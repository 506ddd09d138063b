"""Loops of CADENCE and ASYNC that are left early: no step lost, no sample twice, one consensus."""

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from helpers.clocks import RankClocks
from helpers.limits import PATIENCE_S
from helpers.loops import STEP_SIZE, Numbered, OneStep, flatten, linear, train
from helpers.teams import run_team, setup

SIZE = 400
EACH_ONCE = dict.fromkeys(range(SIZE), 1)
SHORT = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1}
both_policies = pytest.mark.parametrize("policy", ["cadence", "async"])


class Walk:
    """Trains on one rank and keeps account: what was stepped on, and what windows came to."""

    def __init__(self, comm: Communicator, policy: str, clocks: RankClocks | None = None) -> None:
        self.clocks = clocks  # where they are given, each step takes as long
        if clocks is not None:
            clocks.start()
        self.model = OneStep()
        self.seen: list[int] = []
        self.windows: list[WindowResult] = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=STEP_SIZE)
        self.ddp: Ddp = setup(comm, self.model, optimizer, policy=policy, **SHORT)
        self.ddp.on_commit(self.windows.append)
        self.loader = self.ddp.loader(Numbered(SIZE, torch.float64), batch_size=4)

    def step(self, ids: Tensor, x: Tensor) -> None:
        if self.clocks is not None:
            self.clocks.spend(0.01)
        self.ddp.backward(self.model(x))
        self.ddp.step()
        self.seen.extend(ids.tolist())

    @property
    def in_flight(self) -> bool:
        return self.ddp.assembly.engine.rounds.state.flight is not None

    def check(self) -> tuple[float, int]:
        """No step was lost. Returns what ranks must share."""
        self.model.check(self.windows)
        steps = int(self.model.norm.num_batches_tracked)
        assert steps == self.ddp.progress.steps
        return self.model.weight.item(), steps


@pytest.mark.parametrize("others", ["break, too", "go on"])
@both_policies
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
    assert Counter(seen + others_seen) == EACH_ONCE

    def resume(comm: Communicator) -> list[int]:
        walk = Walk(comm, policy)
        with walk.ddp as ddp:
            ddp.load(tmp_path)
            assert walk.model.weight.item() == agreed[0]
            for ids, x in walk.loader.epoch(0):
                walk.step(ids, x)
        return walk.seen

    rest = [i for seen in run_team(3, resume) for i in seen]
    assert Counter(first + second + rest) == EACH_ONCE


@both_policies
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

    def body(comm: Communicator) -> tuple[list[int], tuple[float, int]]:
        walk = Walk(comm, policy, rank_clocks)
        is_saved = False
        with walk.ddp as ddp:
            for ids, x in walk.loader.epoch(0):
                here = ddp.window >= 3 and not is_saved  # a rank that was held up may skip a window
                if here and (policy == "cadence" or is_time(comm.rank, walk)):
                    ddp.save(tmp_path)
                    is_saved = True
                walk.step(ids, x)
            assert is_saved
        return walk.seen, walk.check()

    (seen, agreed), (others, same) = run_team(2, body)
    assert agreed == same
    assert Counter(seen + others) == EACH_ONCE


@both_policies
def test_a_stop_ends_all_ranks_at_one_consensus_and_another_team_goes_on(
    policy: str, tmp_path: Path
) -> None:
    """Moments in the checkpoint are the main rank's; all ranks of the next team take them."""

    def session(comm: Communicator, *, resumes: bool) -> tuple[list[int], Tensor, Tensor]:
        model, _ = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        done: list[int] = []
        order = Permutation(SIZE, seed=0, epoch=0)

        def commit(result: WindowResult) -> None:
            done.extend(order[p] for start, stop in result.ranges for p in range(start, stop))
            if not resumes and result.window == 3 and comm.rank == 1:
                ddp.stop()

        def state() -> tuple[Tensor, Tensor]:
            moment = optimizer.state[model.get_parameter("weight")]["exp_avg"]
            return flatten(model), moment.clone()

        with setup(comm, model, optimizer, policy=policy, **SHORT) as ddp:
            ddp.on_commit(commit)
            loader = ddp.loader(Numbered(SIZE), batch_size=4)
            if resumes:
                ddp.load(tmp_path)
                loaded = state()
                train(ddp, loader)
                return done, *loaded
            train(ddp, loader)
            assert ddp.stopping
            ddp.save(tmp_path)
            return done, *state()

    (done, weights, moment), (same, other, _) = run_team(2, lambda c: session(c, resumes=False))
    assert done == same
    assert torch.equal(weights, other)
    for rest, restored, taken in run_team(3, lambda c: session(c, resumes=True)):
        assert Counter(done + rest) == EACH_ONCE
        assert torch.equal(restored, weights)
        assert torch.equal(taken, moment)
