"""Elastic teams in SYNC: a rank is parked, and ranks die, join and leave meanwhile; on threads."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn

from evener import Ddp, WindowResult
from evener.engine import lookahead
from helpers.elastic import Kill, ThreadMembership
from helpers.elastic_runs import EPOCHS, NUM_SAMPLES, Parks, Trained, check, run
from helpers.sinks import Kept

BATCH = 4
WINDOWS = NUM_SAMPLES // BATCH * EPOCHS
#: Shares may be of a single sample.
OPTIONS: Any = {"batch_size": BATCH, "norm": nn.LayerNorm}


PARKED_FOR_THREE = [True] * 2 + [False] * 3 + [True] * (WINDOWS - 5)


class Run:
    """A run in which ranks are parked from window 2 on, and what came of it.

    Attributes:
        team: The team.
        trained: What each rank has that has come to the end.
        parked: By window, who was parked in it, as events say.
        changes: Events of other kinds, with the ranks that they name.
        told: What was said at the terminal.
    """

    def __init__(
        self,
        founders: int,
        kills: Iterable[Kill] = (),
        *,
        misfits: Iterable[int] = (2,),
        apart: int = 100,
        joins_after: int | None = None,
        at_commit: Callable[[Ddp, ThreadMembership, WindowResult], None] = lambda *_: None,
    ) -> None:
        self.told: list[str] = []
        self._ddps: dict[str, Ddp] = {}
        self._windows: dict[int, WindowResult] = {}
        kept = Kept()

        def prepare(ddp: Ddp) -> None:
            engine: Any = ddp.assembly.engine
            engine.lookahead.stale_policy = Parks(ddp, misfits, apart)
            engine.options.guards.notice = self.told.append
            self._ddps[engine.team.membership.member] = ddp

        def commit(membership: ThreadMembership, result: WindowResult) -> None:
            self._windows[result.window] = result
            at_commit(self._ddps[membership.member], membership, result)

        self.team, self.trained = run(
            founders,
            [*kills],
            joins_after=joins_after,
            at_commit=commit,
            sinks=[lambda: kept],
            prepare=prepare,
            **OPTIONS,
        )
        windows = [event for event in kept.events if event["type"] == "window"]
        self.parked = {event["window"]: event["parked"] for event in windows}
        kinds = ("worker_lost", "worker_left", "reformed", "healed", "worker_joined")
        self.changes = [(e["type"], e.get("rank")) for e in kept.events if e["type"] in kinds]
        self._check()

    def _check(self) -> None:
        """Every window once, all ranks alike, and as an undisturbed team by the same plans."""
        found = {name: one._replace(committed=_last(one)) for name, one in self.trained.items()}
        every = [self._windows[window] for window in sorted(self._windows)]
        check(
            self.team,
            {"all": next(iter(found.values()))._replace(committed=every), **found},
            **OPTIONS,
        )

    @property
    def members(self) -> list[tuple[str, ...]]:
        return [formation.members for formation in self.team.formations]

    def samples(self, rank: int) -> list[int]:
        """What a rank has done in each window."""
        return [self._windows[window].ranks[rank].samples for window in range(WINDOWS)]


def _last(one: Trained) -> list[WindowResult]:
    """What a rank has committed since it was parked or left out last."""
    first = WINDOWS
    while any(result.window == first - 1 for result in one.committed):
        first -= 1
    return [result for result in one.committed if result.window >= first]


def test_a_rank_is_parked_and_called_back_without_a_change_of_the_generation() -> None:
    found = Run(3, apart=1)
    assert found.members == [("w0", "w1", "w2")]
    assert [samples > 0 for samples in found.samples(2)] == PARKED_FOR_THREE
    assert found.parked == {window: [2] * (window in (2, 3, 4)) for window in range(WINDOWS)}
    assert [result.window for result in found.trained["w2"].committed] == [0, 1, *range(5, WINDOWS)]
    assert not found.changes


def test_a_rank_that_is_due_is_called_back_as_an_epoch_begins() -> None:
    found = Run(3, apart=6)
    first = WINDOWS // EPOCHS
    assert [samples > 0 for samples in found.samples(2)][:first] == [True] * 2 + [False] * (
        first - 2
    )
    assert found.samples(2)[first] > 0


@pytest.mark.parametrize(
    ("member", "what"),
    [
        ("w2", "split 'active'"),
        ("w0", "optimizer state"),
    ],
)
def test_a_rank_dies_while_another_one_is_parked_or_called_back(member: str, what: str) -> None:
    found = Run(3, [Kill(member, what)], apart=1)
    left = tuple(name for name in ("w0", "w1", "w2") if name != member)
    assert sorted(found.members[1]) == sorted(left)
    assert sorted(found.trained) == sorted(left)


def test_a_rank_is_lost_while_another_one_is_parked() -> None:
    found = Run(3, [Kill("w1", "gradients of window 2")])
    assert found.members == [("w0", "w1", "w2"), ("w0", "w2")]
    assert found.team.formations[1].receivers == ("w2",)
    assert found.changes == [("worker_lost", 1), ("reformed", None), ("healed", 2)]
    assert found.samples(2)[2] > 0


def test_a_parked_rank_is_lost_and_only_the_window_under_way_is_done_again() -> None:
    found = Run(3, [Kill("w2", "a round", skip=6)])
    assert found.members == [("w0", "w1", "w2"), ("w0", "w1")]
    assert found.team.formations[1].receivers == ()
    handed_out = sum(sum(one.handed_out) for one in found.trained.values())
    assert handed_out + sum(found.samples(2)) == NUM_SAMPLES * EPOCHS + BATCH


def test_a_worker_joins_while_a_rank_is_parked_which_is_called_back_before() -> None:
    found = Run(3, joins_after=0)
    assert found.members == [("w0", "w1", "w2"), ("w0", "w1", "w2", "j")]
    assert found.team.formations[1].receivers == ("j",)
    assert found.samples(3)[-1] > 0


def leaves(member: str) -> Callable[[Ddp, ThreadMembership, WindowResult], None]:
    def tell(ddp: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        membership.is_told_to_leave |= membership.member == member and result.window == 0

    return tell


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_leaves_while_one_is_parked_and_nothing_is_done_again(leaver: int) -> None:
    member = f"w{leaver}"
    found = Run(3, at_commit=leaves(member))
    assert isinstance(found.team.fate(member).error, KeyboardInterrupt)
    assert [len(members) for members in found.members] == [3, 2]
    assert found.team.formations[1].receivers == ()
    assert found.changes == [("worker_left", leaver), ("reformed", None)]


def test_a_parked_rank_continues_where_it_was_when_all_others_are_lost() -> None:
    def die(ddp: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        if membership.member == "w0" and result.window == 1:
            membership.team.die("w0")

    found = Run(2, misfits=[1], at_commit=die)
    assert found.members == [("w0", "w1"), ("w1",)]
    # Its state is older than that of the others: it waits until none of them can commit.
    assert not found.team.formations[1].has_state
    assert [result.window for result in found.trained["w1"].committed] == [*range(WINDOWS)]
    assert any("continues with window 2" in text for text in found.told)


def test_the_main_process_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "NOTEWORTHY_S", 0.0)
    found = Run(3, misfits=(0, 2))
    assert found.parked[2] == [2]
    assert any("rank 0 costs more than it contributes" in text for text in found.told)


def test_exchanges_of_a_rank_that_was_parked_have_the_numbers_of_the_others() -> None:
    heard: list[tuple[int, list[int]]] = []

    def tell(ddp: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        asked = ddp.assembly.engine.collectives.ask("telling the window", result.window)
        told = [*asked.values()]
        heard.append((result.window, told))
        if result.window == 5 and membership.member == "w1":
            membership.team.kills.append(Kill("w1", "answers"))

    found = Run(3, apart=1, at_commit=tell)
    assert found.members[1] == ("w0", "w2")
    assert all(set(told) == {window} for window, told in heard)
    assert {len(told) for window, told in heard if window in (2, 3)} == {2}
