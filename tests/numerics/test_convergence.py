"""The simulation of ``benchmarks/convergence.py`` against the real engine: the same losses."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from helpers.clocks import RankClocks
from helpers.models import mlp, regression_data
from helpers.source import ROOT
from helpers.teams import run_team, setup

STEPS, WINDOWS, BATCH = 4, 5, 2
SIZE = 2 * STEPS * WINDOWS * BATCH
X, Y = regression_data(SIZE, dtype=torch.float64)


@pytest.fixture
def from_benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Yield what imports a module of the folder of benchmarks."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for name in sys.modules.keys() - before:
        if name in {"convergence", "convergence_report", "local_training"}:
            del sys.modules[name]


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("outer", [{}, {"outer_lr": "auto", "outer_momentum": 0.5}])
def test_losses_are_those_of_two_ranks(
    late: int,
    outer: dict[str, Any],
    rank_clocks: RankClocks,
    from_benchmarks: Callable[[str], ModuleType],
) -> None:
    local_training = from_benchmarks("local_training")
    rank_clocks.land_after(late)

    def body(comm: Communicator) -> tuple[list[Tensor], list[float], Tensor]:
        rank_clocks.start()
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        options = {"anchor": STEPS, "max_anchor": STEPS, "max_batch_diff": 0, "speed_hint": (1, 1)}
        options |= {"outer": "nesterov", **outer} if outer else {}
        batches, losses = [], []
        policy = "async" if late else "cadence"
        with setup(comm, model, optimizer, policy=policy, **options) as ddp:
            for (ids,) in ddp.loader(
                torch.utils.data.TensorDataset(torch.arange(SIZE)), batch_size=BATCH
            ).epoch(0):
                rank_clocks.spend(0.01)
                loss = nn.functional.mse_loss(model(X[ids]), Y[ids])
                ddp.backward(loss)
                batches.append(ids)
                losses.append(loss.item())
                ddp.step()
        return batches, losses, model(X).detach()

    ranks = run_team(2, body)
    assert all(len(losses) == STEPS * WINDOWS for _, losses, _ in ranks)
    expected = [losses[step] for step in range(STEPS * WINDOWS) for _, losses, _ in ranks]
    flat = local_training.FlatModel(mlp(dtype=torch.float64))

    def loss_at(vector: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.mse_loss(flat(vector, X[ids]), Y[ids])

    for gradients in (local_training.one_by_one(loss_at), local_training.stacked(loss_at)):
        training = local_training.train(
            local_training.Local(steps=STEPS, late=late / STEPS, **outer),
            flat.vector,
            lambda vector: torch.optim.AdamW([nn.Parameter(vector)], lr=0.02),
            lambda window, rank, step: ranks[rank][0][STEPS * window + step],
            2 * STEPS * WINDOWS,
        )
        (found,) = local_training.train_together([training], gradients)
        assert found.losses == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(flat(found.consensus, X), ranks[0][2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("how", "speeds", "seconds"),
    [
        # 100 steps of 1 s, and 100 times 8 Mbit at 8 Mbit/s: half of 250,000 float32, twice.
        ({"ranks": 1, "steps": 1}, (1, 1), 100 * 1 / 2 + 100),
        ({"ranks": 1, "steps": 1}, (1, 1 / 4), 100 * 1 / 1.25 + 100),
        # 100 steps of half of the batch, and 10 MB.
        ({}, (1, 1), 100 / 2 + 10),
        # The exchange is hidden behind half of the time.
        ({"late": 0.5}, (1, 1), 50),
        ({"late": 0.1}, (1, 1), 10 / 0.1),
    ],
)
def test_emulated_time(
    how: dict[str, Any],
    speeds: tuple[float, ...],
    seconds: float,
    from_benchmarks: Callable[[str], ModuleType],
) -> None:
    report, convergence = from_benchmarks("convergence_report"), from_benchmarks("convergence")
    arm = convergence.Arm.of(how)
    result = convergence.Result(
        loss=1.0,
        params=250_000,
        windows=100,
        fast_steps=100,
        sent_bytes=10_000_000,
        divergence=0.0,
    )
    assert report.emulated_s(arm, result, speeds, 8e6, 1.0) == pytest.approx(seconds)


def test_the_pictures_are_those_of_the_results(
    from_benchmarks: Callable[[str], ModuleType],
) -> None:
    report, convergence = from_benchmarks("convergence_report"), from_benchmarks("convergence")
    for name, picture in report.pictures(convergence.read(convergence.RESULTS)).items():
        told = "run python benchmarks/convergence_report.py"
        assert (report.IMAGES / name).read_text(encoding="utf-8") == picture, told
