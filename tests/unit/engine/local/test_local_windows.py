"""CADENCE and ASYNC: every sample once, one consensus, no step lost, and what a loop relies on."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from evener.errors import NonFiniteGradientError
from helpers.clocks import RankClocks
from helpers.models import mlp, regression_data
from helpers.teams import run_team, setup

LOCK = threading.Lock()
LOCAL = ("cadence", "async")

#: Windows of few steps, however fast or slow this machine is just now.
SHORT: dict[str, Any] = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1}


class Numbered(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Samples that know their index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.full((3,), (index + 1.0) / self.size)


class Partly(nn.Module):
    """Has a frozen part, a part that no loss ever reaches, statistics, and a negative zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.unused = nn.Parameter(torch.tensor([-0.0, 0.1, -3.0]))
        self.register_buffer("constant", torch.tensor([-0.0, 0.3]))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x))))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with LOCK:  # threads share the generator
        torch.manual_seed(0)
        return make()


def state_bits(model: nn.Module) -> list[bytes]:
    return [t.detach().reshape(-1).numpy().tobytes() for t in model.state_dict().values()]


def train(ddp: Ddp, loader: Any, epochs: int = 1) -> list[int]:
    seen: list[int] = []
    model = ddp.assembly.model
    for epoch in range(epochs):
        for ids, x in loader.epoch(epoch):
            ddp.backward(model(x).square().mean())
            seen.extend(ids.tolist())
            ddp.step()
    return seen


@pytest.mark.parametrize("policy", ["sync", *LOCAL])
def test_consensus_is_the_same_to_the_bit_after_every_window(policy: str) -> None:
    """Unequal ranks; what nothing has changed keeps its bits, on every rank, all the time."""
    untouched = ("frozen.weight", "frozen.bias", "unused", "constant")
    size = 8 * 42 if policy == "sync" else 4 * 170

    def body(comm: Communicator) -> tuple[list[list[bytes]], list[int], list[bytes]]:
        model = seeded(Partly)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0
        )
        states: list[list[bytes]] = []
        with setup(
            comm,
            model,
            optimizer,
            policy=policy,
            emulate_slow={1: 2.0},
            **({} if policy == "sync" else SHORT),
            shares=(2, 1) if policy == "sync" else None,
        ) as ddp:
            ddp.on_commit(lambda r: states.append([str(r.window).encode(), *state_bits(model)]))
            batch_size = 8 if policy == "sync" else 4
            loader = ddp.loader(Numbered(size), batch_size=batch_size, micro_batch_size=4)
            seen = train(ddp, loader)
            after = model.state_dict()
        for name in untouched:
            assert before[name].numpy().tobytes() == after[name].numpy().tobytes(), name
        return states, seen, state_bits(model)

    (states, first, final), (others, second, same) = run_team(2, body)
    assert len(states) >= 40
    assert states == others
    assert final == same == states[-1][1:], "the run ends at the consensus"
    assert Counter(first + second) == dict.fromkeys(range(size), 1)
    assert first
    assert second


