"""What a script does besides training windows, while ranks are lost and join."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evener import Ddp, WindowResult
from evener.errors import UsageError
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import DATA, Run, begin, loss_of, make_model, state_of
from helpers.models import seeded

EPOCHS = 4
HELD_OUT = DATA[:13]

# Rounds of rows of ``Script``: 0 averages a number; 1, 2 calibrate; 3, 4 plan; 5 to 8 close the
# windows of an epoch; 9 ends it; 10 begins an evaluation, 11 ends it; 12 averages its results.
BEGIN_EVALUATION, AVERAGE_RESULTS = 10, 12


class Scale:
    """A number that a script has found before its loop, and registers for workers that join."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Script:
    """Averages a number before the loop, and evaluates after each epoch."""

    def __init__(
        self, founders: int, kills: list[Kill] | None = None, joins_after: int = -1
    ) -> None:
        self.team = ElasticThreads(founders, kills=kills or [])
        self.joins_after = joins_after
        self.losses: dict[str, dict[int, float]] = {}
        self.found = self.team.run_to_end(self._work)

    def _work(self, membership: ThreadMembership) -> tuple[float, list[Tensor]]:
        losses = self.losses[membership.member] = {}
        with begin(membership) as ddp:
            scale = Scale(ddp.weighted_mean(membership.number + 1.0))
            ddp.register("scale", scale)
            ddp.on_commit(lambda result: self._add(ddp, result))
            loader = ddp.loader(DATA, batch_size=12, seed=3, micro_batch_size=2)
            for epoch in ddp.epochs(EPOCHS):
                for x, y in loader.epoch(epoch):
                    ddp.backward(loss_of(ddp, x, y) * scale.value)
                    ddp.step()
                losses[epoch] = evaluate(ddp)
            return scale.value, state_of(ddp)

    def _add(self, ddp: Ddp, result: WindowResult) -> None:
        if result.window == self.joins_after and ddp.is_main_process:
            self.team.add("j")

    def check(self, *members: str) -> None:
        """Check who came to the end, and that all have the same, the true loss included."""
        assert {*self.found} == {*members}
        (scale, state), *others = self.found.values()
        for other_scale, other in others:
            assert other_scale == scale
            assert all(map(torch.equal, other, state))
        names = make_model().state_dict()
        model = seeded(make_model, 0, torch.float64)
        model.load_state_dict(dict(zip(names, state, strict=True)))
        x, y = (torch.stack(part) for part in zip(*HELD_OUT, strict=True))
        for member in members:
            true = (model(x) - y).square().mean().item()
            assert self.losses[member][EPOCHS - 1] == pytest.approx(true)


def evaluate(ddp: Ddp) -> float:
    """The mean loss of the held-out samples, each of which counts once."""
    total = count = 0.0
    with ddp.evaluating():
        for x, y in ddp.eval_loader(HELD_OUT, batch_size=2):
            total += float((ddp.assembly.model(x) - y).square().sum())
            count += len(x)
    return ddp.weighted_mean(total / max(count, 1.0), count)


def test_a_rank_joins_a_script() -> None:
    script = Script(2, joins_after=5)
    script.check("w0", "w1", "j")
    # The last window of an epoch is committed when no window is planned: a joiner waits.
    assert [len(formation.members) for formation in script.team.formations] == [2, 3]


def test_a_rank_dies_in_an_evaluation() -> None:
    kill = Kill("w0", "a round", skip=BEGIN_EVALUATION, when="inside", told=["w2"])
    Script(3, [kill]).check("w1", "w2")


def test_an_average_without_a_lost_rank_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(2, [Kill("w1", "a round", skip=AVERAGE_RESULTS)])
    assert sorted(script.losses["w0"]) == [0, 1, 2, 3]
    told = capsys.readouterr().err
    assert "rank 1 was lost after its part of an evaluation" in told
    assert "test_elastic_scripts.py" in told


@pytest.mark.parametrize(("member", "what"), [("w0", "a round"), ("w1", "rows of all ranks")])
def test_every_row_is_gathered_once(what: str, member: str) -> None:
    def body(membership: ThreadMembership) -> list[float]:
        with begin(membership) as ddp:
            batches = ddp.eval_loader(torch.arange(13.0), batch_size=2)
            return torch.cat([ddp.gather(x) for x in batches]).tolist()

    kill = Kill(member, what, skip=2, when="inside", told=["w2"])
    one, other = ElasticThreads(3, kills=[kill]).run_to_end(body).values()
    assert sorted(one) == [*range(13)]
    assert one == other


