"""The SYNC planner, alone and in a simulated team under virtual time."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import CheckpointError
from evener.planning.plans import WindowPlan
from evener.planning.report import Report
from evener.planning.speed import CostModel, num_micro_batches
from evener.planning.sync import FixedShares, SyncPolicy
from evener.simulation.simulated_rank import Link, SimulatedRank
from evener.simulation.simulated_sync import SimulatedSync


class Disturbed(SimulatedRank):
    """A rank with even noise."""

    def __init__(self, cost, size, noise, source):
        super().__init__(cost, size)
        self.scale, self.random = noise, source

    def lengthen(self, plain_s, at_s):
        return plain_s * (1.0 + self.random.uniform(-self.scale, self.scale))


class Team:
    """Ranks with known costs and a planner that sees a window's reports two windows later.

    Nobody is parked: the planner alone keeps slow ranks from costing much.
    """

    lag = 2

    def __init__(
        self,
        costs,
        batch_size,
        *,
        micro_batch_size=8,
        noise=0.05,
        seed=0,
        hint=True,
        planned=lag - 1,
    ):
        source = random.Random(seed)
        self.batch_size, self.size = batch_size, micro_batch_size
        self.policy = SyncPolicy(
            [f"member-{rank}" for rank in range(len(costs))], [micro_batch_size] * len(costs)
        )
        self.ranks = [Disturbed(cost, micro_batch_size, noise, source) for cost in costs]
        if hint:
            self.policy.calibrate([1.0 / cost.seconds(8, None) for cost in costs])
        self.team = SimulatedSync(self.ranks, Link(), self.policy, batch_size=batch_size)
        for _ in range(planned):
            self.team.decide()

    def set_cost(self, rank, cost):
        """Makes a rank slower or faster from the next window on."""
        self.ranks[rank].cost = cost

    def run(self, num_windows):
        """Seconds of the windows, each ending with its slowest rank; and their shares."""
        total_s, shares = 0.0, []
        for _ in range(num_windows):
            self.team.observe()
            self.team.decide()
            window = self.team.compute()
            total_s += window.length_s
            shares.append(tuple(report.samples for report in window.reports))
        return total_s, shares

    def efficiency(self, num_windows):
        """Samples per second over the sum of what the ranks do alone."""
        total_s, _ = self.run(num_windows)
        alone = [
            self.batch_size / rank.cost.seconds(self.batch_size, self.size) for rank in self.ranks
        ]
        return self.batch_size * num_windows / total_s / sum(alone)


def timed(samples, seconds):
    return Report(samples=samples, micro_batches=num_micro_batches(samples, 8), compute_s=seconds)


def measure(policy, rank, per_sample_s):
    """Tells the planner of windows in which one rank did 8 samples, and no other anything."""
    reports = [Report()] * len(policy.members)
    reports[rank] = timed(8, 8 * per_sample_s)
    shares = tuple(report.samples for report in reports)
    for _ in range(3):
        policy.observe(reports, WindowPlan(0, 0, 0, 8, shares), math.nan)


def at_speeds(*speeds, fixed_s=0.0):
    return [CostModel(fixed_s / speed, 0.01 / speed) for speed in speeds]


# ── simulation ───────────────────────────────────────────────────────────────────────────────────


def test_shares_do_not_follow_noise():
    team = Team(at_speeds(1.0, 0.37, 0.61), 200, noise=0.02)
    team.run(20)
    _, shares = team.run(200)
    assert len(set(shares)) <= 2


def test_a_rank_that_slows_down_is_followed():
    team = Team(at_speeds(1.0, 1.0), 64, noise=0.03)
    usual = team.ranks[1].cost
    team.run(20)
    team.set_cost(1, usual.scaled(4.0))
    _, shares = team.run(5 + team.lag)
    assert shares[0] == (32, 32)
    assert shares[-1][1] <= 15
    assert team.efficiency(50) >= 0.93
    team.set_cost(1, usual)
    team.run(5 + team.lag)
    assert team.efficiency(50) >= 0.95


@pytest.mark.parametrize("micro_batch_size", [8, 64])
@pytest.mark.parametrize("factor", [5.0, 40.0])
def test_a_wrong_hint_comes_to_light(micro_batch_size, factor):
    """Also of a rank whose share is then so small that it tells its fixed cost and no more."""
    cost = CostModel(0.008, 0.0002)
    team = Team([cost] * 2, 64, micro_batch_size=micro_batch_size, noise=0.03, hint=False)
    team.policy.calibrate((factor, 1.0))
    team.run(50)
    seconds, shares = team.run(50)
    assert abs(shares[-1][0] - 32) <= 2
    assert seconds < 50 * 1.06 * cost.seconds(32, micro_batch_size)


def test_a_rank_without_work_is_tried_again_but_rarely():
    team = Team(at_speeds(1.0, 0.01), 32, noise=0.0, planned=0)
    windows = team.team.run(5000)
    tried = [window for window, one in enumerate(windows) if one.reports[1].samples]
    assert tried[2] < 10, "the first windows are believed when there are three of them"
    tried = tried[3:]
    assert 2 <= len(tried) <= 40
    assert sum(window.length_s for window in windows) <= 1.05 * 5000 * 0.32
    team.set_cost(1, team.ranks[0].cost)
    assert [report.samples for report in team.team.run(1500)[-1].reports] == [16, 16]


# ── planning ─────────────────────────────────────────────────────────────────────────────────────


def test_a_calibration_decides_the_first_shares_and_has_no_vote_afterwards():
    policy = SyncPolicy(["a", "b"], [8, 8])
    policy.calibrate((300.0, 100.0))
    assert policy.is_calibrated
    plan = policy.plan(0, 0, 0, 32)
    assert plan.shares == (24, 8)
    assert policy.solo_speeds(32) == (0.0, 0.0), "a calibration is no speed"
    policy.observe([timed(24, 0.24), timed(8, 0.08)], plan, 0.0)
    assert policy.plan(1, 0, 32, 32).shares == (16, 16)
    assert policy.solo_speeds(32) == pytest.approx((100.0, 100.0))


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        ((1e12, 1.0), (32, 2)),  # 1:16 at most
        ((1.0, 0.0), (17, 17)),  # a clock that did not move says nothing
        ((1.0, float("inf")), (17, 17)),
    ],
)
def test_what_a_calibration_may_say(speeds, shares):
    policy = SyncPolicy(["a", "b"], [None, None])
    policy.calibrate(speeds)
    assert policy.plan(0, 0, 0, 34).shares == shares


def test_one_disturbed_window_leaves_no_rank_without_work():
    policy = SyncPolicy(["a", "b"], [None, None])
    plan = policy.plan(0, 0, 0, 34)
    policy.observe([timed(17, 0.17), timed(17, 170.0)], plan, 0.0)
    for _ in range(10):
        assert policy.decide_parking(34, 0) is None
    assert policy.plan(1, 0, 34, 34).shares == (32, 2)
    for _ in range(2):
        policy.observe([timed(32, 0.32), timed(2, 0.02)], policy.plan(1, 0, 34, 34), 0.0)
    assert policy.plan(2, 0, 68, 34).shares == (17, 17)


def test_the_first_micro_batch_of_a_size_has_no_vote():
    policy = SyncPolicy(["a", "b"], [8, 8])
    plan = policy.plan(0, 0, 0, 32)
    first = Report(
        samples=16,
        micro_batches=2,
        compute_s=5.08,
        warmup_s=5.0,
        warmup_micro_batches=1,
        warmup_samples=8,
    )
    policy.observe([first, timed(16, 0.48)], plan, 0.0)
    assert policy.plan(1, 0, 32, 32).shares == (24, 8)
    alone = first._replace(samples=8, micro_batches=1, warmup_s=5.08)
    policy.observe([alone, timed(8, 0.24)], policy.plan(1, 0, 32, 32), 0.0)
    assert policy.plan(2, 0, 64, 32).shares == (24, 8)
    assert policy.decide_parking(32, 0) is None


def test_an_unknown_rank_is_taken_for_a_middling_one():
    policy = SyncPolicy(["a", "b", "c", "new"], [None] * 4)
    for rank, per_sample_s in enumerate((0.01, 0.02, 0.08)):
        measure(policy, rank, per_sample_s)
    assert policy.costs[3].per_sample_s == pytest.approx(0.02)
    assert not policy.is_calibrated
    assert policy.plan(0, 0, 0, 64).shares[3] > 0


@given(
    seconds=st.lists(st.floats(1e-3, 10), min_size=1, max_size=8),
    size=st.integers(0, 400),
    work_for_all=st.sampled_from([0.0, 0.01, math.inf]),
    avoid_ones=st.booleans(),
)
def test_every_plan_is_whole(seconds, size, work_for_all, avoid_ones):
    names = [str(rank) for rank in range(len(seconds))]
    policy = SyncPolicy(names, [4] * len(seconds), avoid_ones=avoid_ones)
    for rank, per_sample_s in enumerate(seconds):
        measure(policy, rank, per_sample_s)
    plan = policy.plan(3, 1, 7, size, work_for_all=work_for_all)
    assert (plan.window, plan.epoch, plan.start, plan.size) == (3, 1, 7, size)
    assert sum(plan.shares) == size
    least = 1 + avoid_ones
    if work_for_all == math.inf and least * len(seconds) <= size and len(seconds) > 1:
        assert min(plan.shares) >= least


@pytest.mark.parametrize(
    ("avoid_ones", "num_windows", "shares"),
    [
        # One sample of the slow rank takes twice as long as 16 of the fast one.
        (False, 0, (16, 0)),
        (False, 10, (16, 0)),
        (False, 110, (15, 1)),
        (True, 110, (16, 0)),
        (True, 310, (14, 2)),  # batch statistics need two
    ],
)
def test_every_rank_has_work_where_that_costs_little(avoid_ones, num_windows, shares):
    policy = SyncPolicy(["a", "b"], [8, 8], avoid_ones=avoid_ones)
    for rank, per_sample_s in enumerate((0.01, 0.32)):
        measure(policy, rank, per_sample_s)
    assert policy.plan(0, 0, 0, 16).shares == (16, 0)
    assert policy.plan(1, 0, 16, 16, work_for_all=0.01 * num_windows).shares == shares
    assert policy.plan(2, 0, 32, 16).shares == (16, 0), "the windows after are as they were"


def test_a_parked_rank_has_no_work_whatever_it_costs():
    policy = SyncPolicy(["a", "b", "c"], [8] * 3)
    for rank, per_sample_s in enumerate((0.01, 1.0, 1.0)):
        measure(policy, rank, per_sample_s)
    policy.set_parked(frozenset({1}))
    assert policy.plan(0, 0, 0, 16, work_for_all=math.inf).shares == (15, 0, 1)


def test_micro_batch_sizes_can_change():
    policy = SyncPolicy(["a", "b"], [None, None])
    plan = WindowPlan(0, 0, 0, 16, (8, 8))
    for samples in (2, 8, 2, 8):  # 1 s and 0.1 s a sample
        report = Report(samples=samples, micro_batches=1, compute_s=1.0 + 0.1 * samples)
        policy.observe([report, report], plan, 0.0)
    assert policy.plan(0, 0, 0, 16).shares == (8, 8)
    policy.set_micro_batch_sizes([8, 2])
    assert policy.micro_batch_sizes == (8, 2)
    assert policy.plan(1, 0, 16, 16).shares == (12, 4)


def test_exchange_is_the_usual_one():
    policy = SyncPolicy(["a"], [None])
    plan = policy.plan(0, 0, 0, 1)
    assert policy.forecast(1, frozenset()).exchange_s == 0.0
    for sync_s in (9.0, 0.01, 0.01, 5.0, 0.02, 0.01, float("nan"), -1.0):
        policy.observe([Report(elapsed_s=1.0)], plan, sync_s)
    assert policy.forecast(1, frozenset()).exchange_s == 0.01


def test_an_exchange_counts_for_the_ranks_that_were_in_it_whoever_the_plans_are_for():
    policy = SyncPolicy(["a", "b"], [None] * 2)
    plan, both, alone = policy.plan(0, 0, 0, 2), frozenset(), frozenset({1})
    took_part, was_parked = Report(elapsed_s=1.0), Report()

    def observe(other, *seconds):
        for sync_s in seconds:
            policy.observe([took_part, other], plan, sync_s)

    observe(took_part, 9.0, 0.5, 0.5)
    policy.set_parked(alone)  # in the window after the next
    observe(took_part, 0.5, 0.5)
    observe(was_parked, 9.0, 0.001)
    assert policy.forecast(2, both).exchange_s == 0.5
    assert policy.forecast(2, alone).exchange_s == 0.001
    policy.set_parked(both)
    observe(was_parked, 0.001, 0.001)
    observe(took_part, 9.0, 0.2)
    assert policy.forecast(2, both).exchange_s == 0.2, "the link has become faster meanwhile"


@pytest.mark.parametrize(
    ("speeds", "main", "named"),
    [
        ((0.01, 1.0), 0, (0,)),
        ((1.0, 1.0), 0, (1,)),
        ((1.0, 1.0), 1, (0,)),
        ((0.01, 1.0, 0.9), 0, (0, 2)),
    ],
)
def test_where_one_rank_alone_is_fastest_all_others_are_named(speeds, main, named):
    policy = SyncPolicy([f"m{rank}" for rank in range(len(speeds))], [None] * len(speeds))
    for rank, speed in enumerate(speeds):
        measure(policy, rank, 1.0 / speed)
    plan = policy.plan(0, 0, 0, 32)
    for _ in range(15):
        policy.observe([Report(elapsed_s=1.0)] * len(speeds), plan, 100.0)
    *before, found = [policy.decide_parking(32, main) for _ in range(6)]
    assert before == [None] * 5
    assert found.ranks == named


def test_parked_ranks_are_tried_for_one_percent_of_the_time():
    policy = SyncPolicy(["a", "b"], [None] * 2)
    for rank, per_sample_s in enumerate((0.001, 1.0)):
        measure(policy, rank, per_sample_s)
    policy.set_parked(frozenset({1}))
    windows, window_s = policy.windows_apart(16, 0.0), 0.016
    spent_s = 5 * 1.0  # some windows of a trial, in which the slow rank has one sample
    assert 0.5 <= spent_s / (0.01 * windows * window_s) <= 1.1


@pytest.mark.parametrize(("per_sample_s", "is_slow"), [(0.5, True), (0.01, False)])
def test_a_rank_that_never_had_work_is_measured_before_it_is_parked(per_sample_s, is_slow):
    """By the calibration it is too slow for a sample of a batch, which may be wrong."""
    policy = SyncPolicy(["a", "b"], [8, 8])
    policy.calibrate([16.0, 1.0])
    shares, reasons, found = [], [], []
    for window in range(20):
        plan = policy.plan(window, 0, 7 * window, 7)
        first, second = plan.shares
        reasons.append(policy.why(window))
        policy.observe(
            [timed(first, 0.01 * first), timed(second, per_sample_s * second)], plan, 0.0
        )
        shares.append(plan.shares)
        found.append(policy.decide_parking(7, 0))
    begun = shares.index((6, 1))
    assert shares[:begun] == [(7, 0)] * 8
    assert found[:begun] == [None] * 8
    assert reasons[begun] == "idle ranks are measured"
    if is_slow:
        assert reasons[begun + 1] == "the exception is over: idle ranks are measured"
        assert {one.ranks for one in found[begun:]} == {(1,)}
        assert found[begun].alone[1] == pytest.approx(1 / 0.16)  # a 16th of the other, or less
    else:
        assert found == [None] * 20
        assert shares[-1] == (4, 3)


def test_a_rank_that_cannot_be_measured_is_parked_when_it_has_been_idle_for_long():
    """It is too slow for a sample, by the calibration; each exchange with it costs all the same."""
    policy = SyncPolicy(["a", "b"], [8, 8])
    policy.calibrate([16.0, 1.0])
    shares, found = [], []
    for window in range(16):  # the other rank is settled after two
        plan = policy.plan(window, 0, 7 * window, 7)
        policy.observe([timed(7, 0.07), timed(0, 0.0)], plan, 0.01)
        shares.append(plan.shares)
        found.append(policy.decide_parking(7, 0))
    assert shares == [(7, 0)] * 8 + [(6, 1)] * 6 + [(7, 0)] * 2
    assert found[:13] == [None] * 13
    assert [one.ranks for one in found[13:]] == [(1,)] * 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_are_measured_in_turn_where_a_batch_is_too_small_for_all(size):
    policy = SyncPolicy(["a", "b", "c", "d"], [8] * 4)
    policy.calibrate([64.0, 4.0, 1.0, 1.0])
    for window in range(60):
        plan = policy.plan(window, 0, size * window, size)
        policy.observe([timed(n, 0.01 * n) for n in plan.shares], plan, 0.0)
        assert sum(plan.shares) == size
        if (found := policy.decide_parking(size, 0)) is not None:
            assert all(found.alone.values())
    assert all(policy.solo_speeds(size))


# ── state ────────────────────────────────────────────────────────────────────────────────────────


def test_state_goes_on_in_a_team_of_another_size():
    team = Team(at_speeds(1.0, 0.5, 0.25), 64, noise=0.02)
    team.run(20)
    state = json.loads(json.dumps(team.policy.state_dict()))
    other = SyncPolicy(["member-2", "newcomer", "member-0"], [8, 8, 8])
    other.load_state_dict(state)
    assert not other.is_calibrated
    slow, unknown, fast = other.solo_speeds(64)
    assert (fast, slow) == (team.policy.solo_speeds(64)[0], team.policy.solo_speeds(64)[2])
    assert unknown == 0.0
    pair = SyncPolicy(["member-2", "member-0"], [8, 8])
    pair.load_state_dict(state)
    assert pair.is_calibrated
    assert pair.plan(0, 0, 0, 50).shares == (10, 40)


def test_what_is_known_is_not_forgotten_by_a_state_that_does_not_know_it():
    policy = SyncPolicy(["a"], [8])
    measure(policy, 0, 0.1)
    policy.load_state_dict({"policy": "sync", "members": {}})
    assert policy.solo_speeds(8) == (pytest.approx(10.0),)


def test_the_state_of_another_policy_is_refused_and_fixed_shares_have_none():
    policy = SyncPolicy(["a"], [8])
    with pytest.raises(CheckpointError, match="policy='cadence'"):
        policy.load_state_dict({"policy": "cadence", "members": ["a"]})
    policy.load_state_dict(FixedShares(["a"], [1.0], avoid_ones=False).state_dict())
    assert not policy.is_calibrated


@pytest.mark.parametrize("hint", [False, True])
def test_a_rank_that_is_forgotten_counts_as_new_until_it_is_measured(hint):
    team = Team([CostModel(0.0, 0.01), CostModel(0.0, 0.04)], 60, noise=0.0, hint=hint)
    assert team.run(40)[1][-1] == (48, 12)
    team.policy.forget([1])
    assert team.policy.is_calibrated
    assert team.policy.plan(99, 0, 0, 60).shares == (30, 30)
    assert list(team.policy.state_dict()["members"]) == ["member-0"]
    team.set_cost(1, CostModel(0.0, 0.02))
    assert team.run(40)[1][-1] == (40, 20)


# ── why plans change ─────────────────────────────────────────────────────────────────────────────


def reasons(team, num_windows, batch_size=64):
    """The windows whose plan differs from the one before, with the reason."""
    first, found, before = team.team.windows, {}, None
    team.team.batch_size = batch_size
    _, shares = team.run(num_windows)
    for number, share in enumerate(shares, start=first):
        if share != before:
            found[number] = team.policy.why(number)
        before = share
    return found


def test_each_changed_plan_has_a_reason_and_others_have_none():
    team = Team([CostModel(0.01, 0.01)] * 2, 64, noise=0.0, hint=False, planned=0)
    team.policy.set_micro_batch_sizes([32, 32])  # they are made known: nothing has changed yet
    assert reasons(team, 4)[0] == "the shares are equal until speeds are known"
    assert reasons(team, 4) == {4: ""}, "nothing changed"
    team.set_cost(1, CostModel(0.01, 0.03))
    changed = reasons(team, 8)
    assert changed.pop(8) == ""
    assert changed
    assert all("sooner, by the speeds that are known now" in why for why in changed.values())
    team.policy.set_parked(frozenset({1}))
    assert reasons(team, 1) == {16: "without rank 1, which is parked"}
    team.policy.set_parked(frozenset())
    assert reasons(team, 1) == {17: "all ranks are present"}
    assert reasons(team, 1, batch_size=20) == {18: "the window has 20 samples instead of 64"}
    team.policy.set_micro_batch_sizes([4, 4])
    assert reasons(team, 1) == {19: "the limits of micro-batches have changed"}
    assert team.policy.why(3) == "", "asked for too late"
