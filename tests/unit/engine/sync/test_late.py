"""One rank whose host is ahead of its device, and reads loss and norm of an update later."""

import math
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.devices import Cpu
from evener.engine.results import WindowResult
from evener.errors import NonFiniteGradientError
from helpers.loops import flatten
from helpers.models import mlp
from helpers.queued import Queue, give_milestones
from helpers.teams import setup

SAMPLES, BATCH = 32, 8
WINDOWS = SAMPLES // BATCH


class Rows(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Numbered samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(4, generator=torch.Generator().manual_seed(index))


class Training:
    """A run of one rank, with what it led to."""

    def __init__(
        self,
        *,
        bad: Sequence[int] = (),
        normalised: bool = False,
        epochs: int = 2,
        weight: float | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        **config: Any,
    ) -> None:
        layers = [nn.BatchNorm1d(4)] if normalised else []
        self.model = nn.Sequential(*layers, mlp(4, 8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.ddp = setup(Communicator(), self.model, self.optimizer, scheduler=schedule, **config)
        self.results: list[WindowResult] = []
        self.committed: list[WindowResult] = []
        self.ddp.on_commit(self.committed.append)
        self._bad, self._epochs = bad, epochs
        self._given: Any = {"weight": weight, "reduction": reduction}

    def run(self) -> "Training":
        loader = self.ddp.loader(Rows(), batch_size=BATCH, micro_batch_size=BATCH // 2)
        with self.ddp:
            for epoch in range(self._epochs):
                for ids, x in loader.epoch(epoch):
                    if self.ddp.window in self._bad:
                        x = torch.full_like(x, math.nan)
                    loss = self.model(x).square().mean() + 0 * ids.sum()
                    self.ddp.backward(loss, **self._given)
                    if (result := self.ddp.step()) is not None:
                        self.results.append(result)
        return self

    def state(self) -> list[Any]:
        """What has to be the same, to the bit, whoever decides about an update."""
        optimizer = self.optimizer.state_dict()
        counters = [
            (r.window, r.skipped, asdict(r.progress), r.lr, r.ranks[0].samples, r.ranks[0].weight)
            for r in self.committed
        ]
        moments = [list(state.values()) for state in optimizer["state"].values()]
        groups = [group["lr"] for group in optimizer["param_groups"]]
        weights = [value.tolist() for value in self.model.state_dict().values()]
        moments = [[value.tolist() for value in values] for values in moments]
        return [weights, moments, groups, repr(counters), asdict(self.ddp.progress)]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return give_milestones(monkeypatch, Cpu)


@pytest.mark.parametrize(
    ("normalised", "bad", "non_finite", "reduction", "max_grad_norm"),
    [
        (False, (), "raise", "mean", None),
        (True, (0,), "skip", "sum", None),
        (True, (2, 3, 5, 7), "skip", "mean", 0.1),
        (False, (2, 3, 5, 7), "skip", "sum", 0.1),
    ],
)
def test_it_trains_as_where_the_host_decides(
    monkeypatch: pytest.MonkeyPatch,
    normalised: bool,
    bad: Sequence[int],
    non_finite: str,
    max_grad_norm: float | None,
    reduction: str,
) -> None:
    options: dict[str, Any] = {"non_finite": non_finite, "max_grad_norm": max_grad_norm}
    options["reduction"] = reduction
    known = Training(bad=bad, normalised=normalised, **options).run()
    give_milestones(monkeypatch, Cpu)
    late = Training(bad=bad, normalised=normalised, **options).run()
    assert len(late.results) == 2 * WINDOWS
    if max_grad_norm is None:
        assert late.state() == known.state()
    else:  # the device computes the factor in float32
        for mine, true in zip(late.model.parameters(), known.model.parameters(), strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-7)
        assert late.state()[2:] == known.state()[2:]
    for mine, true in zip(late.committed, known.committed, strict=True):
        assert mine.loss == pytest.approx(true.loss, nan_ok=True)
        assert mine.ranks[0].loss_sum == pytest.approx(true.ranks[0].loss_sum, nan_ok=True)
        assert mine.grad_norm == pytest.approx(true.grad_norm, rel=1e-6, nan_ok=True)
        assert mine.ranks[0].own_norm == pytest.approx(true.ranks[0].own_norm, nan_ok=True)
        assert mine.ranks[0].compute_s > 0


def test_a_step_waits_for_no_more_than_the_window_before(queue: Queue) -> None:
    training = Training(epochs=1)
    loader = training.ddp.loader(Rows(), batch_size=BATCH)
    with training.ddp as ddp:
        before = 0
        for _, x in loader.epoch(0):
            begun = queue.marked
            ddp.backward(training.model(x).square().mean())
            result = ddp.step()
            assert result is not None
            assert before <= queue.waited <= begun
            before = begun


def test_reading_a_result_waits_for_the_device(queue: Queue) -> None:
    training = Training(epochs=1)
    with training.ddp as ddp:
        for _, x in training.ddp.loader(Rows(), batch_size=BATCH).epoch(0):
            ddp.backward(training.model(x).square().mean())
            result = ddp.step()
            assert result is not None
            before = queue.waited
            assert result.loss > 0
            assert queue.waited > before
            before = queue.waited
            assert result.grad_norm > 0
            assert not result.skipped
            assert queue.waited == before
            assert pickle.loads(pickle.dumps(result)) == replace(result)


@pytest.mark.parametrize("bad", [0, WINDOWS - 1, 2 * WINDOWS - 1])
def test_an_error_comes_a_window_late_and_before_the_commit(queue: Queue, bad: int) -> None:
    training = Training(bad=(bad,))
    with pytest.raises(NonFiniteGradientError) as caught:
        training.run()
    assert (caught.value.window, caught.value.rank) == (bad, 0)
    assert f"in step {bad + 1} (window {bad}, epoch {bad // WINDOWS})" in str(caught.value)
    assert "the loss is not finite on rank 0" in str(caught.value)
    assert [result.window for result in training.committed] == list(range(bad))
    assert training.ddp.progress.steps == bad
    assert training.ddp.window == bad
    # The device has made the step meanwhile.
    assert all(parameter.isnan().any() for parameter in training.model.parameters())


def test_a_window_without_weight_is_known_at_once(queue: Queue) -> None:
    training = Training(weight=0.0, epochs=1).run()
    assert all(result.skipped and math.isnan(result.loss) for result in training.results)
    assert training.ddp.progress.skipped == WINDOWS


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_on_a_gpu_waits_for_nothing_or_once_with_other_optimizers(fused: bool) -> None:
    """No kernel and no copy that torch knows of has the host wait for the GPU."""

    def trained(device: str) -> tuple[Tensor, list[float]]:
        model = mlp(4, 8, 1).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        options = DdpConfig(quiet=True, max_grad_norm=0.1)
        ddp = Ddp.setup(model, optimizer, devices=[device], config=options)
        losses: list[float] = []
        ddp.on_commit(lambda result: losses.append(result.loss))
        with ddp:
            for _, x in ddp.loader(Rows(), batch_size=BATCH, micro_batch_size=4).epoch(0):
                batch = x.to(device)
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    with warnings.catch_warnings(record=True) as seen:
                        warnings.simplefilter("always")
                        ddp.backward(model(batch).square().mean())
                        result = ddp.step()
                finally:
                    if device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
                waits = [w for w in seen if "synchronizing CUDA operation" in str(w.message)]
                assert len(waits) <= (result is not None and not fused)
        return flatten(model.cpu()), losses

    (mine, losses), (true, true_losses) = trained("cuda"), trained("cpu")
    assert losses == pytest.approx(true_losses, rel=1e-4)
    torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-5)
