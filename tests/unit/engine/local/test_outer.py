"""The outer optimizer: its steps, and its state as a part of what ranks agree on."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import ConfigError, Ddp, DdpConfig
from evener.averaging.outer import Averaged, OuterSGD, OuterStep, outer_lr
from evener.comm.base import Communicator
from evener.data.order import Permutation
from helpers.clocks import RankClocks
from helpers.elastic import ElasticThreads, ThreadMembership
from helpers.limits import PATIENCE_S
from helpers.loops import flatten
from helpers.models import mlp, regression_data
from helpers.teams import run_team, setup

#: A window is one step of each rank.
LOCKSTEP: dict[str, Any] = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 0}
LR, OUTER_LR, MOMENTUM, SIZE, BATCH = 0.05, 0.8, 0.6, 48, 4
X, Y = regression_data(SIZE, dtype=torch.float64)
DATA = torch.utils.data.TensorDataset(X, Y)


def train(comm: Communicator, folder: Path | None = None, epochs: int = 2, **outer: Any) -> Tensor:
    """Train, saving after the first epoch; or resume there."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with setup(comm, model, optimizer, policy="cadence", **LOCKSTEP, **outer) as ddp:
        loader = ddp.loader(DATA, batch_size=BATCH)
        resumes = folder is not None and folder.exists()
        if resumes:
            ddp.load(folder)
        for epoch in range(int(resumes), epochs):
            for inputs, targets in loader.epoch(epoch):
                ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                ddp.step()
            if folder is not None and not resumes:
                ddp.save(folder)
    return flatten(model)


def in_one_process(*batch_sizes: int) -> Tensor:
    """SGD with momentum, an epoch with each size: the same, if a window is a step of each rank."""
    model = mlp(dtype=torch.float64)
    how = {"lr": LR * OUTER_LR, "momentum": MOMENTUM, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), **how)
    for epoch, batch_size in enumerate(batch_sizes):
        order = Permutation(SIZE, seed=0, epoch=epoch)
        for start in range(0, SIZE, batch_size):
            ids = [order[position] for position in range(start, start + batch_size)]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(X[ids]), Y[ids]).backward()
            optimizer.step()
    return flatten(model)


NESTEROV = {"outer": "nesterov", "outer_lr": OUTER_LR, "outer_momentum": MOMENTUM}
FACTORY = partial(torch.optim.SGD, lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)


@pytest.mark.parametrize("outer", [NESTEROV, {"outer": FACTORY}], ids=["nesterov", "factory"])
def test_one_step_a_window_is_sgd_with_momentum(outer: dict[str, Any]) -> None:
    first, second = run_team(2, lambda comm: train(comm, **outer))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, in_one_process(2 * BATCH, 2 * BATCH), rtol=1e-10, atol=1e-12)


def test_the_rate_follows_ranks_and_steps() -> None:
    few, ranks, steps = (outer_lr(Averaged(*of)) for of in ((2, 16), (8, 16), (2, 256)))
    assert few < ranks == steps
    for num_ranks in (2, 6):
        given = {"outer": "nesterov", "outer_lr": outer_lr(Averaged(num_ranks, 1))}
        auto = run_team(num_ranks, lambda comm: train(comm, outer="nesterov"))
        assert torch.equal(auto[0], run_team(num_ranks, partial(train, **given))[0])
        assert all(torch.equal(auto[0], other) for other in auto)


@pytest.mark.parametrize("outer", [NESTEROV, {"outer": FACTORY}], ids=["nesterov", "factory"])
def test_a_checkpoint_holds_the_momentum(outer: dict[str, Any], tmp_path: Path) -> None:
    whole = run_team(2, lambda comm: train(comm, tmp_path / "own", **outer))[0]
    resumed = run_team(2, lambda comm: train(comm, tmp_path / "own", **outer))[0]
    assert torch.equal(whole, resumed)


def test_another_number_of_ranks_continues_with_the_momentum(tmp_path: Path) -> None:
    """With one rank, whose windows are half as large: then as one process with such batches."""
    run_team(2, lambda comm: train(comm, tmp_path / "own", 1, **NESTEROV))
    found = run_team(1, lambda comm: train(comm, tmp_path / "own", **NESTEROV))[0]
    without = run_team(1, lambda comm: train(comm, tmp_path / "own"))[0]

    expected = in_one_process(2 * BATCH, BATCH)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found, without)


def test_a_short_window_is_averaged() -> None:
    """The first window is one step, as speeds are unknown, and the last one what is left."""

    def body(comm: Communicator, **options: Any) -> list[Tensor]:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        found: list[Tensor] = []
        with setup(comm, model, optimizer, policy="cadence", anchor=20, **options) as ddp:
            ddp.on_commit(lambda result: found.append(flatten(model).clone()))
            for inputs, targets in ddp.loader(DATA, batch_size=BATCH).epoch(0):
                ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                ddp.step()
        return found

    plain, stepped = (run_team(1, partial(body, **options))[0] for options in ({}, NESTEROV))
    assert len(plain) > 1
    assert torch.equal(plain[0], stepped[0])


