"""Loops that are left early, resumed, or interrupted by an error; several loaders; the counters."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.errors import CheckpointError, ConfigError, UsageError
from helpers.loops import Numbered, linear, step
from helpers.teams import run_team, setup

SIZE = 30
SHARES = [(1,), (2, 0, 1)]
TEAMS = [pytest.param(len(s), s, id=f"{len(s)} ranks") for s in SHARES]


@pytest.mark.parametrize(("world_size", "shares"), TEAMS)
def test_break_at_a_window_then_the_next_epoch(world_size: int, shares: Any) -> None:
    """A rank without a share is inside its loader when the others break: it leaves it, too."""

    def body(comm: Communicator) -> tuple[list[int], list[tuple[int, int]], Tensor]:
        model, optimizer = linear()
        seen: list[int] = []
        committed: list[tuple[int, int]] = []
        with setup(comm, model, optimizer, shares=shares) as ddp:
            ddp.on_commit(lambda result: committed.append((result.epoch, result.window)))
            loader = ddp.loader(Numbered(SIZE), batch_size=5)
            for epoch in range(3):
                for ids, x in loader.epoch(epoch):
                    if ddp.window >= (epoch + 1) * 2:
                        break
                    seen.extend(ids.tolist())
                    step(ddp, x)
                assert ddp.weighted_mean(1.0) == 1.0
            assert ddp.window == 6
            assert [len(loader), loader.state_dict()["epoch"]] == [6, 2]
        return seen, committed, model.weight.detach().clone()

    results = run_team(world_size, body)
    assert sum(len(seen) for seen, _, _ in results) == 3 * 2 * 5
    for _, committed, weight in results:
        assert committed == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
        assert torch.equal(weight, results[0][2])


def test_iterating_goes_on_epoch_by_epoch() -> None:
    model, optimizer = linear()
    with setup(Communicator(), model, optimizer) as ddp:
        loader = ddp.loader(Numbered(SIZE), batch_size=10)
        orders: list[list[int]] = [[], []]
        for order in orders:
            for ids, x in loader:
                order.extend(ids.tolist())
                step(ddp, x)
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(SIZE))
        assert orders[0] != orders[1]
        assert loader.state_dict()["epoch"] == 2


def test_an_epoch_inside_an_epoch() -> None:
    model, optimizer = linear()
    with setup(Communicator(), model, optimizer) as ddp:
        first, second = (
            ddp.loader(Numbered(SIZE), batch_size=10),
            ddp.loader(Numbered(SIZE), batch_size=10),
        )
        outer = first.epoch(0)
        next(outer)
        with pytest.raises(UsageError, match="begun inside the loop over another one"):
            next(second.epoch(0))
        outer.close()


# ── several loaders ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("world_size", "shares"), TEAMS)
def test_evaluation_in_mid_epoch_is_exact_with_unequal_parts(world_size: int, shares: Any) -> None:
    held_out = torch.utils.data.TensorDataset(torch.arange(17.0))

    def body(comm: Communicator) -> tuple[list[float], list[int]]:
        model, optimizer = linear()
        means: list[float] = []
        seen: list[int] = []
        with setup(comm, model, optimizer, shares=shares) as ddp:
            loader = ddp.loader(Numbered(SIZE), batch_size=5)
            evaluation = ddp.eval_loader(held_out, batch_size=4)
            assert len(evaluation) == 5

            def evaluate() -> None:
                total, count = 0.0, 0
                with ddp.evaluating():
                    assert not model.training
                    for (values,) in evaluation:
                        assert len(values) <= 4
                        total += float(values.sum())
                        count += len(values)
                        seen.extend(int(v) for v in values)
                means.append(ddp.weighted_mean(total / max(count, 1), weight=count))

            @ddp.on_commit
            def _(result: Any) -> None:
                if result.window == 2:
                    evaluate()

            for _, x in loader.epoch(0):
                step(ddp, x)
            evaluate()
            assert model.training
        return means, seen

    results = run_team(world_size, body)
    assert all(means == [8.0, 8.0] for means, _ in results)
    assert Counter(i for _, seen in results for i in seen) == dict.fromkeys(range(17), 2)


def two_sets(comm: Communicator, folder: Path, *, resume: bool, windows: int) -> list[list[int]]:
    """Two training loaders in turn, an average of the weights, and a checkpoint at the end."""
    model, optimizer = linear()
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[list[int]] = [[], []]
    with setup(comm, model, optimizer, shares=(2, 1)[: comm.world_size]) as ddp:
        loaders = [ddp.loader(Numbered(SIZE), batch_size=5, seed=s) for s in range(2)]
        ddp.register("average", average)
        if resume:
            ddp.load(folder)
            ddp.register("scheduler", scheduler)
            assert int(average.n_averaged) == 9
            assert scheduler.last_epoch == 7
        else:
            scheduler.last_epoch = 7
            ddp.register("scheduler", scheduler)
        ddp.on_commit(lambda _: average.update_parameters(model))
        for number, loader in enumerate(loaders):
            for ids, x in loader.epoch(0):
                if ddp.window == windows:
                    break
                seen[number].extend(ids.tolist())
                step(ddp, x)
        ddp.save(folder)
    return seen


def test_two_loaders_and_registered_objects_in_one_checkpoint(tmp_path: Path) -> None:
    first = run_team(2, lambda c: two_sets(c, tmp_path / "a", resume=False, windows=9))
    second = run_team(1, lambda c: two_sets(c, tmp_path / "a", resume=True, windows=99))
    for number in range(2):
        ids = Counter(i for seen in [*first, *second] for i in seen[number])
        assert ids == dict.fromkeys(range(SIZE), 1)


def test_what_cannot_be_registered_or_is_missing(tmp_path: Path) -> None:
    model, optimizer = linear()
    with setup(Communicator(), model, optimizer) as ddp:
        ddp.loader(Numbered(SIZE), batch_size=5)
        ddp.save(tmp_path / "a")
        ddp.register("one", nn.Linear(1, 1))
        with pytest.raises(ConfigError, match="used once"):
            ddp.register("one", nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match="no state of 'one'"):
            ddp.load(tmp_path / "a")


def test_a_collective_at_the_commit_that_follows_a_break() -> None:
    """Rank 1 may have no share, and then knows nothing of the break at the commit."""

    def body(comm: Communicator) -> list[float]:
        model, optimizer = linear()
        means: list[float] = []
        with setup(comm, model, optimizer, shares=(1, 0)) as ddp:
            ddp.on_commit(lambda _: means.append(ddp.weighted_mean(comm.rank)))
            for _, x in ddp.loader(Numbered(SIZE), batch_size=5).epoch(0):
                if ddp.window == 3:
                    break
                step(ddp, x)
        return means

    assert run_team(2, body) == [[0.5] * 3] * 2


def test_an_update_outside_of_a_loader_after_a_break_takes_no_samples_of_it() -> None:
    def body(comm: Communicator) -> tuple[int, int, Any]:
        model, optimizer = linear()
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(Numbered(SIZE), batch_size=10)
            for _, x in loader.epoch(0):
                step(ddp, x)
                break
            result = step(ddp, torch.ones(1, 3))
            assert ddp.weighted_mean(1.0) == 1.0
            return result.size, ddp.progress.samples, loader.state_dict()["committed"]

    for size, samples, committed in run_team(2, body):
        assert [samples, committed] == [10 + size, [[0, 10]]]
