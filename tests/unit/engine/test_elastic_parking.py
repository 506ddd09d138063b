"""Elastic teams in which a rank is parked from window 2 on, while others die, join and leave."""

from typing import Any

import pytest

from evener import Ddp, WindowResult
from evener.engine import lookahead
from helpers.elastic import Kill, ThreadMembership
from helpers.elastic_runs import EPOCHS, Run

BATCH, WINDOWS, SAMPLES = 6, 16, 96
FOR_LONG = 100


def run_parked(
    *kills: Kill,
    founders: int = 3,
    misfits: tuple[int, ...] = (2,),
    apart: int = FOR_LONG,
    **options: Any,
) -> Run:
    return Run(founders, kills, batch_size=BATCH, parks=(misfits, apart), **options)


def test_a_rank_is_parked_and_called_back_in_the_same_generation() -> None:
    run = run_parked(apart=1)
    assert run.members == [("w0", "w1", "w2")]
    parked = {window: (2,) * (window in (2, 3, 4)) for window in range(WINDOWS)}
    assert {window: result.parked for window, result in run.windows.items()} == parked
    assert [samples == 0 for samples in run.samples(2)] == [bool(parked[w]) for w in range(WINDOWS)]
    assert run.committed["w2"] == [0, 1, *range(5, WINDOWS)]
    assert not run.changes


def test_a_rank_that_is_due_is_called_back_as_an_epoch_begins() -> None:
    working = [samples > 0 for samples in run_parked(apart=6).samples(2)]
    first = WINDOWS // EPOCHS
    assert working[: first + 1] == [True, True, *[False] * (first - 2), True]


@pytest.mark.parametrize(
    ("kill", "apart"),
    [
        (Kill("w1", "gradients of window 2"), FOR_LONG),
        (Kill("w2", "a round", skip=6), FOR_LONG),
        (Kill("w2", "split 'active'"), 1),
        (Kill("w0", "optimizer state"), 1),
    ],
    ids=["another one", "the parked one", "as it is parked", "as it is called back"],
)
def test_a_rank_is_lost(kill: Kill, apart: int) -> None:
    run = run_parked(kill, apart=apart)
    left = {"w0", "w1", "w2"} - {kill.member}
    assert [{*members} for members in run.members] == [{"w0", "w1", "w2"}, left]
    assert {*run.trained} == left
    if kill.member == "w1":
        assert run.team.formations[1].receivers == ("w2",)
        assert run.changes == [("worker_lost", 1), ("reformed", None), ("recovered", 2)]
    if kill.skip:  # only the window under way is done again
        handed_out = sum(one.handed_out for one in run.trained.values())
        assert handed_out + sum(run.samples(2)) == SAMPLES + BATCH


def test_a_worker_joins_when_the_parked_rank_was_called_back() -> None:
    run = run_parked(joins_after=0)
    assert run.members == [("w0", "w1", "w2"), ("w0", "w1", "w2", "j")]
    assert run.team.formations[1].receivers == ("j",)
    assert run.samples(3)[-1] > 0


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_leaves_and_nothing_is_done_again(leaver: int) -> None:
    def tell(_: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        membership.is_told_to_leave |= membership.number == leaver and result.window == 0

    run = run_parked(at_commit=tell)
    assert isinstance(run.team.fate(f"w{leaver}").error, KeyboardInterrupt)
    assert run.team.formations[1].receivers == ()
    assert run.changes == [("worker_left", leaver), ("reformed", None)]


def test_a_parked_rank_continues_where_it_was_when_all_others_are_lost() -> None:
    def die(_: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        if membership.member == "w0" and result.window == 1:
            membership.team.die("w0")

    run = run_parked(founders=2, misfits=(1,), at_commit=die)
    assert run.members == [("w0", "w1"), ("w1",)]
    # Its state is older than that of the others: it waits until none of them can commit.
    assert not run.team.formations[1].has_state
    assert run.committed["w1"] == [*range(WINDOWS)]
    assert any("continues with window 2" in text for text in run.told)


def test_the_main_process_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "NOTEWORTHY_S", 0.0)
    run = run_parked(misfits=(0, 2))
    assert run.windows[2].parked == (2,)
    assert any("rank 0 costs more than it contributes" in text for text in run.told)


def test_exchanges_of_a_rank_that_was_parked_have_the_numbers_of_the_others() -> None:
    heard: list[tuple[int, list[int]]] = []

    def tell(ddp: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        asked = ddp.assembly.engine.collectives.ask("telling the window", result.window)
        heard.append((result.window, [*asked.values()]))
        if result.window == 5 and membership.member == "w1":
            membership.team.kills.append(Kill("w1", "answers"))

    run = run_parked(apart=1, at_commit=tell)
    assert run.members[1] == ("w0", "w2")
    assert all({*told} == {window} for window, told in heard)
    assert {len(told) for window, told in heard if window in (2, 3)} == {2}
