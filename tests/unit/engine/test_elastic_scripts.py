"""What a script does besides training windows, while ranks die and join; on threads."""

from pathlib import Path

import pytest
import torch

from evener import Ddp, WindowResult
from evener.errors import RunEndedError, UsageError
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import BATCH, DATA, begin, train
from helpers.elastic_runs import check as check_training
from helpers.elastic_scripts import Finding, run_script

# Rounds of rows of the script: 0 averages a number; 1, 2 calibrate; 3, 4 plan; 5 to 8 close the
# windows of an epoch; 9 ends it; 10 begins an evaluation, 11 ends it; 12 averages its results.
FIRST_MEAN, BEGIN_EVALUATION, END_EVALUATION, AVERAGE_RESULTS = 0, 10, 11, 12


def check(found: dict[str, Finding]) -> None:
    """All members have the same, and every held-out sample counts once."""
    first = max(found.values(), key=lambda one: len(one.alone))
    for one in found.values():
        assert one.scale == first.scale
        assert one.losses == {epoch: first.losses[epoch] for epoch in one.losses}
        assert all(map(torch.equal, one.state, first.state))
        assert all(one.losses[epoch] == pytest.approx(one.alone[epoch]) for epoch in one.alone)


@pytest.mark.parametrize("joins_after", [5])
def test_a_rank_joins_a_script(joins_after: int) -> None:
    team, found = run_script(2, joins_after=joins_after)
    check(found)
    assert sorted(found) == ["j", "w0", "w1"]
    # The last window of an epoch is committed when no window is planned: a joiner waits.
    assert [len(formation.members) for formation in team.formations] == [2, 3]


def test_a_worker_that_joins_in_a_loop_over_range_is_told_what_to_write() -> None:
    def body(membership: ThreadMembership) -> None:
        with begin(membership, seed=1) as ddp:
            model = ddp.assembly.model
            ddp.on_commit(
                lambda result: (
                    membership.team.start("j")
                    if result.window == 1 and ddp.is_main_process
                    else None
                )
            )
            loader = ddp.loader(DATA, batch_size=BATCH, micro_batch_size=4)
            for epoch in range(2):
                for x, y in loader.epoch(epoch):
                    ddp.backward(((model(x) - y) ** 2).mean())
                    ddp.step()

    team = ElasticThreads(2)
    team.run(body)
    assert [team.fate(name).error for name in ("w0", "w1")] == [None, None]
    error = team.fate("j").error
    assert isinstance(error, UsageError)
    assert "for epoch in ddp.epochs(num_epochs)" in str(error)


@pytest.mark.parametrize(
    ("member", "what", "skip", "when"),
    [
        ("w0", "a round", BEGIN_EVALUATION, "inside"),
    ],
)
def test_a_rank_dies_in_an_evaluation(member: str, what: str, skip: int, when: str) -> None:
    told = ["w2"] if when == "inside" else []
    _, found = run_script(3, [Kill(member, what, skip=skip, when=when, told=told)])
    check(found)
    assert len(found) == 2


def test_an_average_without_a_lost_rank_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_script(2, [Kill("w1", "a round", skip=AVERAGE_RESULTS)])
    assert sorted(found["w0"].losses) == [0, 1, 2, 3]
    told = capsys.readouterr().err
    assert "rank 1 was lost after its part of an evaluation" in told
    assert "elastic_scripts.py" in told


@pytest.mark.parametrize(("member", "what"), [("w0", "a round"), ("w1", "rows of all ranks")])
@pytest.mark.parametrize("when", ["inside"])
def test_every_row_is_gathered_once(what: str, when: str, member: str) -> None:
    kill = Kill(member, what, skip=2, when=when, told=["w2"] if when == "inside" else [])

    def body(membership: ThreadMembership) -> list[float]:
        with begin(membership, seed=1) as ddp:
            rows = []
            for x, _ in ddp.eval_loader(DATA[:13], batch_size=2):
                rows.append(ddp.gather(x[:, 0]))
            return (torch.cat(rows) * 32).tolist()

    team = ElasticThreads(3, kills=[kill])
    team.run(body)
    found = [team.fate(name).value for name in ({"w0", "w1", "w2"} - {member})]
    assert sorted(found[0]) == [*range(13)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("skip", "told"), [(5, ["w2"]), (6, [])])
