"""Whatever users do with models and optimizers, a divided update does what the replicated one does.

Ranks are threads; their backend divides the update only where that is asked for.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Ddp
from evener.comm.base import Communicator
from evener.errors import (
    CollectiveError,
    ConfigError,
    ReplicasDifferError,
    UsageError,
)
from helpers.loops import flatten
from helpers.models import mlp, regression_data, seeded
from helpers.teams import run_team, setup

X, Y = (t.double() for t in regression_data(48))
#: Float64: a mean over ranks is rounded otherwise than one over all samples, and 12 updates, which
#: divide by roots of small means, magnify that by some orders.
NEAR = {"rtol": 1e-9, "atol": 1e-12}


class Odd(nn.Module):
    """Parameters of every kind: tied, a number, empty, channels_last, late, rare, in no group."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.outer = nn.Linear(8, 8, bias=False)
        self.outer.weight = self.inner.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.image = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.late = nn.Linear(8, 4).requires_grad_(False)
        self.rare = nn.Linear(8, 4)
        self.extra = nn.Linear(8, 4)
        self.last = nn.Linear(11, 4)

    def forward(self, x: Tensor, *, rarely: bool) -> Tensor:
        features = self.outer(torch.tanh(self.inner(x))) * self.scale + self.empty.sum()
        seen = self.image(x.view(-1, 2, 2, 2)).view(-1, 3)
        result = self.last(torch.cat([features, seen], 1)) + self.late(x) + self.extra(x)
        return result + self.rare(x) if rarely else result


def odd() -> Odd:
    model = seeded(Odd, 0, torch.float64)
    assert isinstance(model, Odd)
    return model


def batches(ddp: Ddp, epoch: int) -> Any:
    return ddp.loader(TensorDataset(X, Y), batch_size=8, shuffle=False).epoch(epoch)


def train_epoch(ddp: Ddp, model: nn.Module, epoch: int = 0) -> None:
    for x, y in batches(ddp, epoch):
        ddp.backward(F.mse_loss(model(x), y))
        ddp.step()


def same_states(mine: Any, theirs: Any, **tolerance: float) -> None:
    """Compare two state_dicts of optimizers; to the bit without a tolerance."""
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    exact = {"rtol": 0, "atol": 0}
    for number, state in mine["state"].items():
        assert list(state) == list(theirs["state"][number])
        for name, value in state.items():
            other = theirs["state"][number][name]
            torch.testing.assert_close(value, other, **(tolerance or exact))
            assert value is None or value.stride() == other.stride()


