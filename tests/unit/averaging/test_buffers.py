"""Buffers of ranks: what a late average does to them, and how a batch is undone."""

import pytest
import torch
from torch import Tensor, nn

from evener.averaging.buffers import BufferAverager
from evener.comm.base import Communicator


class Statistics(nn.Module):
    """A running mean with momentum 0.1, a float sum, a counter, a flag, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("constant", torch.tensor([-0.0, 0.1]))

    def see(self, value: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * value)
        self.total.add_(1.0)
        self.count.add_(1)


class Ranks:
    """Two ranks whose averages land when the next window is nearly over: as late as may be."""

    def __init__(self) -> None:
        self.models = [Statistics(), Statistics()]
        self.averagers = [BufferAverager(m, Communicator()) for m in self.models]
        self.packed: Tensor | None = None

    def window(self, steps: int, weights: tuple[float, float], noise: torch.Generator) -> None:
        for model in self.models:
            for _ in range(steps):
                model.see(1 + 0.3 * torch.randn((), generator=noise, dtype=torch.float64))
        self.land(moved_on=True)
        snapshots = [averager.snapshot() for averager in self.averagers]
        for averager, packed, weight in zip(self.averagers, snapshots, weights, strict=True):
            averager.exchange(packed, Communicator(), weight, sum(weights), what="a test")
        self.packed = snapshots[0] + snapshots[1]

    def land(self, *, moved_on: bool) -> None:
        if self.packed is not None:
            for averager in self.averagers:
                averager.agree(self.packed.clone(), moved_on=moved_on)
        self.packed = None

    def consensus(self, rank: int) -> dict[str, Tensor]:
        with self.averagers[rank].consensus():
            return {name: b.clone() for name, b in self.models[rank].named_buffers()}


@pytest.mark.parametrize(("steps", "windows"), [(1, 200), (10, 80), (50, 60)])
def test_running_statistics_of_ranks_stay_together_though_averages_land_late(
    steps: int, windows: int
) -> None:
    """Independent running means are apart by 0.3 * sqrt(2 * 0.1 / 1.9) = 0.1 (root mean square); a
    gain of 1/2 makes that 0.11 at most, and a half more is allowed for chance. With a gain of 1 it
    was 0.54 in windows of 50 steps, and growing."""
    noise = torch.Generator().manual_seed(2)
    ranks = Ranks()
    apart: list[Tensor] = []
    for number in range(windows):
        ranks.window(steps, (3.0, 1.0 + number % 2), noise)
        if number * steps > 50:
            apart.append(ranks.models[0].mean - ranks.models[1].mean)
            assert abs(float(ranks.consensus(0)["mean"]) - 1.0) < 0.35, "five standard deviations"
    assert float(torch.stack(apart).square().mean().sqrt()) < 0.17
    ranks.land(moved_on=False)
    first, second = ranks.consensus(0), ranks.consensus(1)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert torch.equal(tensor, dict(ranks.models[0].named_buffers())[name])
    assert int(first["count"]) == 2 * windows * steps, "counters add up exactly"
    assert first["constant"].numpy().tobytes() == torch.tensor([-0.0, 0.1]).numpy().tobytes()


def test_sums_lose_nothing_where_weights_are_constant() -> None:
    ranks = Ranks()
    for _ in range(20):
        ranks.window(3, (1.0, 1.0), torch.Generator().manual_seed(0))
    ranks.land(moved_on=False)
    assert float(ranks.consensus(0)["total"]) == pytest.approx(60.0, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_undone_as_it_never_was(dtype: torch.dtype) -> None:
    """Batch normalisation raises the version of its counter alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3, dtype=dtype), nn.BatchNorm1d(3, dtype=dtype))
    averager = BufferAverager(model, Communicator())
    x = torch.randn(8, 3, dtype=dtype)
    averager.keep()
    model[0](x * float("nan"))
    averager.rewind()
    assert not any(bool(b.isnan().any()) for b in model.buffers())
    assert bool((model[0].running_mean == 0).all())
    for _ in range(3):
        averager.keep()
        model(x)
        before = {name: b.clone() for name, b in model.named_buffers()}
        averager.keep()
        model(x * float("nan"))
        model(x)
        averager.rewind()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name
