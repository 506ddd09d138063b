"""CADENCE and ASYNC: every sample once, one consensus, no step lost, and what a loop relies on."""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.engine.results import WindowResult
from evener.errors import NonFiniteGradientError, ReplicasDifferError
from helpers.clocks import RankClocks
from helpers.loops import STEP_SIZE, Numbered, OneStep, flatten, linear, train
from helpers.models import mlp, regression_data, seeded
from helpers.teams import run_team, setup

#: Windows of few steps, however fast or slow this machine is just now.
SHORT: dict[str, Any] = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1}
both_policies = pytest.mark.parametrize("policy", ["cadence", "async"])


class Partly(nn.Module):
    """Has a frozen part, a part that no loss ever reaches, statistics, and a negative zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1)
        self.unused = nn.Parameter(torch.tensor([-0.0, 0.1, -3.0]))
        self.register_buffer("constant", torch.tensor([-0.0, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x))))


def state_bits(model: nn.Module) -> list[bytes]:
    return [t.detach().reshape(-1).numpy().tobytes() for t in model.state_dict().values()]


def is_finite(model: nn.Module) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_consensus_is_the_same_to_the_bit_after_every_window(policy: str) -> None:
    """Unequal ranks; what nothing has changed keeps its bits, on every rank, all the time."""
    untouched = ("frozen.weight", "frozen.bias", "unused", "constant")
    batch_size, size = (8, 8 * 42) if policy == "sync" else (4, 4 * 170)
    options = {"shares": (2, 1)} if policy == "sync" else SHORT

    def body(comm: Communicator) -> tuple[list[list[bytes]], list[int], list[bytes]]:
        model = seeded(Partly)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
        states: list[list[bytes]] = []
        slow = {1: 2.0}
        with setup(comm, model, optimizer, policy=policy, emulate_slow=slow, **options) as ddp:
            ddp.on_commit(lambda r: states.append([str(r.window).encode(), *state_bits(model)]))
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
    assert min(len(first), len(second)) > 0


def test_one_step_a_window_is_one_sync_step_for_sgd_without_momentum() -> None:
    """The average by weight of ``p - lr * g_r`` is the step of one process on all samples.

    In lockstep window k holds the k-th slice of both batches.
    """
    x, y = regression_data(48, dtype=torch.float64)
    lr, batch_size = 0.05, 4

    def body(comm: Communicator) -> Tensor:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        lockstep = SHORT | {"max_batch_diff": 0}
        with setup(comm, model, optimizer, policy="cadence", **lockstep) as ddp:
            loader = ddp.loader(torch.utils.data.TensorDataset(x, y), batch_size=batch_size)
            for inputs, targets in loader.epoch(0):
                ddp.backward(nn.functional.mse_loss(model(inputs), targets))
                ddp.step()
            assert ddp.window == 48 // (2 * batch_size)
        return flatten(model)

    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = Permutation(48, seed=0, epoch=0)
    for start in range(0, 48, 2 * batch_size):
        ids = [order[position] for position in range(start, start + 2 * batch_size)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[ids]), y[ids]).backward()
        optimizer.step()
    first, second = run_team(2, body)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, flatten(model), rtol=1e-12, atol=1e-13)


def test_the_time_of_an_exchange_is_part_of_what_averaging_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange, least_s = Communicator.all_reduce, 0.05

    def slow(self: Communicator, *given: Any, **named: Any) -> None:
        time.sleep(least_s)
        exchange(self, *given, **named)

    def body(comm: Communicator) -> list[float]:
        found: list[float] = []
        with setup(comm, *linear(), policy="cadence", **SHORT) as ddp:
            ddp.on_commit(lambda result: found.extend(rank.sync_s for rank in result.ranks))
            train(ddp, ddp.loader(Numbered(24), batch_size=4, micro_batch_size=4))
        return found

    monkeypatch.setattr(Communicator, "all_reduce", slow)
    for found in run_team(2, body):
        assert found
        assert min(found) >= least_s


@both_policies
def test_a_schedule_by_weight_runs_ahead_inside_a_window(policy: str) -> None:
    """By what a local step has weighed on average so far."""
    weight, steps = 6.0, 60

    def body(comm: Communicator) -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []
        model, optimizer = linear()
        with setup(
            comm,
            model,
            optimizer,
            lambda progress: seen.append((progress.steps, progress.weight)) or 1.0,
            policy=policy,
            anchor=5,
        ) as ddp:
            for _, x in ddp.loader(Numbered(2 * steps), batch_size=2).epoch(0):
                ddp.backward(model(x).mean(), weight=weight)
                ddp.step()
        return seen

    for seen in run_team(2, body):
        assert seen[-1] == (steps, weight * steps)
        assert all(units < weight * (done + 2) for done, units in seen)


@both_policies
def test_a_buffer_that_differs_between_loops_is_found_before_a_save(
    policy: str, tmp_path: Path
) -> None:
    def body(comm: Communicator) -> str:
        model = seeded(Partly)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01)
        options = {"policy": policy, "verify_every": 1000, **SHORT}
        with setup(comm, model, optimizer, **options) as ddp:
            train(ddp, ddp.loader(Numbered(24), batch_size=4, micro_batch_size=4))
            before = model.norm.running_mean.data.clone()
            if comm.rank == 1:
                model.norm.running_mean.data[0] += 1  # without a mark
            with pytest.raises(ReplicasDifferError) as caught:
                ddp.save(tmp_path / "saved")
            model.norm.running_mean.data.copy_(before)
        return caught.value.parameter

    assert run_team(2, body) == ["norm.running_mean"] * 2


@both_policies
def test_no_local_step_is_lost(policy: str, rank_clocks: RankClocks) -> None:
    rank_clocks.land_after(1)

    def body(comm: Communicator) -> tuple[list[tuple[int, ...]], int]:
        rank_clocks.start()
        model = OneStep()
        optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
        windows: list[WindowResult] = []
        with setup(comm, model, optimizer, policy=policy, anchor=2) as ddp:
            ddp.on_commit(windows.append)
            for _, x in ddp.loader(Numbered(1200, torch.float64), batch_size=4).epoch(0):
                rank_clocks.spend((0.01, 0.02)[comm.rank])
                ddp.backward(model(x))
                ddp.step()
        model.check(windows)
        counts = [tuple(record.steps for record in result.ranks) for result in windows]
        return counts, max(record.stale_steps for result in windows for record in result.ranks)

    (counts, stale), (same, _) = run_team(2, body)
    assert counts == same
    assert sum(map(sum, counts)) == 300
    assert stale == (0 if policy == "cadence" else 1)


class Tally(nn.Module):
    """Has a parameter for each sample, which is 0 until a step has trained on that sample."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.samples = nn.Parameter(torch.zeros(size, dtype=torch.float64))