def test_functions_of_a_commit_average_on_all_ranks_that_remain(skip: int, told: list[str]) -> None:
    # 0 to 3 calibrate and plan, 4 closes window 0. 5 closes window 1 and tells that window 0 is
    # committed, after which 6 averages; and so on.
    kill = Kill("w1", "a round", skip=skip, when="inside" if told else "before", told=told)
    means: dict[str, list[float]] = {}

    def mean(ddp: Ddp, result: WindowResult) -> None:
        means.setdefault(ddp.assembly.team.membership.member, []).append(
            ddp.weighted_mean(result.window)
        )

    team = ElasticThreads(3, kills=[kill])
    team.run(lambda membership: train(membership, mean))
    trained = {fate.member: fate.value for fate in team.fates if fate.error is None}
    check_training(team, trained)
    assert means["w0"] == means["w2"] == [*range(8)]


def test_the_next_main_rank_saves_where_the_first_is_lost(tmp_path: Path) -> None:
    def body(membership: ThreadMembership) -> None:
        with begin(membership, seed=1) as ddp:
            ddp.save(tmp_path)

    team = ElasticThreads(3, kills=[Kill("w0", "answers", skip=1)])
    team.run(body)
    assert [team.fate(name).error for name in ("w1", "w2")] == [None, None]
    assert len(team.formations) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


def test_positions_of_all_loaders_travel() -> None:
    def body(membership: ThreadMembership) -> list[tuple[int, int]]:
        with begin(membership, seed=membership.number + 1) as ddp:
            model, seen = ddp.assembly.model, []

            def start(result: WindowResult) -> None:
                team = membership.team
                if result.window == 4 and ddp.is_main_process:
                    team.add("j", body)

            ddp.on_commit(start)
            loaders = [
                ddp.loader(DATA, batch_size=BATCH, seed=seed, micro_batch_size=4) for seed in (1, 2)
            ]
            for epoch in ddp.epochs(2):
                for number, loader in enumerate(loaders):
                    for x, y in loader.epoch(epoch):
                        seen.append((epoch, number))
                        ddp.backward(((model(x) - y) ** 2).mean())
                        ddp.step()
            assert ddp.window == 16
            return sorted({*seen})

    team = ElasticThreads(2)
    team.run(body)
    assert [fate.error for fate in team.fates] == [None] * 3
    assert (0, 0) not in team.fate("j").value


def start_joiner(team: ElasticThreads, ddp: Ddp) -> None:
    """Let the main rank start another worker, and wait until it is there."""
    if ddp.is_main_process:
        team.add("j")


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_worker_that_joins_trains_what_the_others_have_thawed(policy: str) -> None:
    """And does not train what they have frozen since, however its own script has left it."""

    def body(membership: ThreadMembership) -> tuple[list[bool], list[torch.Tensor]]:
        with begin(membership, seed=membership.number + 1, freezes=[0, 1], policy=policy) as ddp:
            model = ddp.assembly.model
            ddp.on_commit(
                lambda result: start_joiner(membership.team, ddp) if result.epoch == 2 else None
            )
            loader = ddp.loader(DATA, batch_size=2, seed=3)
            for epoch in ddp.epochs(5):
                if membership.member != "j" and epoch in (1, 2):
                    model[epoch - 1].requires_grad_(True)
                    model[2].requires_grad_(False)
                for x, y in loader.epoch(epoch):
                    ddp.backward(((model(x) - y) ** 2).mean())
                    ddp.step()
            groups = [group.names for group in ddp.assembly.flat.groups]
            assert groups == [
                ("2.bias", "2.weight"),
                ("0.bias", "0.weight"),
                ("1.bias", "1.weight"),
            ]
            state = [tensor.detach().clone() for tensor in model.state_dict().values()]
            return [p.requires_grad for p in model.parameters()], state

    team = ElasticThreads(2)
    team.run(body)
    assert [fate.error for fate in team.fates] == [None] * 3
    assert team.formations[-1].members == ("w0", "w1", "j")
    flags, state = team.fate("w0").value
    assert flags == [True] * 4 + [False] * 2
    for other in ("w1", "j"):
        assert team.fate(other).value[0] == flags
        assert all(map(torch.equal, team.fate(other).value[1], state))


def test_a_worker_that_comes_after_a_stop_does_not_begin_again() -> None:
    def body(membership: ThreadMembership) -> int:
        with begin(membership, seed=1) as ddp:
            ddp.on_commit(lambda result: ddp.stop())
            model = ddp.assembly.model
            loader = ddp.loader(DATA, batch_size=BATCH, micro_batch_size=4)
            for epoch in ddp.epochs(1):
                for x, y in loader.epoch(epoch):
                    ddp.backward(((model(x) - y) ** 2).mean())
                    ddp.step()
            window = ddp.window
        if membership.member == "w0":
            membership.team.start("late")
        return window

    team = ElasticThreads(2)
    team.run(body)
    assert team.fate("w0").value == team.fate("w1").value < 4
    assert isinstance(team.fate("late").error, RunEndedError)
    assert len(team.formations) == 1
