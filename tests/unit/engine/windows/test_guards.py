"""What people do in a loop out of habit: the same parameters as without, or an error that helps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.errors import ConfigError, EvenerError, UsageError
from helpers.loops import flatten
from helpers.models import mlp
from helpers.teams import run_team, setup

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
    model = mlp(3, 4, 1)
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
        return flatten(model)


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
def test_harmless_habits(name: str, place: str) -> None:
    assert torch.equal(parameters(2, **{place: HARMLESS[name]}), parameters(2))


# ── refused, with the remedy ─────────────────────────────────────────────────────────────────────


def assigned(ddp: Ddp, model: Any, optimizer: Any, x: Tensor) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


def scaled_step(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def clip_with(function: Callable[..., object]) -> Habit:
    return lambda ddp, model, optimizer, x: function(model.parameters(), 1.0)


def own_backward(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).mean().backward()


def own_step(ddp: Ddp, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.step()


def vector(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    ddp.backward(model(x).square())


def detached(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    ddp.backward(model(x).square().mean().detach())


def other_weight(ddp: Ddp, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    ddp.backward(model(x).mean(), weight=len(x) + 1)


@pytest.mark.parametrize(
    ("place", "habit", "remedy"),
    [
        ("between", clip_with(nn.utils.clip_grad_norm_), r"DdpConfig\(max_grad_norm"),
        ("between", clip_with(nn.utils.clip_grad_value_), "register_step_pre_hook"),
        ("before", own_backward, r"ddp.backward\(loss\) for every loss"),
        ("between", own_backward, r"ddp.backward\(loss\) for every loss"),
        ("between", own_step, r"remove it: ddp.step\(\) steps"),
        ("after", own_step, r"remove it: ddp.step\(\) steps"),
        ("between", assigned, "written outside of ddp.backward"),
        ("between", scaled_step, "precision="),
        ("between", other_weight, "one weight"),
        ("after", lambda ddp, *_: ddp.step(), "ddp.backward"),
        ("after", vector, "outside a micro-batch"),
        # As in plain torch.
        ("before", vector, "only for scalar outputs"),
        ("before", detached, "does not require grad"),
    ],
)
def test_habits_that_are_refused(place: str, habit: Habit, remedy: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(RuntimeError if place == "before" else UsageError, match=remedy):
            train(comm, **{place: habit})

    run_team(2, body)


def test_a_missing_step_is_named() -> None:
    model = mlp(3, 4, 1)
    with setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
        batches = iter(ddp.loader(DATA, batch_size=8).epoch(0))
        ddp.backward(model(next(batches)).mean())
        with pytest.raises(UsageError, match=r"ddp.step\(\)"):
            next(batches)


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


def test_a_layer_that_one_rank_alone_unfreezes_is_named() -> None:
    def body(comm: Communicator) -> None:
        model = mlp(3, 4, 1)
        last = model[2].requires_grad_(False)
        with setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
            ddp.on_commit(lambda r: last.requires_grad_(comm.rank == 1 and r.window >= 0) and None)
            for x in ddp.loader(DATA, batch_size=4).epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()

    with pytest.raises(EvenerError, match="2 on rank 0, 4 on rank 1"):
        run_team(2, body)


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
