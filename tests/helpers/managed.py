"""A small job for ``Ddp.builder``, and what a plain loop makes of it."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.data.order import Permutation
from evener.ddp import Ddp
from evener.managed.builder import DdpBuilder
from evener.managed.epoch_metrics import record_scalar
from helpers.models import mlp, regression_data

SAMPLES, BATCH, SEED = 46, 16, 3

#: Made once: each rank seeds torch's generator, and ranks that are threads share it.
MODEL = mlp(seed=SEED, dtype=torch.float64)


def make_model(device: torch.device) -> nn.Module:
    return copy.deepcopy(MODEL).to(device)


def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = loss_of(model, batch)
    record_scalar("loss", loss)
    record_scalar("first", batch[0][:, 0].mean())
    record_scalar("count", len(batch[0]), "sum")
    record_scalar("newest", batch[0][-1, 0], reduction="last")
    return loss


def data() -> TensorDataset:
    return TensorDataset(*regression_data(SAMPLES, dtype=torch.float64))


def describe_job(**options: Any) -> DdpBuilder:
    """The job with two epochs, unless told otherwise; an option of ``None`` is left out."""
    given: dict[str, Any] = {
        "dataset": data(),
        "batch_size": BATCH,
        "num_epochs": 2,
        "devices": ["cpu"],
        "seed": SEED,
        "quiet": True,
        **options,
    }
    functions = {"model_fn": make_model, "optim_fn": make_optimizer, "train_fn": train_step}
    parts = [given.pop(name, function) for name, function in functions.items()]
    return Ddp.builder(*parts, **{n: v for n, v in given.items() if v is not None})


def train_plainly(steps: int) -> tuple[nn.Module, list[float]]:
    """The reference: one process, one forward over each global batch, no evener.

    Returns the model and the loss of each step.
    """
    model, losses = make_model(torch.device("cpu")), []
    optimizer, dataset = make_optimizer(list(model.parameters())), data()
    per_epoch = -(-SAMPLES // BATCH)
    for step in range(steps):
        epoch, window = divmod(step, per_epoch)
        order = Permutation(SAMPLES, SEED, epoch)
        places = range(window * BATCH, min(SAMPLES, (window + 1) * BATCH))
        loss = loss_of(model, dataset[[order[p] for p in places]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_same(state: dict[str, Tensor], model: nn.Module) -> None:
    """Sums over a batch in another order round differently: 1e-12 of float64's 53 bits."""
    expected = model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-14)