def test_a_rank_that_joins_takes_over_the_momentum(rank_clocks: RankClocks) -> None:
    """Ranks compare the consensus after every window."""
    team = ElasticThreads(2)

    def work(membership: ThreadMembership) -> tuple[Tensor, int]:
        rank_clocks.start()
        model = mlp(dtype=torch.float64)  # other weights than the others have, before it joins
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(membership.number)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        config = DdpConfig(
            quiet=True, timeout_s=PATIENCE_S, verify_every=1, anchor=2, max_anchor=2, **NESTEROV
        )
        with Ddp.setup(
            model,
            optimizer,
            devices="cpu",
            elastic=membership,
            policy="cadence",
            config=config,
        ) as ddp:

            def commit(result: Any) -> None:
                if result.window == 3 and ddp.is_main_process:
                    team.add("j")

            ddp.on_commit(commit)
            loader = ddp.loader(DATA, batch_size=1)
            for epoch in ddp.epochs(3):
                for inputs, targets in loader.epoch(epoch):
                    rank_clocks.spend(0.01)
                    ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                    ddp.step()
            return flatten(model), ddp.window

    ends = team.run_to_end(work)
    assert set(ends) == {"w0", "w1", "j"}
    first, *others = ends.values()
    for other in others:
        assert torch.equal(first[0], other[0])


