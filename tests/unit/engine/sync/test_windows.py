"""What a loop on several ranks relies on: errors everywhere, commits, stops."""

import math
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.engine.results import WindowResult
from evener.errors import EvenerError, NonFiniteGradientError
from helpers.clocks import RankClocks
from helpers.loops import Numbered, flatten, linear, step, train
from helpers.models import mlp
from helpers.teams import run_team, setup


def any_shares(window: int, size: int) -> list[int]:
    first = (window * 7) % (size + 1)
    second = (size - first) // 2
    return [first, second, size - first - second]


def test_shares_follow_measured_speed(rank_clocks: RankClocks) -> None:
    def body(comm: Communicator) -> tuple[int, ...]:
        rank_clocks.start()
        model, optimizer = linear()
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
@pytest.mark.parametrize("non_finite", ["raise", "skip"])
def test_a_non_finite_number_on_one_rank(where: str, non_finite: str) -> None:
    """It stops every rank, which keep their weights; or the window is left out on every rank."""

    def body(comm: Communicator) -> tuple[NonFiniteGradientError | None, int, list[bool], Tensor]:
        model = mlp(3, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen: list[Tensor] = []
        skipped: list[bool] = []
        error = None

        def spoil(gradient: Tensor) -> Tensor:
            here = comm.rank == 1 and where == "gradient" and ddp.window == 2
            return gradient * math.inf if here else gradient

        model[2].weight.register_hook(spoil)
        with setup(comm, model, optimizer, shares=(1, 1), non_finite=non_finite) as ddp:
            try:
                for _, x in ddp.loader(Numbered(40), batch_size=8).epoch(0):
                    seen.append(flatten(model))
                    is_bad = comm.rank == 1 and where == "loss" and ddp.window == 2
                    ddp.backward(model(x).square().mean() * (math.nan if is_bad else 1.0))
                    result = ddp.step()
                    assert result is not None
                    skipped.append(result.skipped)
            except NonFiniteGradientError as caught:
                error = caught
            assert torch.equal(flatten(model) if error else seen[3], seen[2])
            return error, ddp.progress.steps, skipped, flatten(model)

    results = run_team(2, body)
    assert torch.equal(results[0][-1], results[1][-1])
    for error, steps, skipped, _ in results:
        if non_finite == "skip":
            assert (steps, skipped) == (4, [False, False, True, False, False])
            continue
        assert error is not None
        assert (error.rank, error.window) == (1, 2)
        assert error.parameter == (None if where == "loss" else "2.weight")
        assert re.search("rank 1.*step 3|step 3.*rank 1", str(error))


def test_a_window_left_out_still_tells_what_weight_to_expect() -> None:
    """Sums of half precision overflow where tokens are counted and samples were expected."""

    def body(comm: Communicator) -> list[bool]:
        model, optimizer = linear(torch.float16)
        skipped = []
        with setup(comm, model, optimizer, shares=(1, 1), non_finite="skip") as ddp:
            for _, x in ddp.loader(Numbered(32), batch_size=8).epoch(0):
                loss = (model(x.half() * 0 + 60) * 5).mean()
                ddp.backward(loss.float(), weight=4096.0)
                if result := ddp.step():
                    skipped.append(result.skipped)
        return skipped

    assert run_team(2, body) == [[True, False, False, False]] * 2


def test_a_stop_drops_the_window_and_the_next_run_goes_on_there() -> None:
    stop = threading.Event()

    def body(comm: Communicator) -> tuple[int, Any, list[int]]:
        model, optimizer = linear()
        committed: list[int] = []
        with setup(comm, model, optimizer, shares=(1, 1), stop_when=stop.is_set) as ddp:
            ddp.on_commit(lambda result: committed.append(result.window))
            loader = ddp.loader(Numbered(37), batch_size=8, micro_batch_size=1)
            for _, x in loader.epoch(0):
                if ddp.window == 2 and comm.rank == 1:
                    stop.set()
                step(ddp, x)
            assert ddp.stopping
            assert list(loader.epoch(1)) == []
            return ddp.window, loader.cursor.state_dict()["committed"], committed

    assert run_team(2, body) == [(2, [[0, 16]], [0, 1])] * 2


def test_on_commit_sees_the_state_of_the_committed_window_on_every_rank() -> None:
    def body(comm: Communicator) -> tuple[list[float], list[float]]:
        model, optimizer = linear()
        after: dict[int, Tensor] = {}
        values: list[float] = []
        losses: list[float] = []
        optimizer.register_step_post_hook(lambda *_: after.update({ddp.window: flatten(model)}))
        with setup(comm, model, optimizer, shares=any_shares) as ddp:

            def look(result: WindowResult) -> None:
                assert torch.equal(flatten(model), after[result.window])
                values.append(ddp.weighted_mean(float(comm.rank), weight=comm.rank))
                losses.append(result.loss)

            ddp.on_commit(look)
            train(ddp, ddp.loader(Numbered(37), batch_size=8))
        return values, losses

    results = run_team(3, body)
    assert [values for values, _ in results] == [[pytest.approx((1 + 4) / 3)] * 5] * 3
    assert [losses for _, losses in results] == [results[0][1]] * 3


def test_dropout_does_not_depend_on_what_was_drawn_before() -> None:
    def run(noise: int) -> Tensor:
        model = nn.Sequential(mlp(3, 8, 8), nn.Dropout(0.5), mlp(8, 8, 1))
        with setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
            for _, x in ddp.loader(Numbered(37), batch_size=8, seed=4).epoch(0):
                ddp.backward(model(x).square().mean())
                torch.rand(noise)
                ddp.step()
        return flatten(model)

    assert torch.equal(run(1), run(100))


def test_ranks_with_another_seed_or_at_another_place_of_the_data_are_refused_at_once() -> None:
    def body(comm: Communicator, seed: int, committed: list[list[int]]) -> str:
        model, optimizer = linear()

        def begin() -> None:
            with setup(comm, model, optimizer) as ddp:
                loader = ddp.loader(Numbered(40), batch_size=8, seed=seed)
                loader.cursor.load_state_dict(loader.state_dict() | {"committed": committed})
                next(iter(loader.epoch(0)))

        with pytest.raises(EvenerError) as caught:
            begin()
        return str(caught.value)

    first, _ = run_team(2, lambda comm: body(comm, comm.rank, []))
    assert "seed 0" in first
    _, second = run_team(2, lambda comm: body(comm, 0, [[0, 8]] if comm.rank else []))
    assert "rank 0 plans (window, epoch, start, size) (0, 0, 0, 8), rank 1 is at" in second
    assert "(0, 0, 8, 8)" in second
    assert "resume from the same checkpoint" in second


def test_a_rank_that_would_lengthen_the_epoch_has_no_work_in_its_first_window() -> None:
    def body(comm: Communicator) -> list[list[int]]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shares: list[list[int]] = []
        with setup(comm, model, optimizer, speed_hint=(1.0, 1e-4)) as ddp:
            ddp.on_commit(lambda result: shares.append([rank.samples for rank in result.ranks]))
            for x in ddp.loader([torch.ones(2)] * 24, batch_size=8):
                ddp.backward(model(x).mean())
                ddp.step()
        return shares

    for shares in run_team(2, body):
        assert shares[0] == [8, 0]
