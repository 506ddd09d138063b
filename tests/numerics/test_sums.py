"""``reduction="sum"``: the gradient of one plain process's sum over the whole global batch.

All in float64, where a sum in another order moves the last of 53 bits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.ddp import Ddp
from evener.errors import UsageError
from helpers.models import seeded
from helpers.teams import run_team, setup

SAMPLES, BATCH, EPOCHS = 46, 16, 2
IMAGES = torch.rand(SAMPLES, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TIGHT, DOUBLE = 1e-12, torch.float64


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = torch.tanh(self.encoder(x)).chunk(2, 1)
        return torch.sigmoid(self.decoder(mean)), mean, log_variance


def reconstruction(model: nn.Module, x: Tensor) -> Tensor:
    return F.binary_cross_entropy(model(x)[0], x, reduction="sum")


def divergence(model: nn.Module, x: Tensor) -> Tensor:
    _, mean, log_variance = model(x)
    return -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def network() -> nn.Module:
    return seeded(Autoencoder, 0, DOUBLE)


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_plainly(max_grad_norm: float | None = None) -> tuple[Tensor, list[float], list[float]]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    norms, losses = [], []
    for epoch in range(EPOCHS):
        order = Permutation(SAMPLES, 0, epoch)
        for start in range(0, SAMPLES, BATCH):
            x = IMAGES[[order[p] for p in range(start, min(start + BATCH, SAMPLES))]]
            optimizer.zero_grad()
            loss = reconstruction(model, x) + divergence(model, x)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or 1e9)))
            losses.append(float(loss.detach()) / len(x))
            optimizer.step()
    return flatten(model), norms, losses


def train_in_team(comm: Communicator, shares: Any, calls: int = 1, **options: Any) -> Any:
    model = network()
    weights = options.pop("weights", None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    norms, losses = [], []
    with setup(comm, model, optimizer, shares=shares, **options) as ddp:
        loader = ddp.loader(IMAGES, batch_size=BATCH, micro_batch_size=4)
        ddp.on_commit(lambda result: norms.append(result.grad_norm))
        ddp.on_commit(lambda result: losses.append(result.loss))
        for epoch in range(EPOCHS):
            for x in loader.epoch(epoch):
                weight = None if weights is None else weights * len(x)
                terms = [reconstruction(model, x), divergence(model, x)]
                for loss in terms if calls == 2 else [terms[0] + terms[1]]:
                    ddp.backward(loss, weight, reduction="sum")
                ddp.step()
    return flatten(model), norms, losses


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize(
    ("world_size", "shares", "options"),
    [
        pytest.param(1, (1,), {}, id="1 rank"),
        pytest.param(2, (3, 1), {}, id="2 ranks"),
        pytest.param(3, (4, 0, 1), {}, id="a rank without a share"),
        pytest.param(3, (5, 2, 1), {"calls": 2}, id="two calls a micro-batch"),
        pytest.param(3, (5, 2, 1), {"max_grad_norm": 0.5}, id="clipped"),
        pytest.param(2, (3, 1), {"weights": 7}, id="weighted"),
        pytest.param(1, None, {"policy": "cadence"}, id="cadence"),
        pytest.param(1, None, {"policy": "async"}, id="async"),
    ],
)
def test_a_team_takes_the_steps_of_one_process(world_size: int, shares: Any, options: Any) -> None:
    expected, norms, losses = train_plainly(options.get("max_grad_norm"))
    for ours, own_norms, own_losses in run_team(
        world_size, lambda comm: train_in_team(comm, shares, **options)
    ):
        assert relative(ours, expected) <= TIGHT
        if "policy" not in options:  # a window is one step
            assert own_norms == pytest.approx(norms, rel=TIGHT)
            units = options.get("weights", 1)  # the loss that is reported is a mean over them
            assert own_losses == pytest.approx([loss / units for loss in losses], rel=TIGHT)


@pytest.mark.parametrize("how", ["stream", "no loader"])
def test_without_a_plan_the_ranks_gradients_add_up(how: str) -> None:
    parts = IMAGES[:7], IMAGES[7:12], IMAGES[12:24]

    class Own(IterableDataset[Tensor]):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[Tensor]:
            yield from parts[self.rank]

    def body(comm: Communicator) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with setup(comm, model, optimizer) as ddp:
            own = parts[ddp.rank]
            batches: Any = [own]
            if how == "stream":
                loader = ddp.loader(Own(ddp.rank), batch_size=3 * len(own))
                batches = loader.epoch(0)
            for x in batches:
                ddp.backward(reconstruction(model, x), reduction="sum")
                ddp.step()
        return flatten(model)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    reconstruction(model, IMAGES[:24]).backward()
    optimizer.step()
    for ours in run_team(3, body):
        assert relative(ours, flatten(model)) <= TIGHT


def test_optimizers_in_turns_have_reductions_of_their_own() -> None:
    def losses(a: nn.Module, b: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return a(x).square().sum(), b(x).square().mean()

    def make() -> tuple[Any, Any]:
        models = [seeded(lambda: nn.Linear(6, 1), seed, DOUBLE) for seed in (0, 1)]
        return models, [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]

    def body(comm: Communicator) -> list[Tensor]:
        models, optimizers = make()
        with setup(comm, models, optimizers, shares=(3, 1)) as ddp:
            for x in ddp.loader(IMAGES, batch_size=SAMPLES).epoch(0):
                summed, mean = losses(*models, x)
                ddp.backward(summed, optimizer=optimizers[0], reduction="sum")
                ddp.step(optimizers[0])
                ddp.backward(mean, optimizer=optimizers[1])
                ddp.step(optimizers[1])
        return [flatten(model) for model in models]

    models, optimizers = make()
    for loss, optimizer in zip(losses(*models, IMAGES), optimizers, strict=True):
        loss.backward()
        optimizer.step()
    for ours in run_team(2, body):
        for one, model in zip(ours, models, strict=True):
            assert relative(one, flatten(model)) <= TIGHT


def test_a_managed_run_sums_too() -> None:
    handle = Ddp.builder(
        lambda device: network(),
        lambda params: torch.optim.Adam(params, lr=1e-2),
        lambda model, x: reconstruction(model, x) + divergence(model, x),
        dataset=IMAGES,
        batch_size=BATCH,
        micro_batch_size=4,
        num_epochs=EPOCHS,
        devices="cpu",
        quiet=True,
        reduction="sum",
    ).run()
    expected = train_plainly()[0]
    trained = torch.cat([value.flatten() for value in handle.join().params.values()])
    assert relative(trained, expected) <= TIGHT


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


def test_reductions_that_cannot_be_meant_are_refused() -> None:
    def train(reductions: Callable[[int], Any]) -> Callable[[Communicator], None]:
        def body(comm: Communicator) -> None:
            model = network()
            with setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
                for x in ddp.loader(IMAGES, batch_size=BATCH).epoch(0):
                    for reduction in reductions(ddp.rank):
                        ddp.backward(model(x)[0].mean(), reduction=reduction)
                    ddp.step()

        return body

    with pytest.raises(UsageError, match=r"reduction is 'max'; give 'sum'"):
        train(lambda rank: ["max"])(Communicator())
    with pytest.raises(UsageError, match=r"reduction='sum' and without it in one window"):
        train(lambda rank: ["sum", "mean"])(Communicator())
    with pytest.raises(UsageError, match=r"mean on rank 0, sum on rank 1"):
        run_team(2, train(lambda rank: [["mean"], ["sum"]][rank]))


def look_at(
    loss: Callable[[nn.Module, Tensor], Tensor],
    world_size: int = 1,
    shares: Any = None,
    **given: Any,
) -> None:
    """Trains on a loss for three windows of eight samples or more."""

    def body(comm: Communicator) -> None:
        model = seeded(
            lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), 0, DOUBLE
        )
        with setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.0), shares=shares) as ddp:
            batch_size = 15 if world_size > 1 else 8
            loader = ddp.loader(
                IMAGES, batch_size=batch_size, micro_batch_size="share", max_steps=3
            )
            for x in loader.epoch(0):
                ddp.backward(loss(model, x), **given)
                ddp.step()

    run_team(world_size, body)


Capture = pytest.CaptureFixture[str]


def warnings(capsys: Capture) -> list[str]:
    said = capsys.readouterr().err.splitlines()
    return [line for line in said if line.startswith("warning: ")]


def labels(x: Tensor) -> Tensor:
    return x.argmax(1)


def mask(x: Tensor) -> Tensor:
    return (x > 0.3).double()


def error(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def normalised(x: Tensor) -> Tensor:
    return x[:, 0] / x[:, 0].sum()


SUMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "cross_entropy": lambda m, x: F.cross_entropy(m(x), labels(x), reduction="sum"),
    "mse_loss": lambda m, x: F.mse_loss(m(x), x, reduction="sum"),
    "sum()": lambda m, x: error(m, x).sum(),
    "tokens": lambda m, x: F.cross_entropy(
        m(x).view(len(x), 2, 3).flatten(0, 1), x.view(-1, 3).argmax(1), reduction="sum"
    ),
    "in a mean": lambda m, x: F.mse_loss(m(x), x) + 2 * error(m, x).sum(),
    "VAE": lambda m, x: (
        F.binary_cross_entropy(m(x).sigmoid(), x, reduction="sum")
        - 0.5 * torch.sum(1 + m(x) - m(x).pow(2) - m(x).exp())
    ),
}

MEANS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "cross_entropy": lambda m, x: F.cross_entropy(m(x), labels(x)),
    "class weights": lambda m, x: F.cross_entropy(m(x), labels(x), weight=torch.rand(6).double()),
    "mse_loss": lambda m, x: F.mse_loss(m(x), x),
    "mean(0).sum()": lambda m, x: error(m, x).mean(0).sum(),
    "sum / samples": lambda m, x: error(m, x).sum() / len(x),
    "sum * 1/samples": lambda m, x: error(m, x).sum() * (1 / len(x)),
    "masked": lambda m, x: (error(m, x) * mask(x)).sum() / mask(x).sum(),
    "ignored labels": lambda m, x: (
        F.cross_entropy(m(x), labels(x), ignore_index=0, reduction="sum")
        / max(int((labels(x) != 0).sum()), 1)
    ),
    "normalised weights": lambda m, x: (error(m, x).mean(1) * normalised(x)).sum(),
    "a regulariser": lambda m, x: (
        error(m, x).mean() + 1e-3 * sum(p.square().sum() for p in m.parameters())
    ),
    "a function of one's own": lambda m, x: Doubled.apply(error(m, x)).sum() / len(x),
    "orthogonal layers": lambda m, x: error(m, x).mean() + (m[0].weight @ m[0].weight.T).sum(),
    "batchmean": lambda m, x: F.kl_div(m(x).log_softmax(1), x.softmax(1), reduction="batchmean"),
    "REINFORCE": lambda m, x: -(m(x).log_softmax(1)[:, 0] * x[:, 1]).mean(),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_is_a_sum_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"is a sum over the 8 samples.*reduction='sum'"):
        look_at(SUMS[name])
    look_at(SUMS[name], reduction="sum")
    look_at(SUMS[name], reduction="mean")  # the user says so


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_is_a_mean_is_left_alone(name: str, capsys: Capture) -> None:
    look_at(MEANS[name])
    look_at(MEANS[name], 2, (4, 1))
    assert warnings(capsys) == []


def test_a_loss_that_is_not_a_scalar_has_the_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="scalar outputs"):
        look_at(lambda m, x: m(x) * torch.ones(6, dtype=DOUBLE))


def test_a_loss_that_a_grad_scaler_has_scaled_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match=r"65536 times too large.*Remove the GradScaler"):
        look_at(lambda m, x: scaler.scale(error(m, x).mean()))
    with pytest.raises(UsageError, match=r"65536 times too large"):
        look_at(lambda m, x: scaler.scale(error(m, x).mean()), 2, reduction="sum")
    off = torch.amp.GradScaler("cpu", enabled=False)
    look_at(lambda m, x: off.scale(error(m, x).mean()) * 3)
