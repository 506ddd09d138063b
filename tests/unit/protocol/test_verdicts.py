"""The table of transitions, row by row: what ``judge`` and ``land`` make of rows."""

import math
from dataclasses import replace
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


# ── windows of SYNC ──────────────────────────────────────────────────────────────────────────────


def test_a_window_is_committed_and_the_next_one_applied() -> None:
    planned = row(plan=THIRD)
    found = both(working(), planned, row())
    assert found.actions == (Action.COMMIT, Action.APPLY)
    assert (found.weight, found.loss, found.part, found.skip) == (4.0, 3.0, None, False)
    state = found.state
    assert state.window == 4
    assert state.applied
    assert [plan.window for plan in state.plans] == [4, 5]
    assert state.phase is Phase.WORK


def test_nothing_is_committed_where_nothing_was_applied() -> None:
    assert both(working(applied=False), row(plan=THIRD), row()).actions == (Action.APPLY,)


@pytest.mark.parametrize("purpose", [Purpose.WINDOW, Purpose.REST, Purpose.CHANGE])
def test_states_that_differ_are_compared_before_a_commit(purpose: Purpose) -> None:
    found = both(working(), row(purpose, digest=7.0), row(purpose, digest=8.0))
    assert found.actions[:2] == (Action.VERIFY, Action.COMMIT)
    alike = both(working(), row(purpose, digest=7.0), row(purpose, digest=7.0))
    assert alike.actions == found.actions[1:]


def test_the_last_plan_ends_the_epoch() -> None:
    state = both(working(plans=(FIRST,)), row(), row()).state
    assert state.plans == ()
    assert state.phase is Phase.OUT
    assert state.applied


def test_a_stop_ends_the_epoch_after_the_window_that_is_computed() -> None:
    for rows in ([row(plan=THIRD, stop=True), row()], [row(plan=THIRD), row(stop=True)]):
        found = both(working(), *rows)
        assert found.actions == (Action.COMMIT, Action.APPLY)
        assert found.state.stopping
        assert found.state.phase is Phase.OUT


def test_the_plan_is_that_of_the_planner() -> None:
    state = working(
        2, world_size=3, members=(1, 2), planner=1, plans=(replace(FIRST, shares=(0, 2, 2)),)
    )
    plan = replace(SECOND, shares=(0, *SECOND.shares), parked=(1, 0, 0))
    found = judge(state, {1: row(plan=plan), 2: row()})
    assert found.state.plans == (plan,)
    assert found.state.planner == 1


def test_a_change_of_the_members_comes_after_the_window() -> None:
    found = both(working(), row(plan=THIRD, renew=True), row())
    assert found.actions[-2:] == (Action.APPLY, Action.CHANGE)
    assert Action.CHANGE not in both(working(), row(plan=THIRD), row(renew=True)).actions
    # At its end an epoch has another place for it, and a stop ends the team.
    assert Action.CHANGE not in both(working(plans=(FIRST,)), row(renew=True), row()).actions
    assert (
        Action.CHANGE not in both(working(), row(plan=THIRD, renew=True, stop=True), row()).actions
    )


def test_an_optimizers_turn_leaves_the_window_open() -> None:
    found = both(working(), row(part=1), row(part=1))
    assert found.actions == (Action.COMMIT, Action.TURN)
    assert found.part == 1
    state = found.state
    assert (state.window, state.applied) == (3, False)
    assert state.plans == (FIRST, SECOND)


def test_without_a_plan_one_optimizers_step_closes_the_window() -> None:
    stream = working(plans=(), phase=Phase.OUT)
    found = both(stream, row(Purpose.STEP, part=1), row(Purpose.STEP, part=1))
    assert found.actions == (Action.COMMIT, Action.APPLY)
    assert found.part == 1
    assert found.state.window == 4


def test_unlike_optimizers_are_an_error_that_names_both_ranks() -> None:
    found = both(working(), row(part=1), row())
    assert isinstance(found.error, UsageError)
    assert "rank 0 steps optimizer 1, rank 1 all optimizers" in str(found.error)
    assert found.actions == (Action.COMMIT,)


def test_a_rank_without_a_share_has_no_say_in_which_optimizer_is_stepped() -> None:
    plan = replace(FIRST, shares=(0, 4))
    said = row(part=1, report=TWO._replace(samples=4))
    found = both(working(plans=(plan, SECOND)), row(Purpose.IDLE, report=NOTHING), said)
    assert found.actions == (Action.COMMIT, Action.TURN)
    assert found.part == 1


def test_a_window_without_weight_is_left_out() -> None:
    nothing = TWO._replace(weight=0.0, loss_sum=0.0)
    found = both(working(), row(plan=THIRD, report=nothing), row(report=nothing))
    assert found.actions == (Action.COMMIT, Action.APPLY)
    assert found.skip
    assert math.isnan(found.loss)