def test_one_step_a_window_is_one_sync_step_for_sgd_without_momentum() -> None:
    """Rank r steps to p - lr * g_r, with g_r the mean gradient of its w_r samples, from the same p.

    The average by weight of these is p - lr * sum(w_r * g_r) / sum(w_r): the step of one process on
    the mean gradient of all samples. In lockstep window k holds the k-th slice of both batches.
    """
    x, y = regression_data(48, dtype=torch.float64)
    lr, batch_size = 0.05, 4

    def body(comm: Communicator) -> list[Tensor]:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with setup(
            comm, model, optimizer, policy="cadence", anchor=1, max_anchor=1, max_batch_diff=0
        ) as ddp:
            loader = ddp.loader(torch.utils.data.TensorDataset(x, y), batch_size=batch_size)
            order = Permutation(loader.cursor.num_samples, loader.cursor.seed, 0)
            for inputs, targets in loader.epoch(0):
                ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                ddp.step()
            assert ddp.window == 48 // (2 * batch_size)
        return [torch.tensor([order[i] for i in range(48)]), *model.parameters()]

    first, second = run_team(2, body)
    model = mlp(dtype=torch.float64)
    for start in range(0, 48, 2 * batch_size):
        ids = first[0][start : start + 2 * batch_size]
        model.zero_grad()
        nn.functional.mse_loss(model(x[ids]), y[ids]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    for mine, other, reference in zip(first[1:], second[1:], model.parameters(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("policy", LOCAL)
def test_no_local_step_is_lost(policy: str, rank_clocks: RankClocks) -> None:
    """A loss whose gradient is 1 everywhere: each step of a rank moves it by -lr, whatever is
    averaged when. A window in which rank r does n_r steps of equal weight moves the consensus by
    -lr * sum(n_r * n_r) / sum(n_r): had a step been lost or counted twice, it would not add up."""
    lr = 2.0**-6
    rank_clocks.land_after(1)

    def body(comm: Communicator) -> tuple[float, list[tuple[int, ...]], int]:
        rank_clocks.start()
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        counts: list[tuple[int, ...]] = []
        stale = 0
        with setup(
            comm,
            model,
            torch.optim.SGD(model.parameters(), lr=lr),
            policy=policy,
            anchor=2,
        ) as ddp:

            def count(result: WindowResult) -> None:
                nonlocal stale
                counts.append(tuple(r.steps for r in result.ranks))
                stale = max(stale, *(r.stale_steps for r in result.ranks))

            ddp.on_commit(count)
            for _ in ddp.loader(Numbered(1200), batch_size=4).epoch(0):
                rank_clocks.spend((0.01, 0.02)[comm.rank])
                ddp.backward(model.weight.sum())
                ddp.step()
        return model.weight.item(), counts, stale

    (first, counts, stale), (second, same, _) = run_team(2, body)
    assert first == second
    assert counts == same
    assert sum(sum(c) for c in counts) == 300
    expected = -lr * sum(sum(n * n for n in c) / sum(c) for c in counts)
    assert first == pytest.approx(expected, rel=1e-9)
    assert stale == (0 if policy == "cadence" else 1)


class Tally(nn.Module):
    """Has a parameter for each sample, which is 0 until a step has trained on that sample."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.samples = nn.Parameter(torch.zeros(size, dtype=torch.float64))


@pytest.mark.parametrize("policy", LOCAL)
def test_an_epoch_that_max_steps_ends_has_holes_which_a_resumed_run_fills(
    policy: str, tmp_path: Path, rank_clocks: RankClocks
) -> None:
    """Rank 1 turns slow with batches in its queue, and later ones are trained before these."""
    rank_clocks.land_after(1)
    size, batch_size, steps = 200, 4, 29

    def session(comm: Communicator, max_steps: int | None) -> tuple[Any, ...]:
        rank_clocks.start()
        model = Tally(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        windows = {"anchor": 3, "max_anchor": 3}
        with setup(comm, model, optimizer, policy=policy, **windows) as ddp:
            ranges: list[tuple[int, int]] = []
            ddp.on_commit(lambda result: ranges.extend(result.ranges))
            loader = ddp.loader(range(size), batch_size=batch_size, max_steps=max_steps, seed=1)
            if max_steps is None:
                ddp.load(tmp_path)
            before = model.samples.detach().clone()
            for done, ids in enumerate(loader.epoch(0)):
                rank_clocks.spend(0.04 if comm.rank == 1 and done > 3 else 0.01)
                ddp.backward(-model.samples[ids].mean())
                ddp.step()
            if max_steps is not None:
                ddp.save(tmp_path)
            committed = [p for start, stop in ranges for p in range(start, stop)]
            return committed, before, model.samples.detach(), ddp.progress

    order = Permutation(size, seed=1, epoch=0)
    committed, _, after, progress = run_team(2, lambda comm: session(comm, steps))[0]
    assert progress.samples == len(committed) == len(set(committed)) == steps * batch_size
    assert max(committed) >= len(committed), "not a prefix"
    assert {*after.nonzero().flatten().tolist()} == {order[p] for p in committed}

    rest, before, after, progress = run_team(1, lambda comm: session(comm, None))[0]
    assert progress.samples == size
    assert sorted(committed + rest) == [*range(size)]
    trained = torch.zeros(size, dtype=torch.float64)
    trained[[order[p] for p in rest]] = 1 / batch_size
    assert torch.equal(after, before + trained), "each once, and no other"


@pytest.mark.parametrize("policy", LOCAL)
def test_learning_rates_follow_the_team_and_torch_schedulers_end_where_it_does(
    policy: str, rank_clocks: RankClocks
) -> None:
    """Speeds are given: a rank that happens to be slow may have no part in the last windows."""
    rank_clocks.land_after(1)

    def body(comm: Communicator) -> tuple[list[float], float, int, float]:
        rank_clocks.start()
        model = seeded(lambda: nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        used: list[tuple[float, int]] = []
        committed: list[float] = []
        with setup(comm, model, optimizer, scheduler, policy=policy, anchor=5) as ddp:
            optimizer.register_step_pre_hook(
                lambda o, *_: used.append((o.param_groups[0]["lr"], ddp.progress.steps))
            )
            ddp.on_commit(lambda r: committed.append(r.lr))
            for _, x in ddp.loader(Numbered(400), batch_size=4).epoch(0):
                rank_clocks.spend((0.01, 0.02)[comm.rank])
                ddp.backward(model(x).square().mean())
                ddp.step()
            steps = ddp.progress.steps
        assert all(lr < 0.99**steps + 1e-9 for lr, steps in used), "never behind the team"
        assert used[-1][0] < 0.6
        assert any(lr < 0.99**steps - 1e-3 for lr, steps in used), "inside a window it moves on"
        return committed, optimizer.param_groups[0]["lr"], steps, scheduler.last_epoch

    first, second = run_team(2, body)
    assert first == second
    committed, lr, steps, scheduled = first
    assert steps == scheduled == 100
    assert lr == committed[-1] == pytest.approx(0.99**100)


def test_lr_scale_ratio_scales_the_step_and_not_the_schedule() -> None:
    def body(comm: Communicator) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with setup(comm, model, optimizer, policy="cadence", lr_scale_ratio=0.5) as ddp:
            for _ in ddp.loader(Numbered(8), batch_size=4).epoch(0):
                ddp.backward(model.weight.sum())
                ddp.step()
        return model.weight.item(), optimizer.param_groups[0]["lr"]

    for weight, lr in run_team(2, body):
        assert weight == -0.5 * 1.5
        assert lr == 0.5


@pytest.mark.parametrize("policy", LOCAL)
def test_a_gradient_that_is_not_finite_stops_every_rank_by_name(policy: str) -> None:
    def body(comm: Communicator) -> tuple[str, int, str | None, bool]:
        model = seeded(lambda: nn.Linear(3, 1))
        with setup(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy, **SHORT
        ) as ddp:
            loader = ddp.loader(Numbered(400), batch_size=4)
            if comm.rank == 1:  # its gradients are spoilt after two windows
                model.bias.register_hook(lambda g: g * (math.inf if ddp.window >= 2 else 1.0))
            with pytest.raises(NonFiniteGradientError) as caught:
                train(ddp, loader)
            with ddp.assembly.engine.consensus.shown():
                finite = all(bool(t.isfinite().all()) for t in model.state_dict().values())
        return str(caught.value), caught.value.rank, caught.value.parameter, finite

    for message, rank, name, finite in run_team(2, body):
        assert (rank, name) == (1, "bias")
        assert "rank 1" in message
        assert finite, "nothing of that window was averaged in"


@pytest.mark.parametrize("policy", LOCAL)
def test_steps_that_are_not_finite_can_be_left_out(policy: str) -> None:
    def body(comm: Communicator) -> tuple[int, int, bool]:
        model = seeded(lambda: nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, policy=policy, non_finite="skip", anchor=2) as ddp:
            loader = ddp.loader(Numbered(160), batch_size=4)
            for ids, x in loader.epoch(0):
                loss = model(x).square().mean()
                ddp.backward(loss * (math.nan if 0 in ids.tolist() else 1.0))
                ddp.step()
            finite = all(bool(t.isfinite().all()) for t in model.parameters())
            return ddp.progress.steps, ddp.progress.skipped, finite

    assert run_team(2, body) == [(39, 1, True)] * 2


@pytest.mark.parametrize("policy", LOCAL)
def test_a_stop_ends_all_ranks_at_one_consensus_and_another_team_goes_on(
    policy: str, tmp_path: Path
) -> None:
    """Moments in the checkpoint are the main rank's; all ranks of the next team take them."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def first(comm: Communicator) -> tuple[list[int], list[bytes], Tensor]:
        model = seeded(lambda: nn.Linear(3, 1))
        optimizer = optimizer_of(model)
        seen: list[int] = []
        with setup(comm, model, optimizer, policy=policy, **SHORT) as ddp:
            loader = ddp.loader(Numbered(400), batch_size=4)
            done: list[int] = []

            @ddp.on_commit
            def remember(result: WindowResult) -> None:
                done.extend(p for a, b in result.ranges for p in range(a, b))
                if result.window == 3 and comm.rank == 1:
                    ddp.stop()

            order = Permutation(loader.cursor.num_samples, loader.cursor.seed, 0)
            for _, x in loader.epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()
            assert ddp.stopping
            seen = [order[p] for p in done]
            ddp.save(tmp_path)
            return seen, state_bits(model), optimizer.state[model.weight]["exp_avg"].clone()

    (seen, bits, moment), (same, other, _) = run_team(2, first)
    assert seen == same
    assert 0 < len(seen) < 400
    assert bits == other

    def second(comm: Communicator) -> tuple[list[int], list[bytes], Tensor]:
        model = seeded(lambda: nn.Linear(3, 1))
        optimizer = optimizer_of(model)
        with setup(comm, model, optimizer, policy=policy, anchor=2) as ddp:
            loader = ddp.loader(Numbered(400), batch_size=4)
            ddp.load(tmp_path)
            restored = state_bits(model)
            taken = optimizer.state[model.weight]["exp_avg"].clone()
            return train(ddp, loader), restored, taken

    outcomes = run_team(3, second)
    assert Counter(seen + [i for ids, _, _ in outcomes for i in ids]) == dict.fromkeys(
        range(400), 1
    )
    for _, restored, taken in outcomes:
        assert restored == bits
        assert torch.equal(taken, moment)
