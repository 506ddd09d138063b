"""What people do in a loop out of habit: the same parameters as without, or an error that helps."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.errors import ConfigError, UsageError
from helpers.teams import run_team, setup

LOCK = threading.Lock()
DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))

Habit = Callable[[Ddp, nn.Module, torch.optim.Optimizer, Tensor], None]


def nothing(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    pass


def train(
    comm: Communicator,
    *,
    before: Habit = nothing,
    between: Habit = nothing,
    after: Habit = nothing,
    scheduler: Any = None,
    shares: Any = (2, 1, 1),
    **options: Any,
) -> Tensor:
    """Three windows of two to four micro-batches, a habit at three places of the loop's body."""
    with LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    made = scheduler(optimizer) if scheduler else None
    with setup(comm, model, optimizer, made, shares=shares[: comm.world_size], **options) as ddp:
        loader = ddp.loader(DATA, batch_size=8, micro_batch_size=2)
        for x in loader.epoch(0):
            before(ddp, model, optimizer, x)
            ddp.backward(model(x).square().mean())
            between(ddp, model, optimizer, x)
            ddp.step()
            after(ddp, model, optimizer, x)
        return torch.cat([p.detach().flatten() for p in model.parameters()])


def parameters(world_size: int, **habit: Any) -> Tensor:
    return run_team(world_size, lambda comm: train(comm, **habit))[0]


# ── harmless ─────────────────────────────────────────────────────────────────────────────────────


def zero_grad_of_optimizer(*, set_to_none: bool) -> Habit:
    return lambda ddp, model, optimizer, x: optimizer.zero_grad(set_to_none=set_to_none)


def eval_and_back(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


HARMLESS: dict[str, Habit] = {
    "optimizer.zero_grad()": zero_grad_of_optimizer(set_to_none=True),
    "optimizer.zero_grad(set_to_none=False)": zero_grad_of_optimizer(set_to_none=False),
    "model.zero_grad()": lambda ddp, model, optimizer, x: model.zero_grad(),
    ".item() every step": lambda ddp, model, optimizer, x: float(model(x).detach().mean().item()),
    "evaluation without gradients": eval_and_back,
}


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("world_size", [2])
def test_harmless_habits(world_size: int, name: str, place: str) -> None:
    with_it = parameters(world_size, **{place: HARMLESS[name]})
    assert torch.equal(with_it, parameters(world_size))


# ── refused, with the remedy ─────────────────────────────────────────────────────────────────────


def clip_norm(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_value(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def own_backward(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).mean().backward()


def own_step(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.step()


def assigned(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


def scaled_step(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    ("place", "habit", "remedy"),
    [
        ("between", clip_norm, r"DdpConfig\(max_grad_norm"),
        ("between", clip_value, "register_step_pre_hook"),
        ("before", own_backward, r"ddp.backward\(loss\) for every loss"),
        ("between", own_backward, r"ddp.backward\(loss\) for every loss"),
        ("between", own_step, r"remove it: ddp.step\(\) steps"),
        ("after", own_step, r"remove it: ddp.step\(\) steps"),
        ("between", assigned, "written outside of ddp.backward"),
        ("between", scaled_step, "precision="),
        ("between", zero_grad_of_optimizer(set_to_none=False), ""),
    ],
)
def test_habits_that_would_act_on_unfinished_sums(
    world_size: int, place: str, habit: Habit, remedy: str
) -> None:
    if not remedy:
        assert torch.isfinite(parameters(world_size, **{place: habit})).all()
        return

    def body(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=remedy):
            train(comm, **{place: habit})

    run_team(world_size, body)


def test_a_scheduler_given_to_setup_and_stepped_by_hand() -> None:
    schedulers: list[Any] = []

    def make(optimizer: torch.optim.Optimizer) -> Any:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 10))
        return schedulers[-1]

    with pytest.raises(UsageError, match=r"StepLR.step\(\) was called in the loop"):
        train(
            Communicator(),
            scheduler=make,
            after=lambda ddp, model, optimizer, x: ddp.window and schedulers[0].step(),
        )


def test_a_scheduler_stepped_for_every_local_batch() -> None:
    def body(comm: Communicator) -> None:
        def decay(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9

        with pytest.raises(UsageError, match=r"learning rates differ.*scheduler to Ddp.setup"):
            train(comm, shares=(6, 2), after=decay)

    run_team(2, body)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: nn.Sequential(nn.DataParallel(m))])
def test_a_model_that_is_wrapped_already(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(nn.Linear(3, 1))
    with pytest.raises(
        ConfigError, match=r"DataParallel would average .* a second time; .*plain module"
    ):
        setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_was_moved_or_converted_after_setup() -> None:
    model = nn.Linear(3, 1)
    with setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
        model.double()
        with pytest.raises(UsageError, match=r"convert the model before Ddp.setup"):
            list(ddp.loader(DATA.double(), batch_size=8).epoch(0))


def test_an_optimizer_of_another_model() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=r"not the model's"):
        setup(Communicator(), model, torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_scheduler_that_follows_a_metric() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match=r"leave it out of Ddp.setup"):
        setup(Communicator(), model, optimizer, plateau)
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with pytest.raises(ConfigError, match=r"belongs to an optimizer"):
        setup(Communicator(), model, optimizer, other)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_has_no_gradient_ends_as_in_plain_torch(world_size: int) -> None:
    def vector(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        ddp.backward(model(x).square())

    def detached(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        ddp.backward(model(x).square().mean().detach())

    with pytest.raises(RuntimeError, match=r"only for scalar outputs"):
        parameters(world_size, before=vector, shares=(1,) * world_size)
    with pytest.raises(RuntimeError, match=r"does not require grad"):
        parameters(world_size, before=detached, shares=(1,) * world_size)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_parameters_that_were_replaced_after_the_set_up_are_named(policy: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with setup(Communicator(), model, optimizer, policy=policy) as ddp:
        loader = ddp.loader(DATA, batch_size=8)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        for x in loader.epoch(0):
            ddp.backward(model(x).square().mean())
            ddp.step()
        model.load_state_dict(state, assign=True)
        with pytest.raises(UsageError, match=r"'bias' was replaced .*assign=True"):
            next(iter(loader))
