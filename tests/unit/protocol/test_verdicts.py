"""The table of transitions, row by row: what ``judge`` and ``land`` make of rows."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from evener.errors import CollectiveMismatchError, ProtocolError, UsageError
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import LOSS, NOTHING, Report
from evener.protocol.formation import Formation
from evener.protocol.machine import Action, Decision, Phase, State, judge, land
from evener.protocol.row import Purpose, Row

DATA = {"num_samples": 600, "batch_size": 8, "seed": 7}
FIRST, SECOND = (WindowPlan(window, 0, window * 4, 4, (2, 2), (0, 0)) for window in (3, 4))
THIRD = WindowPlan(5, 0, 20, 4, (2, 2), (0, 0))
TWO = Report(weight=2.0, loss_sum=6.0, samples=2)


def working(rank: int = 0, **given: Any) -> State:
    """A rank of two in the middle of an epoch of SYNC."""
    fields: dict[str, Any] = {
        "me": rank,
        "world_size": 2,
        "policy": ApplyPolicy.SYNC,
        "members": (0, 1),
        "phase": Phase.WORK,
        "window": 3,
        "plans": (FIRST, SECOND),
        "applied": True,
    }
    return State(**fields | given)


def local_plan(window: int = 3, **given: Any) -> LocalPlan:
    fields: dict[str, Any] = {
        "window": window,
        "epoch": 0,
        "window_s": 1.0,
        "blocking": False,
        "steps": (2, 2),
        "most": (4, 4),
        "queues": (6, 6),
    }
    return LocalPlan(**fields | given)


def flying(rank: int = 0, *, blocking: bool = False, **given: Any) -> State:
    """A rank of two whose window of local steps is being exchanged."""
    plan = local_plan(blocking=blocking)
    fields = {"policy": ApplyPolicy.CADENCE, "plans": (plan,), "flight": plan}
    return working(rank, **fields | given)


def row(purpose: Purpose = Purpose.WINDOW, **given: Any) -> Row:
    fields: dict[str, Any] = {"window": 3, "trainable": 5}
    if purpose in (Purpose.WINDOW, Purpose.STEP):
        fields["report"] = TWO
    return Row(purpose=purpose, **fields | given)


def both(state: State, *rows: Row) -> Decision:
    """The verdict of one of two ranks."""
    return judge(state, dict(enumerate(rows)))


IDLE = row(Purpose.IDLE)
NO_WEIGHT = TWO._replace(weight=0.0, loss_sum=0.0)
BAD = TWO._replace(non_finite=LOSS)
COMMIT, APPLY = Action.COMMIT, Action.APPLY


@dataclass
class Case:
    """What one of two ranks makes of rows: its actions, and fields of decision and state."""

    state: State
    rows: tuple[Row, Row]
    actions: tuple[Action, ...]
    after: dict[str, Any] = field(default_factory=dict)
    decision: dict[str, Any] = field(default_factory=dict)


CASES = {
    # windows of SYNC
    "a window is committed and the next one applied": Case(
        working(),
        (row(plan=THIRD), row()),
        (COMMIT, APPLY),
        {"window": 4, "applied": True, "plans": (SECOND, THIRD), "phase": Phase.WORK},
        {"weight": 4.0, "loss": 3.0, "part": None, "skip": False},
    ),
    "a stop ends the epoch after the window that is computed": Case(
        working(),
        (row(plan=THIRD), row(stop=True)),
        (COMMIT, APPLY),
        {"stopping": True, "phase": Phase.OUT},
    ),
    "a change of the members comes after the window": Case(
        working(), (row(plan=THIRD, renew=True), row()), (COMMIT, APPLY, Action.CHANGE)
    ),
    "no change is made that the planner does not wish": Case(
        working(), (row(plan=THIRD), row(renew=True)), (COMMIT, APPLY)
    ),
    "at its end an epoch has another place for a change": Case(
        working(plans=(FIRST,)), (row(renew=True), row()), (COMMIT, APPLY)
    ),
    "a stop leaves no team to change": Case(
        working(), (row(plan=THIRD, renew=True, stop=True), row()), (COMMIT, APPLY)
    ),
    "an optimizer's turn leaves the window open": Case(
        working(),
        (row(part=1), row(part=1)),
        (COMMIT, Action.STEP_ONE),
        {"window": 3, "applied": False, "plans": (FIRST, SECOND)},
        {"part": 1},
    ),
    "without a plan one optimizer's step closes the window": Case(
        working(plans=(), phase=Phase.OUT),
        (row(Purpose.STEP, part=1), row(Purpose.STEP, part=1)),
        (COMMIT, APPLY),
        {"window": 4},
        {"part": 1},
    ),
    "a rank without a share has no say in which optimizer is stepped": Case(
        working(plans=(replace(FIRST, shares=(0, 4)), SECOND)),
        (IDLE._replace(report=NOTHING), row(part=1, report=TWO._replace(samples=4))),
        (COMMIT, Action.STEP_ONE),
        decision={"part": 1},
    ),
    "a window without weight is left out": Case(
        working(),
        (row(plan=THIRD, report=NO_WEIGHT), row(report=NO_WEIGHT)),
        (COMMIT, APPLY),
        decision={"skip": True, "weight": 0.0},
    ),
    "what is not finite stops all ranks": Case(
        working(),
        (row(), row(report=BAD)),
        (COMMIT, Action.RESTORE),
        {"plans": (FIRST, SECOND)},
        {"culprit": 1},
    ),
    "what is not finite is left out where that is allowed": Case(
        working(),
        (row(plan=THIRD), row(report=BAD, may_skip=True)),
        (COMMIT, APPLY),
        decision={"culprit": None, "skip": True},
    ),
    "every rank on which something is not finite must allow it": Case(
        working(),
        (row(report=BAD, may_skip=True), row(report=BAD)),
        (COMMIT, Action.RESTORE),
        decision={"culprit": 0},
    ),
    "different learning rates are exchanged before the window is applied": Case(
        working(),
        (row(plan=THIRD, rates=1.0), row(rates=2.0)),
        (COMMIT, Action.RATES, APPLY),
    ),
    "a stop in mid-window drops it and the plans": Case(
        working(winding=True),
        (row(), row(drop=True)),
        (COMMIT, Action.DROP),
        {"window": 3, "plans": (), "winding": False, "phase": Phase.OUT, "stopping": True},
    ),
    "a share that did not fit into memory repeats the window by the same plans": Case(
        working(),
        (row(), row(redo=True)),
        (COMMIT, Action.REDO),
        {"window": 3, "plans": working().plans, "phase": Phase.WORK, "stopping": False},
    ),
    "a window that would be repeated is dropped where the team stops": Case(
        working(),
        (row(stop=True), row(redo=True)),
        (COMMIT, Action.DROP),
        {"window": 3, "plans": (), "phase": Phase.OUT, "stopping": True},
    ),
    # other rounds
    "a value is answered by the rows alone and may tell of a stop": Case(
        working(),
        (row(Purpose.ASK), row(Purpose.ASK, stop=True)),
        (),
        working(stopping=True)._asdict(),
    ),
    "a change of the generation commits the window before": Case(
        working(), (row(Purpose.CHANGE), row(Purpose.CHANGE)), (COMMIT,), {"applied": False}
    ),
    "after a stop no epoch begins": Case(
        working(plans=(), phase=Phase.OUT),
        (row(Purpose.PLAN, **DATA, plan=FIRST), row(Purpose.PLAN, **DATA, stop=True)),
        (),
        {"phase": Phase.OUT},
    ),
    "a plan without local steps ends the epoch": Case(
        working(policy=ApplyPolicy.CADENCE, plans=(local_plan(2),)),
        (row(Purpose.PLAN, **DATA, plan=local_plan(most=(0, 0))), row(Purpose.PLAN, **DATA)),
        (),
        {"plans": (), "phase": Phase.OUT},
    ),
    # at rest
    "rest commits and ends what was left": Case(
        working(phase=Phase.REST),
        (row(Purpose.REST), row(Purpose.REST, left=True)),
        (COMMIT,),
        {"applied": False, "plans": (), "phase": Phase.OUT, "led_out": False},
    ),
    "rest in mid-epoch goes on where nobody has left": Case(
        working(),
        (row(Purpose.REST), row(Purpose.REST)),
        (COMMIT,),
        working(applied=False)._asdict(),
    ),
    "rest leads a rank without a share out": Case(
        working(),
        (IDLE, row(Purpose.REST, left=True)),
        (COMMIT,),
        {"led_out": True, "phase": Phase.OUT},
    ),
    "a rank without a share is led out of no loop that nobody has left": Case(
        working(), (IDLE, row(Purpose.REST)), (COMMIT,), {"led_out": False}
    ),
    "a rank with an exchange in flight lands it before all rest": Case(
        flying(), (row(Purpose.REST, busy=True), row(Purpose.REST)), (), flying()._asdict()
    ),
    # windows of local steps
    "what is not finite ends the epoch of local steps": Case(
        flying(),
        (row(), row(report=BAD)),
        (COMMIT, Action.RESTORE),
        {"flight": None, "plans": (), "phase": Phase.OUT},
        {"culprit": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_from_the_rows_of_a_round(name: str) -> None:
    case = CASES[name]
    found = both(case.state, *case.rows)
    assert found.error is None
    assert found.actions == case.actions
    fields = found.state._asdict()
    assert {name: fields[name] for name in case.after} == case.after
    assert {name: getattr(found, name) for name in case.decision} == case.decision


ERRORS = {
    "different optimizers": (
        (row(part=1), row()),
        UsageError,
        "rank 0 steps optimizer 1, rank 1 all optimizers",
    ),
    "samples that differ from the plan": (
        (row(), row(report=TWO._replace(samples=3))),
        ProtocolError,
        "rank 1 computed 3 samples of window 3, not the planned 2",
    ),
    "a bad weight": ((row(), row(report=TWO._replace(weight=-1.0))), UsageError, "weight=-1.0"),
    "different trainable parameters": (
        (row(), row(trainable=6)),
        UsageError,
        "5 on rank 0, 6 on rank 1",
    ),
    "sums beside means": (
        (row(summed=True), row()),
        UsageError,
        "rank 0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_rows_that_contradict_one_another_are_an_error_after_the_commit(name: str) -> None:
    rows, kind, words = ERRORS[name]
    found = both(working(), *rows)
    assert isinstance(found.error, kind)
    assert words in str(found.error)
    assert found.actions == (COMMIT,)


@pytest.mark.parametrize("place", range(3))
def test_other_data_on_a_rank_is_an_error(place: int) -> None:
    other = {name: number + (k == place) for k, (name, number) in enumerate(DATA.items())}
    found = both(working(plans=()), row(Purpose.PLAN, **DATA), row(Purpose.PLAN, **other))
    assert isinstance(found.error, UsageError)
    assert "rank 1 trains on" in str(found.error)
    assert "rank 0 on 600 samples with batch_size 8 and seed 7" in str(found.error)


@pytest.mark.parametrize(
    "other",
    [row(Purpose.REST), IDLE, row(Purpose.ASK, window=4), row(Purpose.ASK, generation=1)],
    ids=["purpose", "idle", "window", "generation"],
)
def test_ranks_at_odds_end_with_the_same_error(other: Row) -> None:
    for rows in ([row(Purpose.ASK), other], [other, row(Purpose.ASK)]):
        found = both(working(), *rows)
        assert isinstance(found.error, CollectiveMismatchError)
        assert found.actions == ()
        assert found.state.phase is Phase.ENDED


@pytest.mark.parametrize("purpose", [Purpose.WINDOW, Purpose.REST, Purpose.CHANGE])
def test_states_that_differ_are_compared_before_a_commit(purpose: Purpose) -> None:
    found = both(working(), row(purpose, digest=7.0), row(purpose, digest=8.0))
    assert found.actions[:2] == (Action.VERIFY, COMMIT)
    alike = both(working(), row(purpose, digest=7.0), row(purpose, digest=7.0))
    assert alike.actions == found.actions[1:]


def test_the_plan_is_that_of_the_planner() -> None:
    state = working(
        2, world_size=3, members=(1, 2), planner=1, plans=(replace(FIRST, shares=(0, 2, 2)),)
    )
    plan = replace(SECOND, shares=(0, *SECOND.shares), parked=(1, 0, 0))
    found = judge(state, {1: row(plan=plan), 2: row()})
    assert found.state.plans == (plan,)
    assert found.state.planner == 1


def test_a_row_tells_that_its_loop_was_left() -> None:
    said = working(phase=Phase.REST).make_row(Purpose.REST).own
    assert said == row(Purpose.REST, left=True, trainable=0)


# ── a window of local steps lands ────────────────────────────────────────────────────────────────


def stepped(steps: int = 2, **given: Any) -> Row:
    return row(report=TWO._replace(steps=steps), **given)


def landed(state: State, *rows: Row, plan: LocalPlan | None = None) -> Decision:
    found = dict(enumerate(rows))
    return land(state, found, plan, judge(state, found))


def test_a_window_in_which_nobody_stepped_is_no_window() -> None:
    found = landed(flying(applied=False), stepped(0), stepped(0), plan=local_plan())
    assert found.state.window == 3
    assert not found.state.applied


def test_a_stop_winds_the_epoch_down_by_one_more_window() -> None:
    plan = local_plan(4, blocking=True)
    state = landed(flying(), stepped(), stepped(stop=True), plan=plan).state
    assert state.stopping
    assert state.winding
    assert state.plans == (plan,)
    last = state._replace(flight=plan, plans=(plan,))
    rows = (stepped(window=4, stop=True), stepped(window=4, stop=True))
    state = landed(last, *rows).state
    assert (state.winding, state.plans, state.phase) == (False, (), Phase.OUT)
    assert not state.led_out


def test_a_break_winds_the_epoch_down_and_leads_others_out_of_it() -> None:
    plan, further = local_plan(4, blocking=True), local_plan(5)
    left = {"window": 4, "left": True}
    inside = landed(flying(), stepped(), stepped(left=True), plan=plan).state
    assert inside.winding
    gone = landed(flying(1, phase=Phase.REST), stepped(), stepped(left=True), plan=plan).state
    assert gone.phase is Phase.REST
    rows = stepped(window=4), stepped(**left)
    state = landed(inside._replace(flight=plan), *rows, plan=further).state
    assert (state.phase, state.led_out, state.plans) == (Phase.REST, True, ())
    state = landed(gone._replace(flight=plan), *rows, plan=further).state
    assert (state.phase, state.led_out, state.plans) == (Phase.REST, False, ())
    # Where the epoch was over anyway, nobody is led out of it; a last round is owed by all.
    state = landed(inside._replace(flight=plan), *rows).state
    assert (state.phase, state.led_out) == (Phase.REST, False)


# ── this rank's own actions ──────────────────────────────────────────────────────────────────────


def test_leaving_counts_where_something_may_be_owed() -> None:
    assert working().leave().phase is Phase.REST
    assert working(phase=Phase.OUT).leave().phase is Phase.REST  # of a stream
    assert flying(phase=Phase.OUT).leave().phase is Phase.OUT
    over = flying(phase=Phase.OUT, flight=None)
    assert over._replace(applied=True).leave().phase is Phase.REST  # the epoch's last window
    assert over._replace(applied=False).leave().phase is Phase.OUT
    assert working(phase=Phase.ENDED).leave().phase is Phase.ENDED


# ── parked ranks and generations ─────────────────────────────────────────────────────────────────


def parked(*ranks: int, **given: Any) -> State:
    """One of three ranks, of which some are parked in this window."""
    flags = tuple(int(rank in ranks) for rank in range(3))
    plans = tuple(replace(plan, shares=(2, 2, 0), parked=flags) for plan in (FIRST, SECOND))
    fields: dict[str, Any] = {"world_size": 3, "members": (0, 1, 2), "plans": plans}
    return working(**fields | {"parked": frozenset(ranks)} | given)


def test_the_plan_of_a_window_says_who_is_parked_and_between_epochs_nobody_is() -> None:
    state = parked(2, parked=frozenset())
    assert state.due_to_park == {2}
    assert state.regroup().parked == {2}
    assert parked(2, phase=Phase.OUT).due_to_park == frozenset()
    assert parked(2, plans=()).regroup().parked == frozenset()


def test_the_lowest_rank_that_stays_plans_also_when_the_others_have_come_back() -> None:
    state = parked(0, 1, parked=frozenset()).regroup()
    assert state.planner == 2
    assert state._replace(plans=()).regroup().planner == 2


def test_a_parked_rank_is_idle_whatever_the_others_do() -> None:
    plan = parked(2).plans[1]
    plan = replace(plan, window=5, start=20)
    found = judge(parked(2), {0: row(plan=plan), 1: row(), 2: IDLE._replace(trainable=9, rates=7)})
    assert found.actions == (Action.COMMIT, Action.APPLY)
    asked = judge(parked(2), {0: row(Purpose.ASK), 1: row(Purpose.ASK), 2: IDLE})
    assert (asked.actions, asked.error) == ((), None)
    rest = judge(parked(2), {0: row(Purpose.REST), 1: row(Purpose.REST), 2: IDLE})
    assert rest.actions == (Action.COMMIT,)


def test_a_parked_rank_stops_the_team_and_is_heard_when_it_leaves() -> None:
    rows = {0: row(Purpose.ASK), 1: row(Purpose.ASK), 2: IDLE._replace(stop=True)}
    assert judge(parked(2), rows).state.stopping
    leaving = {rank: one._replace(leaving=True, stop=False) for rank, one in rows.items()}
    assert judge(parked(2), {**leaving, 0: rows[0]}).state.leaving == (1, 2)
    assert judge(parked(2), leaving).state.stopping, "no rank would continue"


def test_a_parked_rank_at_another_window_is_at_odds_with_the_others() -> None:
    found = judge(parked(2), {0: row(), 1: row(), 2: IDLE._replace(window=4)})
    assert isinstance(found.error, CollectiveMismatchError)


def test_a_generation_begins_with_all_its_members_and_without_plans() -> None:
    formation = Formation(
        generation=7,
        members=("a", "c"),
        numbers=(0, 3),
        base=9,
        has_state=True,
        source="a",
        receivers=("c",),
    )
    state = parked(2, world_size=5, is_elastic=True, leaving=(1,)).renew(formation, 3)
    assert (state.me, state.generation, state.window, state.planner) == (3, 7, 9, 0)
    assert (state.members, state.parked, state.absent) == ((0, 3), frozenset(), {1, 2, 4})
    assert (state.plans, state.phase, state.applied, state.leaving) == ((), Phase.OUT, False, ())