def test_the_step_is_that_of_torch() -> None:
    """Of its own SGD, but for the rounding; what has no gradient stays, and so do bits of zeros."""
    ours, theirs = (
        [nn.Parameter(torch.randn(7)), nn.Parameter(torch.tensor([-0.0]))] for _ in "12"
    )
    with torch.no_grad():
        theirs[0].copy_(ours[0])
    optimizers = (
        OuterSGD(ours, lr=0.7, momentum=0.9),
        torch.optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True),
    )
    for _ in range(5):
        gradient = torch.randn(7)
        for (parameter, zero), optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad, zero.grad = gradient.clone(), torch.zeros(1)
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert ours[1].signbit().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outer": "adam"}, "outer is 'adam'.*'average' or 'nesterov'"),
        ({"outer_lr": 0.5}, "outer_lr is 0.5, but outer is 'average'.*set outer to 'nesterov'"),
        ({"outer": FACTORY, "outer_momentum": 0.5}, "outer_momentum is 0.5, but outer is"),
        ({"outer": "nesterov", "outer_lr": 0.0}, "outer_lr is 0.0.*number above 0, or 'auto'"),
        ({"outer": "nesterov", "outer_lr": "fast"}, "outer_lr is 'fast'.*above 0, or 'auto'"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum is 1.0.*less than 1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DdpConfig(**options)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_momentum_does_not_move_what_was_frozen(policy: str, rank_clocks: RankClocks) -> None:
    rank_clocks.land_after(1)

    def body(comm: Communicator) -> tuple[bool, bool]:
        rank_clocks.start()
        model = mlp(dtype=torch.float64)
        first, *_, last = model.parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        options = {"anchor": 2, "max_anchor": 2, "verify_every": 1, **NESTEROV}
        with setup(comm, model, optimizer, policy=policy, **options) as ddp:
            loader = ddp.loader(DATA, batch_size=2)
            for epoch in range(2):
                before = first.detach().clone(), last.detach().clone()
                for inputs, targets in loader.epoch(epoch):
                    rank_clocks.spend(0.01)
                    ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                    ddp.step()
                first.requires_grad_(False)
        return torch.equal(first, before[0]), torch.equal(last, before[1])

    assert run_team(2, body) == [(True, False)] * 2


def test_ranks_may_freeze_a_parameter_in_different_windows(rank_clocks: RankClocks) -> None:
    """Each after so many of its own steps; ranks compare the consensus after every window."""

    def body(comm: Communicator) -> Tensor:
        rank_clocks.start()
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        options = {"anchor": 2, "max_anchor": 2, "verify_every": 1, **NESTEROV}
        with setup(comm, model, optimizer, policy="cadence", **options) as ddp:
            for inputs, targets in ddp.loader(DATA, batch_size=1).epoch(0):
                rank_clocks.spend(0.01)
                ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                ddp.step()
                if ddp.window == 4 + 2 * comm.rank:
                    next(model.parameters()).requires_grad_(False)
        return flatten(model)

    first, second = run_team(2, body)
    assert torch.equal(first, second)


def in_other_groups(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Make the optimizer of ``FACTORY`` with the parameters in another order."""
    return FACTORY([{"params": parameters[1::2]}, {"params": parameters[::2]}])


def test_groups_of_a_factory_may_reorder_parameters(
    rank_clocks: RankClocks, tmp_path: Path
) -> None:
    """ASYNC, which continues from the step on a rank's own difference; a group resumes as one."""
    rank_clocks.land_after(1)

    def body(comm: Communicator, outer: Any, resumes: bool) -> Tensor:
        rank_clocks.start()
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        options = {"anchor": 2, "max_anchor": 2, "verify_every": 1, "outer": outer}
        with setup(comm, model, optimizer, policy="async", **options) as ddp:
            loader = ddp.loader(DATA, batch_size=2)
            if resumes:
                ddp.load(tmp_path / "own")
            for epoch in range(int(resumes), 2):
                for inputs, targets in loader.epoch(epoch):
                    rank_clocks.spend(0.01)
                    ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                    ddp.step()
                if epoch == 0 and outer is in_other_groups:
                    ddp.save(tmp_path / "own")
        return flatten(model)

    ends = [
        run_team(2, partial(body, outer=outer, resumes=resumes))[0]
        for outer, resumes in ((FACTORY, False), (in_other_groups, False), (FACTORY, True))
    ]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_a_checkpoint_without_momentum_ends_that_of_the_run(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        model, ends = mlp(dtype=torch.float64), []
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        options = {"policy": "cadence", **LOCKSTEP, **NESTEROV}
        with setup(comm, model, optimizer, **options) as ddp:
            loader = ddp.loader(DATA, batch_size=BATCH)
            ddp.save(tmp_path / "own")
            for _ in range(2):
                ddp.load(tmp_path / "own")
                for inputs, targets in loader.epoch(0):
                    ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                    ddp.step()
                ends.append(flatten(model).clone())
        return ends[0], ends[1]

    for first, again in run_team(2, body):
        assert torch.equal(first, again)


DROPPED = "the checkpoint's state of the outer optimizer {} is dropped, as this run has outer={}"
BEGINS = (
    "the outer optimizer {} begins without state, such as momentum, as the checkpoint holds none "
    "of it"
)
ADAM = {"outer": partial(torch.optim.Adam, lr=0.01)}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (NESTEROV, {}, DROPPED.format("'nesterov'", "'average'")),
        ({}, NESTEROV, BEGINS.format("'nesterov'")),
        # Otherwise Adam would miss what it keeps itself.
        ({"outer": FACTORY}, ADAM, f"{DROPPED.format('SGD', 'Adam')}; {BEGINS.format('Adam')}"),
        (NESTEROV, NESTEROV, ""),
        ({}, {}, ""),
    ],
    ids=["to average", "from average", "to another class", "the same", "averages"],
)
def test_a_resume_with_another_outer_optimizer_says_once_what_is_lost(
    before: dict[str, Any],
    after: dict[str, Any],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "own"
    run_team(2, lambda comm: train(comm, path, 1, **before))
    assert not capsys.readouterr().err
    first, second = run_team(2, lambda comm: train(comm, path, **after))
    assert torch.equal(first, second)
    assert capsys.readouterr().err == (f"warning: {path}/step-6: {told}\n" if told else "")


class Counts(torch.optim.SGD):
    """Halves its rate with its second step, and limits differences to 0.01 by a hook."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, lr=OUTER_LR)
        self.num_steps = 0
        self.seen: list[float] = []
        self.register_step_pre_hook(lambda own, *_: own.limit())

    def limit(self) -> None:
        self.num_steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.clamp_(-0.01, 0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(self.num_steps)
        self.param_groups[0]["lr"] = OUTER_LR / len(self.seen)
        super().step()


def test_what_a_class_keeps_beside_its_state_is_foreseen_and_not_changed() -> None:
    step = OuterStep(Counts)
    consensus = torch.zeros(3)
    step.add(["weight"], [consensus])
    for _ in range(3):
        differences = [torch.tensor([1.0, -1.0, 0.001])]
        (foreseen,) = step.ahead([differences[0].clone()], Averaged(2, 1))
        (again,) = step.ahead([differences[0].clone()], Averaged(2, 1))
        step.step(differences, Averaged(2, 1))
        assert torch.equal(foreseen, again)
        assert torch.equal(foreseen, consensus)
    rate = OUTER_LR * (1 + 1 / 2 + 1 / 3)
    torch.testing.assert_close(consensus, rate * torch.tensor([-0.01, 0.01, -0.001]))


class Locks(torch.optim.SGD):
    """Keeps what cannot be copied."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, lr=OUTER_LR)
        self.lock = threading.Lock()


def test_async_refuses_an_outer_optimizer_that_cannot_be_copied() -> None:
    def body(comm: Communicator, policy: str) -> None:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        setup(comm, model, optimizer, policy=policy, outer=Locks).close()

    run_team(2, partial(body, policy="cadence"))
    words = "outer returned a Locks whose attribute 'lock' cannot be copied.*use policy 'cadence'"
    with pytest.raises(ConfigError, match=words):
        run_team(2, partial(body, policy="async"))


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (lambda parameters: None, "outer returned None, which is not a torch.optim.Optimizer"),
        (
            lambda parameters: torch.optim.SGD(parameters[:1], lr=1.0),
            "outer returned a SGD of 1 parameters, which are not the 4 that",
        ),
    ],
)
def test_a_factory_must_step_what_it_gets(outer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_team(1, partial(train, outer=outer))


def test_ranks_give_the_same_outer_optimizer() -> None:
    def body(comm: Communicator) -> None:
        train(comm, outer=partial(torch.optim.SGD, lr=0.5 + comm.rank))

    with pytest.raises(ConfigError, match=r"rank 1 and rank 0 differ in .*lr: 1.5 instead of 0.5"):
        run_team(2, body)