def test_what_is_not_finite_stops_all_ranks_or_is_left_out_on_all() -> None:
    bad = TWO._replace(non_finite=LOSS)
    found = both(working(), row(), row(report=bad))
    assert found.culprit == 1
    assert found.actions == (Action.COMMIT, Action.RESTORE)
    assert found.state.plans == (FIRST, SECOND)
    found = both(working(), row(plan=THIRD), row(report=bad, may_skip=True))
    assert found.culprit is None
    assert found.skip
    assert found.actions == (Action.COMMIT, Action.APPLY)
    # Every rank on which something is not finite must allow it.
    found = both(working(), row(report=bad, may_skip=True), row(report=bad))
    assert found.culprit == 0


def test_samples_that_differ_from_the_plan_are_an_error() -> None:
    found = both(working(), row(), row(report=TWO._replace(samples=3)))
    assert isinstance(found.error, ProtocolError)
    assert "rank 1 computed 3 samples of window 3, planned were 2" in str(found.error)
    assert found.actions == (Action.COMMIT,)


def test_a_bad_weight_is_an_error_after_the_commit() -> None:
    found = both(working(), row(), row(report=TWO._replace(weight=-1.0)))
    assert isinstance(found.error, UsageError)
    assert found.actions == (Action.COMMIT,)


def test_unlike_numbers_of_trainable_parameters_are_an_error() -> None:
    found = both(working(), row(), row(trainable=6))
    assert isinstance(found.error, UsageError)
    assert "5 on rank 0, 6 on rank 1" in str(found.error)


def test_unlike_learning_rates_are_told_before_the_window_is_applied() -> None:
    found = both(working(), row(plan=THIRD, rates=1.0), row(rates=2.0))
    assert found.actions == (Action.COMMIT, Action.RATES, Action.APPLY)


# ── windows that are dropped ─────────────────────────────────────────────────────────────────────


def test_a_stop_in_mid_window_drops_it_and_the_plans() -> None:
    found = both(working(winding=True), row(), row(drop=True))
    assert found.actions == (Action.COMMIT, Action.DROP)
    state = found.state
    assert (state.window, state.plans, state.winding) == (3, (), False)
    assert state.phase is Phase.OUT
    assert state.stopping


def test_a_row_tells_that_its_loop_was_left() -> None:
    said = working(phase=Phase.REST).say(Purpose.REST).own
    assert said == row(Purpose.REST, left=True, trainable=0)


# ── other rounds ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "other",
    [
        row(Purpose.REST),
        row(Purpose.IDLE),
        row(Purpose.ASK, window=4),
        row(Purpose.ASK, generation=1),
    ],
    ids=["purpose", "idle", "window", "generation"],
)
def test_ranks_at_odds_end_with_the_same_error(other: Row) -> None:
    for rows in ([row(Purpose.ASK), other], [other, row(Purpose.ASK)]):
        found = both(working(), *rows)
        assert isinstance(found.error, CollectiveMismatchError)
        assert found.actions == ()
        assert found.state.phase is Phase.ENDED


def test_a_value_is_answered_by_the_rows_alone_and_may_tell_of_a_stop() -> None:
    found = both(working(), row(Purpose.ASK), row(Purpose.ASK, stop=True))
    assert found.actions == ()
    assert found.error is None
    assert found.state == working(stopping=True)


def test_a_change_of_the_generation_commits_the_window_before() -> None:
    found = both(working(), row(Purpose.CHANGE), row(Purpose.CHANGE))
    assert found.actions == (Action.COMMIT,)
    assert not found.state.applied
    assert both(working(applied=False), row(Purpose.CHANGE), row(Purpose.CHANGE)).actions == ()


def test_an_epoch_begins_with_the_planners_plan() -> None:
    fresh = working(plans=(), phase=Phase.OUT)
    said = {**DATA, "plan": FIRST}
    found = both(fresh, row(Purpose.PLAN, **said), row(Purpose.PLAN, **DATA))
    assert found.state.plans == (FIRST,)
    assert found.state.phase is Phase.WORK
    found = both(fresh, row(Purpose.PLAN, **DATA), row(Purpose.PLAN, **DATA))
    assert found.state.phase is Phase.OUT
    stopped = row(Purpose.PLAN, **DATA, stop=True)
    assert both(fresh, row(Purpose.PLAN, **said), stopped).state.phase is Phase.OUT


@pytest.mark.parametrize("place", range(3))
def test_other_data_on_a_rank_is_an_error(place: int) -> None:
    other = {name: number + (k == place) for k, (name, number) in enumerate(DATA.items())}
    rows = row(Purpose.PLAN, **DATA), row(Purpose.PLAN, **other)
    found = both(working(plans=()), *rows)
    assert isinstance(found.error, UsageError)
    assert "rank 1 trains on" in str(found.error)
    assert "rank 0 on 600 samples with batch_size 8 and seed 7" in str(found.error)


def test_a_plan_of_local_steps_takes_the_place_of_the_one_before() -> None:
    here, nothing = local_plan(), local_plan(4, most=(0, 0), steps=(0, 0))
    begun = working(policy=ApplyPolicy.CADENCE, plans=(local_plan(2),))
    for plan, phase in ((here, Phase.WORK), (nothing, Phase.OUT)):
        said = row(Purpose.PLAN, plan=plan, **DATA)
        state = both(begun, said, row(Purpose.PLAN, **DATA)).state
        assert state.phase is phase
        assert state.plans == ((plan,) if plan is here else ())


