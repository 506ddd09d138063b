"""The SYNC planner in simulated teams, with noise that was recorded on a machine.

``recorded_noise.json`` holds 250 times of one micro-batch (forward and backward of a small network)
on each of two ranks side by side, relative to their median, on a machine with two cores and a load
of 10. They are processor times: what a rank waits for a core that others hold is no property of its
device.

How good shares are is told by the finish that they have in truth, without noise, beside that of the
best shares: this is what a window lasts, whereas shares that differ by a sample may last as long.
"""

import itertools
import json
import math
import random
from pathlib import Path
from statistics import mean

import pytest

from evener.planning.report import Report
from evener.planning.shares import fastest_shares, finish_s
from evener.planning.speed import CostModel
from evener.planning.sync import SyncPolicy

NOISE = json.loads((Path(__file__).parents[2] / "helpers" / "recorded_noise.json").read_text())
SPEEDS = [(1.0, 1 / 3), (1.0, 1 / 2, 1 / 4), (1.0, 1.0), (1.0, 1 / 4), (1.0, 0.7, 0.4, 0.2)]
PRIORS = {"none": (), "right": (1.0, 1.0), "4x too fast": (4.0, 1.0), "4x too slow": (0.25, 1.0)}
SEEDS = range(4)


class Team:
    """Ranks at given speeds; plans and reports travel as they do in a run.

    The plan of window w + 2 rests on the reports up to w - 1. The first micro-batch of each size on
    a rank takes 5 to 20 times as long, and is reported as warm-up.
    """

    def __init__(self, speeds, *, batch_size, micro_batch_size, fixed, prior, seed):
        self.random = random.Random(seed)
        self.size = micro_batch_size or math.ceil(batch_size / len(speeds))
        self.costs = [
            CostModel(fixed * self.size * 0.01 / speed, (1.0 - fixed) * 0.01 / speed)
            for speed in speeds
        ]
        self.sizes = [self.size] * len(speeds)
        self.policy = SyncPolicy([str(rank) for rank in range(len(speeds))], self.sizes)
        if wrong := PRIORS[prior]:
            # Only that of rank 0 is wrong.
            said = [speed * wrong[min(rank, 1)] for rank, speed in enumerate(speeds)]
            self.policy.calibrate(said)
        self.batch_size = batch_size
        self.noise = []
        for rank in range(len(speeds)):
            recorded = NOISE[rank % len(NOISE)]
            start = self.random.randrange(len(recorded))
            self.noise.append(itertools.cycle(recorded[start:] + recorded[:start]))
        self.known = [set() for _ in speeds]
        self.first = [None] * len(speeds)
        self.best_s = self.finish_s(fastest_shares(batch_size, self.costs, self.sizes))

    def finish_s(self, shares):
        """When these shares are done in truth."""
        return finish_s(shares, self.costs, self.sizes)

    def compute(self, rank, share, window):
        """The report of a rank."""
        full, rest = divmod(share, self.size)
        report = {"weight": float(share), "samples": share, "micro_batches": full + (rest > 0)}
        spent_s = warmup_s = 0.0
        warm = []
        for samples in [self.size] * full + [rest] * (rest > 0):
            seconds = self.costs[rank].seconds(samples, None) * next(self.noise[rank])
            if samples not in self.known[rank]:
                self.known[rank].add(samples)
                warm.append(samples)
                seconds *= self.random.uniform(5.0, 20.0)
                warmup_s += seconds
            spent_s += seconds
        if sum(warm) < share and self.first[rank] is None:
            self.first[rank] = window
        return Report(
            **report,
            compute_s=spent_s,
            warmup_s=warmup_s,
            warmup_samples=sum(warm),
            warmup_micro_batches=len(warm),
        )

    def run(self, num_windows):
        """How much longer than the best windows last, from the third after the first timing."""
        surplus, plans = [], [self.plan(0), self.plan(1)]
        for window in range(num_windows):
            plans.append(self.plan(window + 2))
            plan = plans[window]
            reports = [self.compute(r, share, window) for r, share in enumerate(plan.shares)]
            surplus.append(self.finish_s(plan.shares) / self.best_s - 1.0)
            self.policy.observe(reports, plan, 0.001)
        assert None not in self.first
        return surplus[max(self.first) + 3 :]

    def plan(self, window):
        return self.policy.plan(window, 0, 0, self.batch_size)


@pytest.mark.parametrize(("batch_size", "micro_batch_size"), [(64, None), (256, 16)])
@pytest.mark.parametrize("fixed", [0.0, 0.05])
@pytest.mark.parametrize("speeds", SPEEDS)
def test_shares_are_near_the_best_from_the_third_window_after_the_first_timing(
    speeds, fixed, batch_size, micro_batch_size
):
    """Whatever the first shares rested on. A single window is as good as its few timings are."""
    for prior in PRIORS:
        runs = [
            Team(
                speeds,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                fixed=fixed,
                prior=prior,
                seed=seed,
            ).run(60)
            for seed in SEEDS
        ]
        assert mean(mean(run) for run in runs) <= 0.05, prior
        assert max(mean(run) for run in runs) <= 0.08, prior
        assert mean(mean(run[:3]) for run in runs) <= 0.12, prior
        assert mean(mean(run[20:]) for run in runs) <= 0.04, prior
