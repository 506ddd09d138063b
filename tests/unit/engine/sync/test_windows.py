"""What a loop on several ranks relies on: samples once, errors everywhere, commits, stops."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from evener.errors import (
    CollectiveMismatchError,
    ConfigError,
    EvenerError,
    NonFiniteGradientError,
    PeerLostError,
    UsageError,
)
from evener.planning.policies import Parking
from helpers.clocks import RankClocks
from helpers.teams import run_team, setup

IDS = 37
LOCK = threading.Lock()


class Numbered(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Samples that know their index, and a count of how often each was read."""

    def __init__(self, size: int = IDS) -> None:
        self.size = size
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        with LOCK:
            self.reads[index] += 1
        return index, torch.full((3,), float(index) / self.size)


def line(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    with LOCK:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def go_through(
    ddp: Ddp, loader: Any, epochs: int = 1, seen: list[int] | None = None
) -> list[WindowResult]:
    results = []
    model = ddp.assembly.model
    for epoch in range(epochs):
        for ids, x in loader.epoch(epoch):
            ddp.backward(model(x).square().mean())
            if seen is not None:
                seen.extend(ids.tolist())
            if result := ddp.step():
                results.append(result)
    return results


def any_shares(window: int, size: int) -> list[int]:
    first = (window * 7) % (size + 1)
    second = (size - first) // 2
    return [first, second, size - first - second]


@pytest.mark.parametrize(
    ("world_size", "shares"),
    [(1, (1,)), (2, (3, 1)), (3, (5, 2, 1)), (3, any_shares), (4, (1, 0, 0, 2))],
)
def test_every_sample_once_an_epoch(world_size: int, shares: Any) -> None:
    data = Numbered()

    def body(comm: Communicator) -> tuple[list[int], list[tuple[int, int, int]]]:
        model, optimizer = line()
        committed = []
        seen: list[int] = []
        with setup(comm, model, optimizer, shares=shares) as ddp:
            ddp.on_commit(lambda r: committed.append((r.epoch, *r.committed)))
            loader = ddp.loader(data, batch_size=8, micro_batch_size=3)
            assert len(loader) == 5
            go_through(ddp, loader, epochs=2, seen=seen)
            assert ddp.progress.samples == 2 * IDS
        return seen, committed

    results = run_team(world_size, body)
    assert Counter(i for seen, _ in results for i in seen) == dict.fromkeys(range(IDS), 2)
    assert data.reads == dict.fromkeys(range(IDS), 2)
    expected = [(e, s, min(s + 8, IDS)) for e in range(2) for s in range(0, IDS, 8)]
    assert all(committed == expected for _, committed in results)


def test_shares_follow_measured_speed(rank_clocks: RankClocks) -> None:
    def body(comm: Communicator) -> tuple[int, ...]:
        rank_clocks.start()
        model, optimizer = line()
        sample_s = (0.002, 0.006)[comm.rank]
        with setup(comm, model, optimizer) as ddp:
            loader = ddp.loader(Numbered(480), batch_size=24)
            for _, x in loader.epoch(0):
                rank_clocks.spend(sample_s * len(x))
                ddp.backward(model(x).square().mean())
                result = ddp.step()
            assert result is not None
        return tuple(r.samples for r in result.ranks)

    assert run_team(2, body)[0] == (18, 6)


def test_a_speed_hint_decides_the_first_shares() -> None:
    data = Numbered()

    def body(comm: Communicator) -> tuple[int, ...]:
        model, optimizer = line()
        with setup(comm, model, optimizer, speed_hint=(3.0, 1.0)) as ddp:
            loader = ddp.loader(data, batch_size=16)
            for _, x in loader.epoch(0):
                ddp.backward(model(x).square().mean())
                if result := ddp.step():
                    return tuple(r.samples for r in result.ranks)
        raise AssertionError("no window")

    assert run_team(2, body)[0] == (12, 4)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_number_on_one_rank_stops_every_rank(where: str) -> None:
    def body(comm: Communicator) -> tuple[NonFiniteGradientError, bool, int]:
        model, optimizer = line()
        model = nn.Sequential(model, nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(Numbered(), batch_size=8)
            before: list[Tensor] = []

            def train() -> None:
                for _, x in loader.epoch(0):
                    loss = model(x).square().mean()
                    if ddp.window == 2:
                        before[:] = [p.detach().clone() for p in model.parameters()]
                        if comm.rank == 1 and where == "loss":
                            loss = loss * float("nan")
                        elif comm.rank == 1:
                            model[1].weight.register_hook(lambda g: g * float("inf"))
                    ddp.backward(loss)
                    ddp.step()

            with pytest.raises(NonFiniteGradientError) as caught:
                train()
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            return caught.value, same, ddp.window

    for error, unchanged, window in run_team(2, body):
        assert (error.rank, error.window, window) == (1, 2, 2)
        assert error.parameter == (None if where == "loss" else "1.weight")
        assert "rank 1" in str(error)
        assert "step 3" in str(error)
        assert unchanged


def test_non_finite_windows_can_be_skipped_on_every_rank() -> None:
    def body(comm: Communicator) -> tuple[list[bool], int, Tensor]:
        model, optimizer = line()
        with setup(comm, model, optimizer, shares=(1, 1), non_finite="skip") as ddp:
            loader = ddp.loader(Numbered(), batch_size=8)
            skipped = []
            for _, x in loader.epoch(0):
                loss = model(x).square().mean()
                ddp.backward(loss * float("nan") if comm.rank and ddp.window == 2 else loss)
                if result := ddp.step():
                    skipped.append(result.skipped)
            return skipped, ddp.progress.steps, model.weight.detach().clone()

    results = run_team(2, body)
    for skipped, steps, weight in results:
        assert skipped == [False, False, True, False, False]
        assert steps == 4
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, results[0][2])


def test_ranks_in_different_collectives_learn_who_does_what() -> None:
    def body(comm: Communicator) -> str:
        model, optimizer = line()
        with setup(comm, model, optimizer, shares=(3, 1)) as ddp:
            loader = ddp.loader(Numbered(), batch_size=8, micro_batch_size=2)

            def train() -> None:
                for i, (_, x) in enumerate(loader.epoch(0)):
                    ddp.backward(model(x).square().mean())
                    ddp.step()
                    if i == 2:  # a local counter: rank 0 is in mid-window, rank 1 is not
                        ddp.weighted_mean(1.0)

            with pytest.raises(CollectiveMismatchError) as caught:
                train()
            return str(caught.value)

    for message in run_team(2, body):
        assert "rank 0 is" in message
        assert "ddp.on_commit" in message


def test_a_stop_drops_the_window_and_the_next_run_goes_on_there() -> None:
    data = Numbered()
    stop = threading.Event()

    def body(comm: Communicator) -> tuple[int, dict[str, Any], list[int]]:
        model, optimizer = line()
        ids: list[int] = []
        committed: list[int] = []

        def keep(result: WindowResult) -> None:
            committed.append(result.window)

        with setup(comm, model, optimizer, shares=(1, 1), stop_when=stop.is_set) as ddp:
            ddp.on_commit(keep)
            loader = ddp.loader(data, batch_size=8, micro_batch_size=1)
            for batch, x in loader.epoch(0):
                ids.extend(batch.tolist())
                if ddp.window == 2 and comm.rank == 1:
                    stop.set()
                ddp.backward(model(x).square().mean())
                ddp.step()
            assert ddp.stopping
            assert list(loader.epoch(1)) == []
            return ddp.window, loader.cursor.state_dict(), committed

    for window, state, committed in run_team(2, body):
        assert window == 2
        assert committed == [0, 1]
        assert state["committed"] == [[0, 16]]


def test_any_rank_may_ask_the_team_to_stop_after_the_window() -> None:
    def body(comm: Communicator) -> int:
        model, optimizer = line()
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(Numbered(), batch_size=8)
            for _, x in loader.epoch(0):
                ddp.backward(model(x).square().mean())
                if ddp.window == 1 and comm.rank == 1:
                    ddp.stop()
                ddp.step()
            return ddp.window

    assert run_team(2, body) == [2, 2]


def test_on_commit_sees_the_state_of_the_committed_window_on_every_rank() -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[float], list[float]]:
        model, optimizer = line()
        states: list[Tensor] = []
        values: list[float] = []
        norms: list[float] = []
        after: dict[int, Tensor] = {}
        with setup(comm, model, optimizer, shares=any_shares) as ddp:

            @ddp.on_commit
            def _(result: WindowResult) -> None:
                states.append(model.weight.detach().clone())
                values.append(ddp.weighted_mean(float(comm.rank), weight=comm.rank))
                norms.append(result.loss)

            optimizer.register_step_post_hook(
                lambda *_: after.__setitem__(ddp.window, model.weight.detach().clone())
            )
            loader = ddp.loader(Numbered(), batch_size=8)
            go_through(ddp, loader)
            for window, state in enumerate(states):
                assert torch.equal(state, after[window])
        return states, values, norms

    results = run_team(3, body)
    for states, values, norms in results:
        assert len(states) == 5
        assert values == [pytest.approx((1 + 4) / 3)] * 5
        assert norms == results[0][2]


