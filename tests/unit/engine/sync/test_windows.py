"""What a loop on several ranks relies on: samples once, errors everywhere, commits, stops."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from evener.errors import (
    EvenerError,
    NonFiniteGradientError,
    UsageError,
)
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


def test_an_empty_data_set_is_refused() -> None:
    model, optimizer = line()
    with setup(Communicator(), model, optimizer) as ddp, pytest.raises(EvenerError):
        ddp.loader(Numbered(0), batch_size=8)


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
