"""What users do with the model and the optimizer between steps leaves a divided update right."""

import copy
import functools
import types
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Ddp
from evener.comm.base import Communicator
from helpers.models import regression_data, seeded
from helpers.teams import run_team, setup

X, Y = (t.double() for t in regression_data(48))
#: See ``test_same_update``.
NEAR = {"rtol": 1e-9, "atol": 1e-12}


def images() -> nn.Sequential:
    """A model with a parameter that memory formats lay out otherwise."""

    def make() -> nn.Module:
        unflatten = nn.Unflatten(1, (2, 2, 2))
        return nn.Sequential(unflatten, nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 4))

    model = seeded(make, 0, torch.float64)
    assert isinstance(model, nn.Sequential)
    return model


def train(ddp: Ddp, model: nn.Module, epoch: int = 0) -> None:
    for x, y in ddp.loader(TensorDataset(X, Y), batch_size=8, shuffle=False).epoch(epoch):
        ddp.backward(F.mse_loss(model(x), y))
        ddp.step()


def moments(state: dict[str, Any]) -> list[Tensor]:
    return [one["exp_avg"] for one in state["state"].values()]


@pytest.mark.parametrize("loads", [False, True])
def test_another_memory_format_leaves_states_in_order(loads: bool) -> None:
    """The state is read, or given, before the step after which parameters lie as before."""

    def body(comm: Communicator, mode: str) -> tuple[list[Tensor], list[Tensor]]:
        model = images()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, shares=[3, 1], sharded_update=mode) as ddp:
            train(ddp, model)
            before = copy.deepcopy(optimizer.state_dict())
            model.to(memory_format=torch.channels_last)
            if loads:
                optimizer.load_state_dict(before)
            for mine, theirs in zip(moments(optimizer.state_dict()), moments(before), strict=True):
                assert torch.equal(mine, theirs)
            train(ddp, model, 1)
        return [p.detach() for p in model.parameters()], moments(optimizer.state_dict())

    replicated, *_ = run_team(2, lambda comm: body(comm, "off"))
    for found in run_team(2, lambda comm: body(comm, "on")):
        torch.testing.assert_close(found, replicated, **NEAR)


def test_a_model_may_be_converted_before_the_end() -> None:
    def body(comm: Communicator) -> bool:
        model = images()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, shares=[3, 1], sharded_update="on") as ddp:
            train(ddp, model)
            if comm.rank == 0:
                model.float()
        return len(moments(optimizer.state_dict())) == len(list(model.parameters()))

    assert run_team(2, body) == [True, True]


@pytest.mark.parametrize("schedules", ["never", "before", "after"])
def test_a_step_of_the_users_sees_all_gradients(
    schedules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is wrapped on the instance, around the scheduler's wrapper or inside of it."""
    monkeypatch.setattr("evener.loop.assembly.FAST_BACKENDS", {"threads"})
    monkeypatch.setattr("evener.loop.assembly.LEAST_DIVIDED", 1)

    def body(comm: Communicator, mode: str, *, wraps: bool) -> tuple[list[Tensor], bool]:
        model = images()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if schedules == "before":
            torch.optim.lr_scheduler.StepLR(optimizer, 2)
        plain, seen = optimizer.step, []

        @functools.wraps(plain)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(all(p.grad.shape == p.shape for p in model.parameters()))
            result = plain(*args, **kwargs)
            optimizer.zero_grad()
            return result

        if wraps:
            vars(optimizer)["step"] = types.MethodType(step, optimizer)
        if schedules == "after":
            torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with setup(comm, model, optimizer, shares=[3, 1], sharded_update=mode) as ddp:
            train(ddp, model)
            is_on = ddp.assembly.state.sharded.is_on
        assert seen == [True] * (6 if wraps else 0)
        return [p.detach() for p in model.parameters()], is_on

    replicated = run_team(2, lambda comm: body(comm, "off", wraps=False))[0][0]
    for wraps in (False, True):
        for found, is_on in run_team(2, lambda comm, w=wraps: body(comm, "auto", wraps=w)):
            assert is_on != wraps
            torch.testing.assert_close(found, replicated, **NEAR)


def test_pieces_get_their_gradients_anew_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drops them in a step, as a subclass or a patched class may."""

    def body(comm: Communicator, mode: str) -> list[Tensor]:
        model = images()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with setup(comm, model, optimizer, shares=[3, 1], sharded_update=mode) as ddp:
            train(ddp, model)
        return [p.detach() for p in model.parameters()]

    replicated, *_ = run_team(2, lambda comm: body(comm, "off"))
    plain = torch.optim.SGD.step

    def step(self: torch.optim.SGD, *args: Any) -> Any:
        result = plain(self, *args)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return result

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    for found in run_team(2, lambda comm: body(comm, "on")):
        torch.testing.assert_close(found, replicated, **NEAR)


def test_a_state_that_cannot_be_divided_leaves_optimizers_with_their_parameters() -> None:
    """The first of two would hold pieces already when the second one's state is refused."""

    def body(comm: Communicator) -> bool:
        model = images()
        layers = model[1], model[3]
        first, second = (torch.optim.Adam(layer.parameters(), lr=0.01) for layer in layers)
        ddp = setup(comm, model, [first, second], shares=[3, 1], sharded_update="on")
        with suppress(RuntimeError), ddp:
            train(ddp, model)
            wrong = {"step": torch.tensor(1.0), "exp_avg": torch.ones(5), "exp_avg_sq": None}
            second.state = defaultdict(dict, {p: dict(wrong) for p in layers[1].parameters()})
            train(ddp, model, 1)
            raise AssertionError("a state of another size was taken")
        held = [one.param_groups[0]["params"] for one in (first, second)]
        return all(
            one is other
            for own, layer in zip(held, layers, strict=True)
            for one, other in zip(own, layer.parameters(), strict=True)
        )

    assert run_team(2, body) == [True, True]


def test_the_loop_saves_after_the_window_at_whose_commit_a_function_saves(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        model = images()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, shares=[3, 1], sharded_update="on") as ddp:
            ddp.on_commit(lambda result: ddp.save(tmp_path / f"committed-{result.window}"))
            loader = ddp.loader(TensorDataset(X, Y), batch_size=8, shuffle=False)
            for x, y in loader.epoch(0):
                ddp.backward(F.mse_loss(model(x), y))
                if (result := ddp.step()) and result.window == 2:
                    ddp.save(tmp_path / "by the loop")

    run_team(2, body)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == ["by the loop", *(f"committed-{window}" for window in range(6))]