# ── at rest ──────────────────────────────────────────────────────────────────────────────────────


def test_rest_commits_and_ends_what_was_left() -> None:
    found = both(working(phase=Phase.REST), row(Purpose.REST), row(Purpose.REST, left=True))
    assert found.actions == (Action.COMMIT,)
    state = found.state
    assert (state.applied, state.plans, state.phase) == (False, (), Phase.OUT)
    assert not state.led_out


def test_rest_in_mid_epoch_goes_on_where_nobody_has_left() -> None:
    found = both(working(), row(Purpose.REST), row(Purpose.REST))
    assert found.actions == (Action.COMMIT,)
    assert found.state == working(applied=False)
    assert both(working(applied=False), row(Purpose.REST), row(Purpose.REST)).actions == ()


def test_rest_leads_a_rank_without_a_share_out() -> None:
    rows = row(Purpose.IDLE), row(Purpose.REST, left=True)
    found = both(working(), *rows)
    assert found.actions == (Action.COMMIT,)
    assert found.state.led_out
    assert found.state.phase is Phase.OUT
    assert not both(working(), row(Purpose.IDLE), row(Purpose.REST)).state.led_out


def test_who_has_an_exchange_in_flight_lands_it_before_all_rest() -> None:
    for rows in ([row(Purpose.REST, busy=True), row(Purpose.REST)],
                 [row(Purpose.REST), row(Purpose.REST, busy=True)]):  # fmt: skip
        found = both(flying(), *rows)
        assert found.actions == ()
        assert found.state == flying()


# ── windows of local steps ───────────────────────────────────────────────────────────────────────


def stepped(steps: int = 2, **given: Any) -> Row:
    return row(report=TWO._replace(steps=steps), **given)


def landed(state: State, *rows: Row, plan: LocalPlan | None = None) -> Decision:
    found = dict(enumerate(rows))
    return land(state, found, plan, judge(state, found))


def test_a_window_of_local_steps_is_exchanged_and_lands() -> None:
    found = both(flying(), stepped(), stepped())
    assert found.actions == (Action.COMMIT, Action.EXCHANGE)
    assert (found.weight, found.loss) == (4.0, 3.0)
    plan = local_plan(4)
    found = landed(flying(applied=False), stepped(), stepped(), plan=plan)
    assert found.actions == (Action.LAND,)
    state = found.state
    assert (state.window, state.applied, state.flight, state.plans) == (4, True, None, (plan,))
    assert state.phase is Phase.WORK
    assert not state.winding
    assert landed(flying(), stepped(), stepped(), plan=plan).actions == (Action.COMMIT, Action.LAND)


def test_a_window_in_which_nobody_stepped_is_no_window() -> None:
    found = landed(flying(applied=False), stepped(0), stepped(0), plan=local_plan())
    assert found.state.window == 3
    assert not found.state.applied


def test_what_is_not_finite_ends_the_epoch_of_local_steps() -> None:
    bad = row(report=TWO._replace(steps=2, non_finite=LOSS))
    found = both(flying(), stepped(), bad)
    assert found.culprit == 1
    assert found.actions == (Action.COMMIT, Action.RESTORE)
    assert (found.state.flight, found.state.plans, found.state.phase) == (None, (), Phase.OUT)


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


def test_an_epoch_begins_with_nothing_of_the_one_before() -> None:
    old = working(phase=Phase.REST, winding=True, led_out=True)
    assert old.release() == working(phase=Phase.OUT, plans=(), led_out=True)
    assert old.begin() == working(phase=Phase.OUT, plans=())
    assert working(phase=Phase.ENDED).release().phase is Phase.ENDED
    over = flying(own=row()).end()
    assert (over.phase, over.own, over.flight) == (Phase.ENDED, None, None)


# ── parked ranks and generations ─────────────────────────────────────────────────────────────────


def parked(*ranks: int, **given: Any) -> State:
    """One of three ranks, of which some are parked in this window."""
    flags = tuple(int(rank in ranks) for rank in range(3))
    plans = tuple(replace(plan, shares=(2, 2, 0), parked=flags) for plan in (FIRST, SECOND))
    fields: dict[str, Any] = {"world_size": 3, "members": (0, 1, 2), "plans": plans}
    return working(**fields | {"parked": frozenset(ranks)} | given)


IDLE = row(Purpose.IDLE)


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
        donor="a",
        receivers=("c",),
    )
    state = parked(2, world_size=5, is_elastic=True, leaving=(1,)).renew(formation, 3)
    assert (state.me, state.generation, state.window, state.planner) == (3, 7, 9, 0)
    assert (state.members, state.parked, state.absent) == ((0, 3), frozenset(), {1, 2, 4})
    assert (state.plans, state.phase, state.applied, state.leaving) == ((), Phase.OUT, False, ())