def train_odd(comm: Communicator, mode: str, *, adagrad: bool) -> tuple[Tensor, Any, list[float]]:
    model = odd()
    held = [
        {"params": [model.inner.weight, model.scale, model.empty], "lr": 0.02},
        {"params": [*model.image.parameters(), *model.late.parameters()], "weight_decay": 0.1},
        {"params": [*model.rare.parameters(), *model.last.parameters()]},
    ]
    kind: Any = torch.optim.Adagrad if adagrad else torch.optim.AdamW
    optimizer = kind(held, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    norms = []
    shares = [4, 3, 1][: comm.world_size]
    options = {"sharded_update": mode, "max_grad_norm": 0.7, "verify_every": 1}
    with setup(comm, model, optimizer, scheduler, shares=shares, **options) as ddp:
        for epoch in range(3):
            if epoch == 1:
                model.late.requires_grad_(True)
            if epoch == 2 and not adagrad:  # which makes its state when it is made
                optimizer.add_param_group({"params": [*model.extra.parameters()], "lr": 0.003})
            if epoch == 2:
                model.image.to(memory_format=torch.contiguous_format)
            for x, y in batches(ddp, epoch):
                ddp.backward(F.mse_loss(model(x, rarely=ddp.window % 3 == 0), y))
                if result := ddp.step():
                    norms.append(result.grad_norm)
    return flatten(model), optimizer.state_dict(), norms


@pytest.mark.parametrize(("world_size", "adagrad"), [(2, True), (3, False)])
def test_parameters_of_every_kind(world_size: int, adagrad: bool) -> None:
    def body(mode: str) -> Callable[[Communicator], Any]:
        return lambda comm: train_odd(comm, mode, adagrad=adagrad)

    ((alone, _, _),) = run_team(1, body("on"))
    (replicated, state, norms), *_ = run_team(world_size, body("off"))
    ranks = run_team(world_size, body("on"))
    for own, own_state, own_norms in ranks:
        torch.testing.assert_close(own, replicated, **NEAR)
        torch.testing.assert_close(own, alone, **NEAR)
        assert torch.equal(own, ranks[0][0])
        assert own_norms == pytest.approx(norms, rel=1e-9)
        for number, one in own_state["state"].items():
            assert list(one) == list(state["state"][number])
            for name, value in one.items():
                torch.testing.assert_close(value, state["state"][number][name], **NEAR)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", MAKERS)
def test_it_equals_one_process_and_the_replicated_update(name: str) -> None:
    def body(comm: Communicator, mode: str) -> tuple[Tensor, Any, Any]:
        """Two epochs; weights, and the optimizer's state in the team and after it."""
        model = mlp(dtype=torch.float64)
        optimizer = MAKERS[name](model.parameters())
        shares = [4, 3, 1][: comm.world_size]
        options = {"sharded_update": mode, "max_grad_norm": 0.5}
        with setup(comm, model, optimizer, shares=shares, **options) as ddp:
            train_epoch(ddp, model)
            train_epoch(ddp, model, 1)
            inside = optimizer.state_dict()
        return flatten(model), inside, optimizer.state_dict()

    ((alone, _, _),) = run_team(1, lambda comm: body(comm, "on"))
    replicated, *_ = run_team(3, lambda comm: body(comm, "off"))
    ranks = run_team(3, lambda comm: body(comm, "on"))
    for parameters, inside, after in ranks:
        torch.testing.assert_close(parameters, replicated[0], **NEAR)
        if name != "rprop":  # which follows signs alone
            torch.testing.assert_close(parameters, alone, **NEAR)
        same_states(inside, replicated[1], **NEAR)
        same_states(after, replicated[1], **NEAR)
        assert torch.equal(parameters, ranks[0][0]), "the same bits on all ranks"


def save_and_load(
    comm: Communicator, mode: str, load: Path | None, save: Path | None
) -> tuple[Any, Tensor, Any, Tensor]:
    """States and weights as they were loaded, and after two more epochs, which are saved."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with setup(comm, model, optimizer, sharded_update=mode) as ddp:
        loader = ddp.loader(TensorDataset(X, Y), batch_size=8)
        if load is not None:
            ddp.load(load)
        loaded = copy.deepcopy(optimizer.state_dict()), flatten(model).clone()
        for epoch in range(4 if load is not None else 2):
            for x, y in loader.epoch(epoch):
                ddp.backward(F.mse_loss(model(x), y))
                ddp.step()
        if save is not None:
            ddp.save(save)
        return *loaded, optimizer.state_dict(), flatten(model)


@pytest.mark.parametrize("writers", [(2, "on"), (3, "off")])
def test_a_checkpoint_does_not_depend_on_the_division(
    writers: tuple[int, str], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    world_size, mode = writers
    _, _, state, saved = run_team(world_size, lambda comm: save_and_load(comm, mode, None, path))[0]
    reference = run_team(1, lambda comm: save_and_load(comm, "off", path, None))[0]
    for readers in [(1, "on"), (3, "on")]:
        for loaded, own, after, trained in run_team(
            readers[0], lambda comm, how=readers[1]: save_and_load(comm, how, path, None)
        ):
            assert torch.equal(own, saved)
            same_states(loaded, state)
            torch.testing.assert_close(trained, reference[3], **NEAR)
            same_states(after, reference[2], **NEAR)


def test_a_state_that_the_user_loads_is_divided() -> None:
    def body(comm: Communicator, mode: str) -> tuple[Any, Any, Tensor]:
        source = mlp(dtype=torch.float64, seed=3)
        earlier = torch.optim.AdamW(source.parameters(), lr=0.05)
        F.mse_loss(source(X), Y).backward()
        earlier.step()
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.load_state_dict(copy.deepcopy(earlier.state_dict()))
        with setup(comm, model, optimizer, shares=[1] * comm.world_size, sharded_update=mode) as d:
            first = copy.deepcopy(optimizer.state_dict())
            train_epoch(d, model, 0)
            optimizer.load_state_dict(copy.deepcopy(earlier.state_dict()))
            train_epoch(d, model, 1)
            optimizer.state = defaultdict(dict)
            second = optimizer.state_dict()
        return first, second, flatten(model)

    for rank in range(3):
        off, on = (run_team(3, lambda comm, m=mode: body(comm, m))[rank] for mode in ("off", "on"))
        same_states(on[0], off[0])
        same_states(on[1], off[1])
        assert not on[1]["state"], "a state that is dropped is dropped"
        torch.testing.assert_close(on[2], off[2], **NEAR)


def test_reading_a_divided_state_says_what_to_do() -> None:
    def body(comm: Communicator) -> None:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        weight = model.get_parameter("0.weight")
        reads: list[Callable[[], object]] = [
            lambda: optimizer.state[weight],
            lambda: optimizer.state.get(weight),
            lambda: weight in optimizer.state,
            lambda: list(optimizer.state.items()),
            lambda: len(optimizer.state),
            lambda: copy.deepcopy(optimizer),
            lambda: optimizer.state.clear(),
        ]
        with setup(comm, model, optimizer, sharded_update="on"):
            for read in reads:
                with pytest.raises(UsageError, match=r"state_dict\(\) on all ranks.*ddp\.save"):
                    read()

    run_team(2, body)


def test_state_dict_on_one_rank_is_an_error_that_names_the_remedy() -> None:
    """The others evaluate, train on, or leave."""

    def body(comm: Communicator, otherwise: str) -> str:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters())
        try:
            with setup(comm, model, optimizer, shares=[1, 1], sharded_update="on") as ddp:
                if otherwise == "trains" and comm.rank == 1:
                    train_epoch(ddp, model)
                train_epoch(ddp, model) if otherwise != "trains" else None
                if comm.rank == 0:
                    optimizer.state_dict()
                elif otherwise == "evaluates":
                    ddp.weighted_mean(1.0)
        except CollectiveError as error:
            return "".join(getattr(error, "__notes__", ()))
        return ""

    for otherwise in ("evaluates", "trains", "leaves"):
        found, _ = run_team(2, lambda comm, o=otherwise: body(comm, o))
        assert "optimizer.state_dict() was called" in found
        assert "ddp.save" in found


# ── hooks, and optimizers that cannot be divided ─────────────────────────────────────────────────


def test_a_hook_on_the_step_sees_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on one rank, and comes in mid-training; where ``on`` was asked for, it is an error."""
    monkeypatch.setattr("evener.loop.assembly.FAST_BACKENDS", {"threads"})
    monkeypatch.setattr("evener.loop.assembly.LEAST_DIVIDED", 1)

    def body(comm: Communicator, mode: str) -> tuple[list[Tensor], Tensor, Any]:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen: list[Tensor] = []

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            (group,) = optimizer.param_groups
            assert all(map(torch.is_same_size, group["params"], model.parameters()))
            seen.append(torch.cat([p.grad.flatten() for p in group["params"]]))

        with setup(comm, model, optimizer, shares=[3, 1], sharded_update=mode) as ddp:
            sharded = ddp.assembly.state.sharded
            for x, y in batches(ddp, 0):
                if ddp.window == 2 and comm.rank == 1:
                    assert sharded.is_on == (mode != "off")
                    optimizer.register_step_pre_hook(look)
                ddp.backward(F.mse_loss(model(x), y))
                ddp.step()
            assert not sharded.is_on
        return seen, flatten(model), optimizer.state_dict()

    replicated, divided = (run_team(2, lambda comm, m=m: body(comm, m)) for m in ("off", "auto"))
    for (seen, own, state), (_, theirs, other) in zip(divided, replicated, strict=True):
        torch.testing.assert_close(own, theirs, **NEAR)
        same_states(state, other, **NEAR)
        torch.testing.assert_close(seen, replicated[len(seen) > 0][0], **NEAR)
    assert [len(seen) for seen, _, _ in divided] == [0, 4]


class Own(torch.optim.SGD):
    """Steps by a rule that evener does not know."""


def test_optimizers_that_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.loop.assembly.FAST_BACKENDS", {"threads"})
    monkeypatch.setattr("evener.loop.assembly.LEAST_DIVIDED", 1)

    def body(comm: Communicator, mode: str, kind: str) -> bool:
        model = mlp(dtype=torch.float64)
        kinds: dict[str, Any] = {
            "subclass": lambda p: Own(p, lr=0.1),
            "on one rank": lambda p: (Own if comm.rank else torch.optim.SGD)(p, lr=0.1),
            "adafactor": lambda p: torch.optim.Adafactor(p),
        }
        Own.__name__ = "SGD" if kind == "on one rank" else "Own"
        optimizer = kinds[kind](model.parameters())
        with setup(comm, model, optimizer, shares=[1, 1], sharded_update=mode) as ddp:
            train_epoch(ddp, model)
            return ddp.assembly.state.sharded.is_on

    for kind in ("subclass", "on one rank", "adafactor"):
        assert run_team(2, lambda comm, k=kind: body(comm, "auto", k)) == [False, False]
        said = r"sharded_update is 'on', but optimizer 0 is .*, and a part of a parameter"
        with pytest.raises(ConfigError, match=said):
            run_team(2, lambda comm, k=kind: body(comm, "on", k))


@pytest.mark.parametrize("missing", [0, 1])
def test_the_update_of_a_small_model_is_divided_on_request_alone(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that are not trained do not count."""
    monkeypatch.setattr("evener.loop.assembly.FAST_BACKENDS", {"threads"})
    trained = 8 * 16 + 16  # of the first layer
    monkeypatch.setattr("evener.loop.assembly.LEAST_DIVIDED", trained + missing)

    def body(comm: Communicator, mode: str) -> bool:
        model = mlp()
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with setup(comm, model, optimizer, shares=[1, 1], sharded_update=mode) as ddp:
            return ddp.assembly.state.sharded.is_on

    assert run_team(2, lambda comm: body(comm, "auto")) == [not missing] * 2
    assert run_team(2, lambda comm: body(comm, "on")) == [True] * 2


@pytest.mark.parametrize("way", ["replicated", "owner's bits", "divided"])
def test_an_optimizer_that_errs_on_one_rank(way: str) -> None:
    """Replicas drift apart, unless every parameter has one owner."""

    def body(comm: Communicator) -> Tensor:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mode = "on" if way == "divided" else "off"
        options = {"sharded_update": mode, "verify_every": 1}
        with setup(comm, model, optimizer, shares=[1, 1], **options) as ddp:
            if way == "owner's bits":
                ddp.assembly.engine.options.unlike_devices = True
            if comm.rank == 1:
                optimizer.param_groups[0]["eps"] = 1e-4
            train_epoch(ddp, model)
        return flatten(model)

    if way == "replicated":
        with pytest.raises(ReplicasDifferError, match="of rank 1 is not that of rank 0"):
            run_team(2, body)
    else:
        first, second = run_team(2, body)
        assert torch.equal(first, second)