@pytest.mark.parametrize(("skip", "told"), [(5, ["w2"]), (6, [])])
def test_functions_of_a_commit_average_on_all_ranks_that_remain(skip: int, told: list[str]) -> None:
    # 0 to 3 calibrate and plan, 4 closes window 0. 5 closes window 1 and tells that window 0 is
    # committed, after which 6 averages; and so on.
    kill = Kill("w1", "a round", skip=skip, when="inside" if told else "before", told=told)
    means: dict[str, list[float]] = {}

    def mean(ddp: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        means.setdefault(membership.member, []).append(ddp.weighted_mean(result.window))

    Run(3, [kill], at_commit=mean)
    assert means["w0"] == means["w2"] == [*range(8)]


def test_the_next_main_rank_saves_where_the_first_is_lost(tmp_path: Path) -> None:
    def body(membership: ThreadMembership) -> bool:
        with begin(membership) as ddp:
            ddp.save(tmp_path)
            return True

    team = ElasticThreads(3, kills=[Kill("w0", "answers", skip=1)])
    assert {*team.run_to_end(body)} == {"w1", "w2"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


# ── workers that join ────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_joins_in_a_loop_over_range_is_told_what_to_write() -> None:
    def body(membership: ThreadMembership) -> None:
        with begin(membership) as ddp:

            def commit(result: WindowResult) -> None:
                if result.window == 1 and ddp.is_main_process:
                    team.start("j")

            ddp.on_commit(commit)
            for x, y in ddp.loader(DATA, batch_size=12).epoch(0):
                ddp.backward(loss_of(ddp, x, y))
                ddp.step()

    team = ElasticThreads(2)
    with pytest.raises(UsageError, match=r"for epoch in ddp.epochs\(num_epochs\)"):
        team.run_to_end(body)
    assert [fate.member for fate in team.fates if fate.error is not None] == ["j"]


def test_positions_of_all_loaders_travel() -> None:
    def body(membership: ThreadMembership) -> tuple[int, set[tuple[int, int]]]:
        seen = set()
        with begin(membership) as ddp:

            def commit(result: WindowResult) -> None:
                if result.window == 4 and ddp.is_main_process:
                    team.add("j")

            ddp.on_commit(commit)
            loaders = [ddp.loader(DATA, batch_size=12, seed=seed) for seed in (1, 2)]
            for epoch in ddp.epochs(2):
                for number, loader in enumerate(loaders):
                    for x, y in loader.epoch(epoch):
                        seen.add((epoch, number))
                        ddp.backward(loss_of(ddp, x, y))
                        ddp.step()
            return ddp.window, seen

    team = ElasticThreads(2)
    found = team.run_to_end(body)
    assert [window for window, _ in found.values()] == [16] * 3
    assert (0, 0) not in found["j"][1]


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_worker_that_joins_trains_what_the_others_have_thawed(policy: str) -> None:
    """And does not train what they have frozen since, however its own script has left it."""

    def body(membership: ThreadMembership) -> tuple[list[bool], Any, list[Tensor]]:
        model = seeded(make_model, membership.number, torch.float64)
        assert isinstance(model, torch.nn.Sequential)
        model[:2].requires_grad_(False)
        with begin(membership, model=model, policy=policy) as ddp:

            def commit(result: WindowResult) -> None:
                if result.epoch == 2 and ddp.is_main_process:
                    team.add("j")

            ddp.on_commit(commit)
            loader = ddp.loader(DATA[:32], batch_size=2, seed=3)
            for epoch in ddp.epochs(5):
                if membership.member != "j" and epoch in (1, 2):
                    model[epoch - 1].requires_grad_(True)
                    model[2].requires_grad_(False)
                for x, y in loader.epoch(epoch):
                    ddp.backward(loss_of(ddp, x, y))
                    ddp.step()
            groups = [group.names for group in ddp.assembly.flat.groups]
            return [p.requires_grad for p in model.parameters()], groups, state_of(ddp)

    team = ElasticThreads(2)
    found = team.run_to_end(body)
    assert team.formations[-1].members == ("w0", "w1", "j")
    for flags, groups, state in found.values():
        assert flags == [True] * 4 + [False] * 2
        assert [names[0].partition(".")[0] for names in groups] == ["2", "0", "1"]
        assert all(map(torch.equal, state, found["w0"][2]))
