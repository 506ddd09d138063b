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
from evener.simulation.simulated_rank import Link, SimulatedRank
from evener.simulation.simulated_sync import SimulatedSync

NOISE = json.loads((Path(__file__).parents[2] / "helpers" / "recorded_noise.json").read_text())
SPEEDS = [(1.0, 1 / 2, 1 / 4), (1.0, 1.0), (1.0, 0.7, 0.4, 0.2)]
PRIORS = {"none": (), "right": (1.0, 1.0), "4x too fast": (4.0, 1.0), "4x too slow": (0.25, 1.0)}
SEEDS = range(2)


class Warming(SimulatedRank):
    """A rank with recorded noise, whose first micro-batch of each size takes 5 to 20 times as long.

    It reports that one as warm-up.
    """

    def __init__(self, cost, size, noise, source):
        super().__init__(cost, size)
        self.recorded = itertools.cycle(noise)
        self.random = source
        self.known = set()
        self.windows = 0
        self.first = None

    def share(self, samples, at_s, update_parts=1):
        full, rest = divmod(samples, self.micro_batch_size)
        spent_s = warmup_s = 0.0
        warm = []
        for size in [self.micro_batch_size] * full + [rest] * (rest > 0):
            seconds = self.cost.seconds(size, None) * next(self.recorded)
            if size not in self.known:
                self.known.add(size)
                warm.append(size)
                seconds *= self.random.uniform(5.0, 20.0)
                warmup_s += seconds
            spent_s += seconds
        if sum(warm) < samples and self.first is None:
            self.first = self.windows
        self.windows += 1
        return Report(
            weight=float(samples),
            samples=samples,
            micro_batches=full + (rest > 0),
            compute_s=spent_s,
            busy_s=spent_s,
            warmup_s=warmup_s,
            warmup_samples=sum(warm),
            warmup_micro_batches=len(warm),
        )


class Team:
    """Ranks at given speeds."""

    def __init__(self, speeds, *, batch_size, micro_batch_size, fixed, prior, seed):
        source = random.Random(seed)
        size = micro_batch_size or math.ceil(batch_size / len(speeds))
        self.costs = [
            CostModel(fixed * size * 0.01 / speed, (1.0 - fixed) * 0.01 / speed) for speed in speeds
        ]
        self.sizes = [size] * len(speeds)
        policy = SyncPolicy([str(rank) for rank in range(len(speeds))], self.sizes)
        if wrong := PRIORS[prior]:
            # Only that of rank 0 is wrong.
            said = [speed * wrong[min(rank, 1)] for rank, speed in enumerate(speeds)]
            policy.calibrate(said)
        self.ranks = []
        for rank, cost in enumerate(self.costs):
            recorded = NOISE[rank % len(NOISE)]
            start = source.randrange(len(recorded))
            noise = recorded[start:] + recorded[:start]
            self.ranks.append(Warming(cost, size, noise, source))
        self.team = SimulatedSync(
            self.ranks,
            Link(latency_s=0.0005 / (len(speeds) - 1)),
            policy,
            batch_size=batch_size,
        )
        self.best_s = self.finish_s(
            fastest_shares(batch_size, self.costs, self.sizes, least=0, idle=())
        )

    def finish_s(self, shares):
        """When these shares are done in truth."""
        return finish_s(shares, self.costs, self.sizes)

    def run(self, num_windows):
        """How much longer than the best windows last, from the third after the first timing."""
        surplus = []
        for window in self.team.run(num_windows):
            assert len(window.present) == len(self.ranks)
            shares = [report.samples for report in window.reports]
            surplus.append(self.finish_s(shares) / self.best_s - 1.0)
        firsts = [rank.first for rank in self.ranks]
        assert None not in firsts
        return surplus[max(firsts) + 3 :]


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