def test_batch_norm_statistics_are_averaged_by_weight_and_equal() -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor, int]:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 1))
        model.register_buffer("constant", torch.tensor([0.1, 0.7]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with setup(comm, model, optimizer, shares=(6, 2)) as ddp:
            loader = ddp.loader(Numbered(8), batch_size=8, micro_batch_size=8)
            for _, x in loader.epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()
            mine = x.mean(0)
            batch_norm = model[0]
            assert torch.equal(model.constant, torch.tensor([0.1, 0.7]))
            return mine, batch_norm.running_mean.clone(), int(batch_norm.num_batches_tracked)

    (first, mean, batches), (second, other, _) = run_team(2, body)
    assert torch.equal(mean, other)
    assert torch.allclose(mean, (6 * first + 2 * second) / 8, rtol=1e-6)
    assert batches == 2


def test_unused_and_frozen_parameters_are_left_alone() -> None:
    def body(comm: Communicator) -> bool:
        with LOCK:
            torch.manual_seed(0)
            model = nn.ModuleDict(
                {"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "frozen": nn.Linear(3, 1)}
            )
        model["frozen"].requires_grad_(False)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(Numbered(8), batch_size=8)
            for _, x in loader.epoch(0):
                ddp.backward(model["used"](x).square().mean())
                ddp.step()
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        return changed == {"used.weight", "used.bias"}

    assert run_team(2, body) == [True, True]


def test_a_gradient_that_only_one_rank_has_still_counts_on_all() -> None:
    def body(comm: Communicator) -> Tensor:
        with LOCK:
            torch.manual_seed(0)
            model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(Numbered(8), batch_size=8)
            for _, x in loader.epoch(0):
                ddp.backward(model["ab"[comm.rank]](x).square().mean())
                ddp.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, second = run_team(2, body)
    assert torch.equal(first, second)


def test_dropout_does_not_depend_on_what_was_drawn_before() -> None:
    def train(noise: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with setup(Communicator(), model, optimizer) as ddp:
            loader = ddp.loader(Numbered(), batch_size=8, seed=4)
            for _, x in loader.epoch(0):
                ddp.backward(model(x).square().mean())
                torch.rand(noise)
                ddp.step()
        return model[0].weight.detach().clone()

    assert torch.equal(train(1), train(100))


def wrong_order(action: Callable[[Ddp, Tensor], None]) -> str:
    model, optimizer = line()
    with setup(Communicator(), model, optimizer) as ddp:
        loader = ddp.loader(Numbered(), batch_size=8)

        def train() -> None:
            for _, x in loader.epoch(0):
                action(ddp, model(x).square().mean())

        with pytest.raises(UsageError) as caught:
            train()
    return str(caught.value)


def test_a_loop_in_the_wrong_order_is_told_what_to_do() -> None:
    def no_step(ddp: Ddp, loss: Tensor) -> None:
        ddp.backward(loss)

    def no_backward(ddp: Ddp, loss: Tensor) -> None:
        ddp.step()

    def bad_weight(ddp: Ddp, loss: Tensor) -> None:
        ddp.backward(loss, weight=-1)

    def two_weights(ddp: Ddp, loss: Tensor) -> None:
        ddp.backward(loss, weight=3)
        ddp.backward(loss, weight=4)

    def twice(ddp: Ddp, loss: Tensor) -> None:
        ddp.backward(loss)
        ddp.step()
        ddp.backward(loss)

    assert "ddp.step()" in wrong_order(no_step)
    assert "ddp.backward" in wrong_order(no_backward)
    assert "-1" in wrong_order(bad_weight)
    assert "one weight" in wrong_order(two_weights)
    assert "outside a micro-batch" in wrong_order(twice)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"batch_size": 8, "micro_batch_size": 0}, ["micro_batch_size", "0"]),
        ({"batch_size": 8, "micro_batch_size": "big"}, ["micro_batch_size", "big"]),
        ({"batch_size": 8, "max_steps": -1}, ["max_steps", "-1"]),
        ({"batch_size": 8, "num_workers": -1}, ["num_workers", "-1"]),
    ],
)
def test_bad_loader_arguments(arguments: dict[str, Any], words: Sequence[str]) -> None:
    model, optimizer = line()
    with (
        setup(Communicator(), model, optimizer) as ddp,
        pytest.raises(ConfigError) as caught,
    ):
        ddp.loader(Numbered(), **arguments)
    assert all(word in str(caught.value) for word in words)