@both_policies
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
        with setup(comm, model, optimizer, policy=policy, anchor=3, max_anchor=3) as ddp:
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


@both_policies
def test_learning_rates_follow_the_team_and_torch_schedulers_end_where_it_does(
    policy: str, rank_clocks: RankClocks
) -> None:
    """Speeds are given: a rank that happens to be slow may have no part in the last windows."""
    rank_clocks.land_after(1)

    def body(comm: Communicator) -> tuple[list[float], float, int, float]:
        rank_clocks.start()
        model, optimizer = linear(lr=1.0)
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
                ddp.backward(0.01 * model(x).square().mean())
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
        model = OneStep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with setup(comm, model, optimizer, policy="cadence", lr_scale_ratio=0.5) as ddp:
            for _, x in ddp.loader(Numbered(8, torch.float64), batch_size=4).epoch(0):
                ddp.backward(model(x))
                ddp.step()
        return model.weight.item(), optimizer.param_groups[0]["lr"]

    assert run_team(2, body) == [(-0.5 * 1.5, 0.5)] * 2


# ── what is not finite, replicas that differ ─────────────────────────────────────────────────────


@both_policies
def test_a_gradient_that_is_not_finite_stops_every_rank_by_name(policy: str) -> None:
    def body(comm: Communicator) -> tuple[int, str | None, bool]:
        model, optimizer = linear()
        with setup(comm, model, optimizer, policy=policy, **SHORT) as ddp:
            loader = ddp.loader(Numbered(400), batch_size=4)
            if comm.rank == 1:  # its gradients are spoilt after two windows
                bias = model.get_parameter("bias")
                bias.register_hook(lambda g: g * (math.inf if ddp.window >= 2 else 1.0))
            with pytest.raises(NonFiniteGradientError, match="rank 1") as caught:
                train(ddp, loader)
            with ddp.assembly.engine.consensus.shown():
                return caught.value.rank, caught.value.parameter, is_finite(model)

    assert run_team(2, body) == [(1, "bias", True)] * 2, "nothing of that window was averaged in"


@both_policies
def test_a_step_that_is_not_finite_can_be_left_out_without_a_trace(policy: str) -> None:
    """Statistics of a batch that holds a NaN would be NaN for good."""

    def body(comm: Communicator) -> tuple[int, int, int, bool]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, policy=policy, non_finite="skip", anchor=2) as ddp:
            for ids, x in ddp.loader(Numbered(160), batch_size=4).epoch(0):
                ddp.backward(model(x * (math.nan if 0 in ids.tolist() else 1.0)).square().mean())
                ddp.step()
        tracked = int(model.get_buffer("0.num_batches_tracked"))
        return ddp.progress.steps, ddp.progress.skipped, tracked, is_finite(model)

    assert run_team(2, body) == [(39, 1, 39, True)] * 2


@both_policies
def test_working_copies_may_differ_and_the_consensus_may_not(policy: str) -> None:
    def body(comm: Communicator, *, spoils: bool) -> tuple[int, str]:
        model = mlp(3, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, policy=policy, verify_every=1, **SHORT) as ddp:

            def spoil(result: WindowResult) -> None:
                if spoils and comm.rank == 1 and result.window == 0:
                    ddp.assembly.engine.consensus.consensus[0][0] += 1e-3

            ddp.on_commit(spoil)
            try:
                train(ddp, ddp.loader(Numbered(120), batch_size=2))
            except ReplicasDifferError as error:
                return error.rank, error.parameter
        assert ddp.window > 5
        return -1, ""

    assert run_team(2, lambda comm: body(comm, spoils=False)) == [(-1, "")] * 2
    # The first elements of the buffer are those of the last parameter.
    assert run_team(2, lambda comm: body(comm, spoils=True)) == [(1, "2.bias")] * 2
