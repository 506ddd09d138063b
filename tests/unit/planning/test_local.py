"""Plans of CADENCE windows, and the clock that closes them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.planning.cadence import CadencePolicy
from evener.planning.clock import WindowClock
from evener.planning.elche import ElChe
from evener.planning.guard import LevelGuard, NoGuard, Verdict
from evener.planning.policies import ApplyPolicy
from evener.planning.report import Report

# ── the planner ──────────────────────────────────────────────────────────────────────────────────


def policy(world_size=2, anchor=10, guard=None, **options) -> CadencePolicy:
    members = [f"m{r}" for r in range(world_size)]
    return CadencePolicy(members, ElChe(world_size, anchor), guard or NoGuard(), **options)


def timed(*ms: float, steps=None, divergence=0.0) -> list[Report]:
    counts = steps or [1] * len(ms)
    return [
        Report(steps=c, samples=8 * c, busy_s=c * m / 1000, divergence=divergence)
        for c, m in zip(counts, ms, strict=True)
    ]


def test_the_first_window_is_a_step_each_and_then_the_slowest_does_the_anchor():
    cadence = policy()
    first = cadence.plan(0, 0, left=10_000, limit=None)
    assert (first.steps, first.window_s, first.blocking) == ((1, 1), math.inf, True)
    cadence.observe(timed(100.0, 300.0), 0.0)
    second = cadence.plan(1, 0, left=9_998, limit=None)
    assert second.steps == (30, 10)
    assert second.window_s == pytest.approx(3.0)
    assert cadence.solo_speeds(8) == pytest.approx((80.0, 80.0 / 3))


def test_steps_that_hold_the_first_micro_batch_of_a_size_have_no_vote():
    cadence = policy()
    warm = [
        report._replace(warmup_steps=1, warmup_samples=8, warmup_busy_s=report.busy_s)
        for report in timed(5000.0, 9000.0)
    ]
    cadence.observe(warm, 0.0)
    assert cadence.plan(1, 0, left=10_000, limit=None).steps == (1, 1), "nothing is known yet"
    cadence.observe(timed(100.0, 300.0), 0.0)
    assert cadence.plan(2, 0, left=9_998, limit=None).steps == (30, 10)
    later = timed(100.0, 300.0, steps=[30, 10])
    slow = later[1]._replace(busy_s=20.0, warmup_steps=1, warmup_samples=5, warmup_busy_s=17.3)
    cadence.observe([later[0], slow], 0.0)
    assert cadence.elche.ms_per_batch == pytest.approx((100.0, 300.0))


def test_a_hint_spares_the_first_short_window():
    cadence = policy()
    cadence.elche.with_speed_ratio(1, 3.0)
    assert cadence.plan(0, 0, left=10_000, limit=None).steps == (30, 10)


@given(
    left=st.integers(0, 500),
    limit=st.one_of(st.none(), st.integers(0, 500)),
    ms=st.lists(st.floats(1.0, 50.0), min_size=1, max_size=5),
    diff=st.one_of(st.none(), st.integers(0, 4)),
    way=st.sampled_from([ApplyPolicy.CADENCE, ApplyPolicy.ASYNC]),
)
def test_plans_never_exceed_what_is_left_and_always_get_on(left, limit, ms, diff, way):
    cadence = policy(len(ms), max_batch_diff=diff, way=way)
    cadence.observe(timed(*ms), 0.0)
    made = cadence.plan(1, 0, left=left, limit=limit)
    available = left if limit is None else min(left, limit)
    assert sum(made.steps) <= available
    assert (sum(made.steps) > 0) == (available > 0)
    assert all(m >= s for m, s in zip(made.most, made.steps, strict=True))
    if made.blocking and made.most == made.steps:
        assert sum(made.most) <= available
    if not made.blocking:
        # Until the average lands, each rank may have done as much of the next window.
        assert limit is None or limit >= 2 * sum(made.most)
        assert sum(made.most) <= left
    if diff is not None and available >= len(ms):
        assert max(made.most) - min(made.steps) <= diff
        assert max(made.most) - made.least <= diff
    assert made.least <= max(made.most)


def test_the_last_window_ends_at_once_on_all_ranks():
    cadence = policy()
    cadence.observe(timed(100.0, 300.0), 0.0)
    made = cadence.plan(1, 0, left=20, limit=None)
    assert made.steps == made.most == made.queues == (15, 5)
    assert made.window_s == pytest.approx(1.5)


def test_the_anchor_follows_the_measured_overhead_unless_ranks_drift_apart():
    grows = policy(anchor=4)
    grows.observe(timed(100.0, 100.0, steps=[4, 4]), 0.2)
    assert grows.elche.anchor == 20
    drifts = policy(anchor=4, guard=LevelGuard(0.05, factor=0.7))
    for divergence in (0.02, 0.03):
        drifts.observe(timed(100.0, 100.0, steps=[4, 4], divergence=divergence), 0.0)
    drifts.observe(timed(100.0, 100.0, steps=[4, 4], divergence=0.06), 0.2)
    made = drifts.plan(4, 0, left=1000, limit=None)
    assert (made.anchor, made.verdict) == (4, Verdict.SUPPRESS_GROWTH)
    drifts.observe(timed(100.0, 100.0, steps=[4, 4], divergence=0.07), 0.2)
    made = drifts.plan(5, 0, left=1000, limit=None)
    assert (made.anchor, made.verdict) == (3, Verdict.NUDGE_DOWN)


def test_a_short_window_says_nothing_else_about_the_cost_of_averaging_than_a_full_one():
    """The end of an epoch is one step of each rank; the average takes as long as any other."""
    full, short = policy(anchor=8), policy(anchor=8)
    for sync_s in (0.05, 0.06, 0.2):  # of a window of 0.8 s: 6 %, 8 %, 25 %
        full.observe(timed(50.0, 100.0, steps=[16, 8]), sync_s)
        short.observe(timed(50.0, 100.0, steps=[2, 1]), sync_s)
        assert short.elche.anchor == full.elche.anchor
    assert full.elche.anchor == 20


def test_the_state_fits_the_same_members_in_another_order_and_no_others():
    cadence = policy()
    cadence.observe(timed(100.0, 300.0), 0.0)
    state = cadence.state_dict()
    swapped = CadencePolicy(["m1", "m0"], ElChe(2, 10), NoGuard())
    swapped.load_state_dict(state)
    assert swapped.elche.batch_counts == (10, 30)
    fresh = CadencePolicy(["m1", "other"], ElChe(2, 10), NoGuard())
    fresh.load_state_dict(state)
    fresh.load_state_dict({"policy": "sync", "members": {}})
    assert not fresh.elche.is_calibrated


# ── the clock ────────────────────────────────────────────────────────────────────────────────────


def test_a_step_is_started_only_if_it_ends_nearer_the_deadline_than_stopping_now():
    clock = WindowClock()
    clock.open(10)
    clock.limit(10, 3.0)
    clock.count_step(1.0)
    assert clock.wants_another(2.4)  # would end at 3.4
    assert not clock.wants_another(2.6)  # would end at 3.6
    clock.count_step(3.0)
    assert clock.wants_another(1.9)  # a step is predicted to take 2 now
    assert not clock.wants_another(2.1)


def test_steps_that_must_be_done_are_done_whatever_the_time():
    clock = WindowClock()
    clock.open(4)
    clock.limit(4, 0.0, least=3)
    for _ in range(3):
        assert clock.wants_another(100.0)
        clock.count_step(1.0)
    assert not clock.wants_another(100.0)
    clock.open(1)
    clock.limit(1, 0.0, least=3)
    clock.count_step(1.0)
    assert not clock.wants_another(0.0)


def test_the_first_step_is_always_made_and_never_more_than_allowed():
    clock = WindowClock()
    clock.open(2)
    clock.limit(2, 0.0)
    assert clock.wants_another(100.0)
    clock.count_step(1.0)
    assert not clock.wants_another(100.0)
    clock.open(1)
    clock.count_step(1.0)
    assert not clock.wants_another(0.0)
    clock.open(0)
    assert not clock.wants_another(0.0)


def test_each_changed_anchor_has_a_reason():
    cadence = policy(guard=LevelGuard(threshold=0.5))
    cadence.plan(0, 0, left=10_000, limit=None)
    assert cadence.why(0) == "the ranks' speeds are not known yet"
    cadence.observe(timed(100.0, 100.0), 0.01)
    cadence.plan(1, 0, left=10_000, limit=None)
    cadence.observe(timed(100.0, 100.0, steps=[10, 10]), 1.0)
    assert cadence.plan(2, 0, left=10_000, limit=None).anchor > 10
    assert cadence.why(2) == "averaging took more than 10% of the time"
    cadence.observe(timed(100.0, 100.0, steps=[10, 10]), 1e-6)
    cadence.plan(3, 0, left=10_000, limit=None)
    assert cadence.why(3) == "averaging took less than half of 10% of the time"
    cadence.plan(4, 0, left=20, limit=None)
    assert cadence.why(4) == "it is the last window of the epoch"


def test_absent_ranks_get_nothing_and_their_speed_is_forgotten():
    cadence = policy(3, 4)
    cadence.observe(timed(100.0, 400.0, 200.0), 0.0)
    cadence.set_absent(frozenset({1}))
    plan = cadence.plan(1, 0, left=1000, limit=None)
    assert (plan.steps, plan.most[1], plan.queues[1]) == ((8, 0, 4), 0, 0), "rank 2 is the slowest"
    tail = cadence.plan(1, 0, left=9, limit=None)
    assert tail.steps == tail.queues == (6, 0, 3)
    cadence.set_absent(frozenset())
    assert cadence.plan(2, 0, left=1000, limit=None).steps == (8, 4, 4), "the slowest, until timed"
    cadence.set_absent(frozenset({0, 2}))
    assert math.isinf(cadence.plan(2, 0, left=1000, limit=None).window_s), "nobody was timed"