def test_an_empty_data_set_is_refused() -> None:
    model, optimizer = line()
    with setup(Communicator(), model, optimizer) as ddp, pytest.raises(EvenerError):
        ddp.loader(Numbered(0), batch_size=8)


def test_ranks_with_different_models_are_refused_with_the_difference() -> None:
    def body(comm: Communicator) -> str:
        model = nn.Sequential(nn.Linear(3, 4 + comm.rank), nn.Linear(4 + comm.rank, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError) as caught:
            setup(comm, model, optimizer)
        return str(caught.value)

    for message in run_team(2, body):
        assert "0.weight" in message
        assert "[5, 3]" in message


class RunningMean(nn.Module):
    """Keeps a statistic, and takes a single sample, which BatchNorm does not."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x


def test_a_rank_that_costs_more_than_it_brings_is_parked_and_called_back(
    rank_clocks: RankClocks,
) -> None:
    """Rank 1 is so slow that the team is faster without it; it comes back with equal state."""
    rank_clocks.let_sums_take(0.005)
    data = Numbered(400)

    def body(comm: Communicator) -> tuple[Tensor, dict[str, Any], list[int], list[int]]:
        rank_clocks.start()
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), RunningMean(4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen: list[int] = []
        parked: list[int] = []
        means: list[float] = []
        evaluated: list[bool] = []
        with setup(comm, model, optimizer, verify_every=1) as ddp:
            # Whoever takes part in a window may average, with a rank parked or not.
            ddp.on_commit(lambda r: means.append(ddp.weighted_mean(r.window, weight=1 + comm.rank)))
            held_out = ddp.eval_loader(Numbered(7), batch_size=4)

            def evaluate(result: WindowResult) -> None:
                """Those who are there share all of it, with a rank parked or not."""
                if result.window % 10 == 0:
                    parts = [(ids, ddp.gather(ids)) for ids, _ in held_out]
                    own = [i for ids, _ in parts for i in ids.tolist()]
                    assert torch.cat([rows for _, rows in parts]).tolist() == list(range(7))
                    mean = ddp.weighted_mean(sum(own) / len(own) if own else 0.0, weight=len(own))
                    assert mean == pytest.approx(3.0)
                    evaluated.append(bool(ddp.assembly.engine.team.parked))

            ddp.on_commit(evaluate)
            loader = ddp.loader(data, batch_size=8)
            for epoch in range(2):
                for ids, x in loader.epoch(epoch):
                    rank_clocks.spend((0.001, 0.04)[comm.rank] * (1 + len(x)))
                    ddp.backward(model(x).square().mean())
                    seen.extend(ids.tolist())
                    ddp.step()
                    if ddp.assembly.engine.team.parked:
                        parked.append(ddp.window)
                assert not ddp.assembly.engine.team.parked
            state = torch.cat([p.detach().flatten() for p in model.parameters()])
            state = torch.cat([state, *(b.flatten().float() for b in model.buffers())])
            assert means == sorted(set(means))
            assert comm.rank or True in evaluated, "nothing was evaluated with a rank parked"
            moments = [v["exp_avg"].flatten() for v in optimizer.state_dict()["state"].values()]
            return torch.cat([state, *moments]), loader.cursor.state_dict(), seen, parked

    (state, cursor, first, parked), (other, same, second, _) = run_team(2, body)
    assert parked, "rank 1 was never parked"
    assert torch.equal(state, other)
    assert cursor == same
    assert Counter(first + second) == dict.fromkeys(range(400), 2)


def test_ranks_on_unlike_devices_take_each_part_from_its_owner() -> None:
    """The second rank rounds its updates otherwise; all ranks still hold the same bits."""

    def body(comm: Communicator) -> Tensor:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            ddp.assembly.engine.options.unlike_devices = True
            if comm.rank == 1:
                optimizer.register_step_post_hook(lambda *_: round_otherwise(model))
            go_through(ddp, ddp.loader(Numbered(), batch_size=8))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def round_otherwise(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6)

    first, second = run_team(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", ["before", "after"])
def test_zero_grad_by_habit_loses_nothing(world_size: int, where: str) -> None:
    def train(habit: str) -> list[Tensor]:
        def body(comm: Communicator) -> Tensor:
            model, optimizer = line()
            with setup(comm, model, optimizer, shares=(3, 1)[:world_size]) as ddp:
                loader = ddp.loader(Numbered(), batch_size=8, micro_batch_size=2)
                for _, x in loader.epoch(0):
                    if habit == "before":
                        optimizer.zero_grad()
                        model.zero_grad()
                    ddp.backward(model(x).square().mean())
                    if habit == "after":
                        optimizer.zero_grad()
                    ddp.step()
            return model.weight.detach().clone()

        return run_team(world_size, body)

    assert torch.equal(train(where)[0], train("none")[0])


def test_no_sample_is_lost_when_plans_are_replaced() -> None:
    """Parking and recall throw plans away whose data was being fetched; all samples still count."""
    data = Numbered(96)

    def body(comm: Communicator) -> tuple[list[int], list[int]]:
        model, optimizer = line()
        seen: list[int] = []
        parked: list[int] = []
        with setup(comm, model, optimizer, speed_hint=(1.0, 1.0)) as ddp:
            engine = ddp.assembly.engine
            engine.policy.decide_parking = lambda *_: (  # rank 1 from window 3 on
                Parking({1: 1.0}) if engine.window == 3 and not engine.team.parked else None
            )
            loader = ddp.loader(data, batch_size=8)
            for epoch in range(2):
                for ids, x in loader.epoch(epoch):
                    seen.extend(ids.tolist())
                    ddp.backward(model(x).square().mean())
                    ddp.step()
                    parked.append(len(engine.team.parked))
                    if engine.team.parked and engine.window == 7:
                        engine.lookahead.recall_at = engine.window + 1  # called back in mid-epoch
        return seen, parked

    (first, parked), (second, _) = run_team(2, body)
    assert Counter(first + second) == dict.fromkeys(range(96), 2)
    assert 0 < parked.count(1) < len(parked)


def test_a_rank_that_leaves_is_noticed_while_another_one_is_parked() -> None:
    """Those who are present have connections of their own, which end with the team, too."""

    def body(comm: Communicator) -> str:
        model, optimizer = line()
        ddp = setup(comm, model, optimizer, speed_hint=(1.0, 1.0, 1.0))
        engine = ddp.assembly.engine
        engine.policy.decide_parking = lambda *_: (
            Parking({1: 1.0}) if engine.window >= 3 and not engine.team.parked else None
        )
        try:
            with ddp:
                for _, x in ddp.loader(Numbered(400), batch_size=8).epoch(0):
                    if comm.rank == 2 and engine.team.parked:
                        raise ValueError("of this rank alone")
                    ddp.backward(model(x).square().mean())
                    ddp.step()
        except (PeerLostError, ValueError) as error:
            return str(error)
        return ""

    first, second, third = run_team(3, body)
    assert "rank 2 has closed" in first
    assert "has closed" in second
    assert third == "of this rank alone"


def test_ranks_with_another_seed_or_data_set_are_refused_at_once() -> None:
    def body(comm: Communicator) -> str:
        model, optimizer = line()
        with setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(Numbered(), batch_size=8, seed=comm.rank)
            with pytest.raises(UsageError, match="batch_size 8 and seed") as caught:
                next(iter(loader.epoch(0)))
        return str(caught.value)

    assert "seed 0" in run_team(2, body)[0]


@pytest.mark.parametrize("shares", [(7.0, 1.0), (1.0, 7.0, 0.0), None])
def test_batch_norm_gets_no_micro_batch_of_one_sample(shares: Any) -> None:
    def body(comm: Communicator) -> list[int]:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"speed_hint": (30.0, 1.0)} if shares is None else {"partition_ratios": shares}
        with setup(comm, model, optimizer, **options) as ddp:
            results = go_through(ddp, ddp.loader(Numbered(24), batch_size=8))
            return [record.samples for result in results for record in result.ranks]

    results = run_team(2 if shares is None else len(shares), body)
    assert any(results)  # a rank without a share sees no result in its loop
    assert all(1 not in samples for samples in results)


def test_a_window_left_out_still_tells_what_weight_to_expect() -> None:
    """Sums of half precision overflow where tokens are counted and samples were expected."""
    tokens = 4096.0

    def body(comm: Communicator) -> list[bool]:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Linear(3, 1).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        skipped = []
        with setup(comm, model, optimizer, shares=(1, 1), non_finite="skip") as ddp:
            for _, x in ddp.loader(Numbered(32), batch_size=8).epoch(0):
                loss = (model(x.half() * 0 + 60) * 5).mean()
                ddp.backward(loss.float(), weight=tokens)
                if result := ddp.step():
                    skipped.append(result.skipped)
        return skipped

    assert run_team(2, body) == [[True, False, False, False]] * 2


def test_one_rank_with_whole_windows_is_bit_for_bit_a_plain_loop() -> None:
    model, optimizer = line(3)
    batches = []
    with setup(Communicator(), model, optimizer) as ddp:
        for _, x in ddp.loader(Numbered(), batch_size=7).epoch(0):
            batches.append(x)
            ddp.backward(model(x).square().mean())
            ddp.step()
    plain, optimizer = line(3)
    for x in batches:
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
