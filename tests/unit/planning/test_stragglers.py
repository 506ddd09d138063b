"""Ranks that have become slow are named, and no others; under virtual time."""

import json
import math
import random
from collections import deque
from pathlib import Path

import pytest

from evener.planning.policies import NOTEWORTHY_S
from evener.planning.report import Report
from evener.planning.speed import CostModel, num_micro_batches
from evener.planning.stragglers import SlowCause, StragglerWatch
from evener.planning.sync import SyncPolicy

RECORDED = json.loads((Path(__file__).parents[2] / "helpers" / "recorded_noise.json").read_text())
BATCH_SIZE, MICRO_BATCH = 64, 8
STEP_S = 0.5


class Noise:
    """Factors of times: recorded ones, or normal with a heavy tail."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.random = random.Random(seed)
        self.recorded = RECORDED if seed % 2 else None
        self.places = [self.random.randrange(250) for _ in range(ranks)]
        self.tracks = [self.random.randrange(len(RECORDED)) for _ in range(ranks)]

    def factor(self, rank: int) -> float:
        if self.recorded:
            track = self.recorded[self.tracks[rank]]
            self.places[rank] += 1
            return track[self.places[rank] % len(track)]
        if self.random.random() < 0.04:
            return 1.0 + min(20.0, 0.2 * self.random.paretovariate(1.2))
        return abs(self.random.gauss(1.0, 0.06)) + 0.05


class Run:
    """A team in SYNC whose planner gives out shares by what was measured, two windows ahead."""

    def __init__(self, speeds, *, seed=0, fixed=0.1):
        self.policy = SyncPolicy([f"m{rank}" for rank in range(len(speeds))], [MICRO_BATCH] * 4)
        micro_s = [STEP_S / speed for speed in speeds]
        self.costs = [CostModel(fixed * s, (1 - fixed) * s / MICRO_BATCH) for s in micro_s]
        self.noise = Noise(seed, len(speeds))
        self.watch = StragglerWatch(len(speeds))
        self.plans = deque(self.policy.plan(n, 0, 0, BATCH_SIZE) for n in range(2))
        self.window = 0
        self.found = []

    def step(self, extra=None, *, work_for_all=0.0):
        """A window; ``extra`` gives seconds for each micro-batch, by rank."""
        plan = self.plans.popleft()
        times = []
        for rank, share in enumerate(plan.shares):
            batches = num_micro_batches(share, MICRO_BATCH)
            plain_s = self.costs[rank].seconds(share, MICRO_BATCH) * self.noise.factor(rank)
            times.append(plain_s + (extra or {}).get(rank, 0.0) * batches)
        reports = [
            Report(
                weight=float(share),
                samples=share,
                micro_batches=num_micro_batches(share, MICRO_BATCH),
                compute_s=seconds,
                wait_s=max(times) - seconds,
            )
            for share, seconds in zip(plan.shares, times, strict=True)
        ]
        self.found += self.watch.observe(self.window, reports)
        self.policy.observe(reports, plan, 0.02)
        self.window += 1
        self.plans.append(
            self.policy.plan(self.window + 1, 0, 0, BATCH_SIZE, work_for_all=work_for_all)
        )


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_named_in_a_run_in_which_nothing_is_wrong(seed):
    speeds = [(1, 1, 1, 1), (1, 1, 0.5, 0.25), (1, 1 / 3, 1, 1), (1, 1, 1, 0.8)][seed % 4]
    run = Run(speeds, seed=seed, fixed=0.05 + 0.3 * (seed % 3))
    for _ in range(200):
        run.step()
    assert run.found == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("after", [20, 100])
def test_a_rank_that_costs_seconds_is_named_within_five_windows(seed, after):
    slow = seed % 4
    run = Run((1, 1, 1, 1), seed=seed)
    for _ in range(after):
        run.step()
    assert run.found == []
    for _ in range(5):
        run.step({slow: 2.0})
    (one,) = run.found
    assert (one.rank, one.is_over) == (slow, False)
    assert after - 1 <= one.since <= after + 1
    assert one.window < after + 5
    assert one.factor > 3
    assert one.delay_s >= NOTEWORTHY_S
    for _ in range(30):
        run.step({slow: 2.0})
    assert run.found == [one], "once for an episode"
    for _ in range(40):  # as when a parked rank is called back
        run.step(work_for_all=math.inf)
    (_, over) = run.found
    assert (over.rank, over.since, over.is_over) == (slow, one.since, True)
    assert over.delay_s >= one.delay_s


def test_a_rank_that_is_slow_at_no_cost_is_not_named():
    """It takes three times as long, and the others wait for milliseconds; or nobody waits."""
    watch = StragglerWatch(2)
    after(watch, 70, 0.001, 0.001)
    assert after(watch, 70, 0.001, 0.003, first=70) == []
    (named,) = after(watch, 2000, 0.001, 0.003, first=140)
    assert named.delay_s == pytest.approx(NOTEWORTHY_S, abs=0.01)
    alone = StragglerWatch(1)
    after(alone, 70, 1.0)
    assert after(alone, 70, 3.0, first=70) == []


def reports(*seconds: float, samples: int = 8, **changes) -> list[Report]:
    longest = max(seconds)
    return [
        Report(
            **{"samples": samples, "micro_batches": 1, "compute_s": s, "wait_s": longest - s}
            | changes
        )
        for s in seconds
    ]


def after(watch: StragglerWatch, windows: int, *seconds: float, first: int = 0, **changes) -> list:
    found = []
    for window in range(first, first + windows):
        found += watch.observe(window, reports(*seconds, **changes))
    return found


def test_what_tells_nothing_of_speed_is_left_out():
    watch = StragglerWatch(2)
    assert after(watch, 20, 0.1, 0.1) == []
    warm = {"warmup_samples": 8, "warmup_micro_batches": 1, "warmup_s": 0.9}
    assert after(watch, 10, 0.1, 0.9, first=20, **warm) == []
    updates = [0.1, 0.9]
    for window in range(30, 40):
        rows = reports(*updates)
        rows[1] = rows[1]._replace(update_s=0.8)
        assert watch.observe(window, rows) == ()
    assert watch.observe(40, [Report(), Report()]) == ()


def test_a_larger_share_makes_no_straggler():
    watch = StragglerWatch(2)
    after(watch, 20, 0.1, 0.1)
    for window in range(20, 40):
        rows = reports(0.1, 0.35)
        rows[1] = rows[1]._replace(samples=32)
        assert watch.observe(window, rows) == ()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"data_s": 2.0}, SlowCause.DATA), ({"compute_s": 3.0}, SlowCause.UNKNOWN)],
)
def test_the_cause_is_slow_data_or_not_known(changes, cause):
    watch = StragglerWatch(2)
    after(watch, 70, 1.0, 1.0)
    found = []
    for window in range(70, 74):
        rows = reports(1.0, 1.0)
        found += watch.observe(window, [rows[0]._replace(wait_s=2.0), rows[1]._replace(**changes)])
    assert [(one.rank, one.cause) for one in found] == [(1, cause)]
