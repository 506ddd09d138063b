"""Does a team do what ``evener plan`` predicts? Throughput and lost time, from an earlier run.

    python benchmarks/plan.py --json plan.json
    python benchmarks/plan.py --quick

Every run is a team of its own, in processes of its own. SYNC and CADENCE take turns. What a run
does is predicted from the run of each of them that was before it: from the events that say how fast
ranks computed there, side by side, by the code of ``evener plan RUN``. ``told_by`` is the policy of
that earlier run. (A SYNC run is not predicted from one of CADENCE, in which updates are not timed
by themselves.)

``error`` is the difference between predicted and measured throughput, as a part of the measured
one, without its sign; ``bias`` has it, and is above 0 where the prediction is too high. ``lost`` is
the part of ranks' time that was not compute, ``lost_error`` how many points the prediction of it is
off. Figures are medians over runs; ``_90`` is their 5th and 95th percentile. First windows, and the
tail of the epoch in CADENCE, do not count.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero import TEAMS, read_speeds, spread_cores
from lost import lost_time, over_ranks
from machine import load_before, write_report
from options import make_parser
from rounds import Team, is_rank, run_ranks
from tables import spread, text_of
from ways import Evener, Setting, Window, speed_of

from evener.observe.tally import WARM_UP_WINDOWS
from evener.planning.policies import ApplyPolicy
from evener.simulation.measured_team import measured_team
from evener.simulation.prediction import TeamPrediction, predict

SYNC, CADENCE = ApplyPolicy.SYNC, ApplyPolicy.CADENCE
#: The policy of an earlier run, and that of the run which is predicted from it.
CASES = ((SYNC, SYNC), (SYNC, CADENCE), (CADENCE, CADENCE))
#: What is aimed at: of the throughput, and in points of lost time.
ERROR_AIM, LOST_AIM = 0.05, 0.03
_CASE = "EVENER_BENCHMARK_CASE"

Case = tuple[ApplyPolicy, ApplyPolicy]


@dataclass(frozen=True)
class Pair:
    """A run and what was predicted of it."""

    samples_per_s: float
    lost: float
    predicted: TeamPrediction

    def __str__(self) -> str:
        return (
            f"{self.samples_per_s:.1f} samples/s measured, {self.predicted.samples_per_s:.1f} "
            f"predicted; lost {self.lost:.3f} measured, {self.predicted.lost:.3f} predicted"
        )

    @property
    def bias(self) -> float:
        """By which part the prediction is above the measured throughput."""
        return self.predicted.samples_per_s / self.samples_per_s - 1.0

    @property
    def lost_bias(self) -> float:
        """By how much of the time the prediction of what is lost is too high."""
        return self.predicted.lost - self.lost


def main() -> int:
    """Starts the runs; prints and writes how far predictions are off."""
    arguments = parse_arguments()
    if is_rank():
        run_rank(Team(), arguments)
        return 0
    before = load_before()
    rows = [row for speeds in arguments.speeds for row in measure(speeds, arguments)]
    print(text_of(rows))
    write_report(arguments, before, rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--speeds",
        type=read_speeds,
        action="append",
        metavar="1,SPEED,...",
        help="of the ranks, relative to the fastest; several times for several teams",
    )
    parser.add_argument("--runs", type=int, default=7, help="predicted runs of each policy")
    parser.add_argument("--windows", type=int, default=30, help="of a run of SYNC")
    parser.add_argument("--local-windows", type=int, default=10, help="of one of CADENCE, about")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="also of a local step")
    parser.add_argument("--anchor", type=int, default=8, help="of CADENCE; it does not grow")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one team of two; 2 runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs = 2
    if arguments.speeds is None:
        arguments.speeds = [TEAMS[0]] if arguments.quick else list(TEAMS)
    return arguments


def measure(speeds: Sequence[float], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a team: one for each policy."""
    pairs: dict[Case, list[Pair]] = {case: [] for case in CASES}
    earlier = {policy: run(policy, speeds) for policy in (SYNC, CADENCE)}
    for number in range(arguments.runs):
        for policy in (SYNC, CADENCE):
            windows = run(policy, speeds)
            for case in CASES:
                told_by, of = case
                if of is policy:
                    predicted = predicted_from(earlier[told_by], policy, arguments)
                    pairs[case].append(pair := Pair(*measured(windows), predicted))
                    print(f"run {number} of {policy}, told by {told_by}: {pair}", flush=True)
            earlier[policy] = windows
    facts = {"speeds": [round(s, 4) for s in speeds]}
    return [
        describe(of, found, {**facts, "told_by": str(told_by)})
        for (told_by, of), found in pairs.items()
    ]


def run(policy: ApplyPolicy, speeds: Sequence[float]) -> list[Window]:
    """The windows of a run of its own."""
    os.environ[_CASE] = json.dumps({"policy": policy, "speeds": list(speeds)})
    return run_ranks(len(speeds), threads=1)


def run_rank(team: Team, arguments: argparse.Namespace) -> None:
    """One rank of a run; leaves its windows."""
    case = json.loads(os.environ[_CASE])
    cores = spread_cores(case["speeds"])
    os.sched_setaffinity(0, {cores[team.rank]})
    names = ("batch_size", "micro_batch_size", "windows", "anchor", "local_windows")
    sizes = {name: getattr(arguments, name) for name in (*names, "width", "layers")}
    setting = Setting(speeds=tuple(case["speeds"]), max_anchor=arguments.anchor, **sizes)
    way = Evener(team, setting, case["policy"])
    way.run(1)
    inner = [not way.is_tail(window, way.turns[-1]) for window in way.turns[-1]]
    way.close()
    team.finish([w for w, counts in zip(way.turns[-1], inner, strict=True) if counts])


def measured(windows: Sequence[Window]) -> tuple[float, float]:
    """Samples per second of a run, and the part of the time that it lost."""
    inner = windows[WARM_UP_WINDOWS:]
    return speed_of(inner), over_ranks(lost_time(inner)).total


def predicted_from(
    earlier: Sequence[Window], policy: ApplyPolicy, arguments: argparse.Namespace
) -> TeamPrediction:
    """What a run of a policy would do, from the windows of an earlier run of SYNC."""
    team = measured_team(earlier, "the earlier run").team
    anchor = arguments.anchor
    size = arguments.micro_batch_size
    team = replace(team, local_batch_size=size, anchor=anchor, max_anchor=anchor)
    return predict(team, policy)


def describe(
    policy: ApplyPolicy, pairs: Sequence[Pair], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of a policy."""
    predictions = [pair.predicted for pair in pairs]
    return {
        "name": f"evener.{policy}",
        **facts,
        "runs": len(pairs),
        **spread("samples_per_s", [pair.samples_per_s for pair in pairs]),
        **spread("predicted", [one.samples_per_s for one in predictions]),
        **spread("error", [abs(pair.bias) for pair in pairs]),
        "error_aim": ERROR_AIM,
        **spread("bias", [pair.bias for pair in pairs]),
        **spread("lost", [pair.lost for pair in pairs]),
        **spread("predicted_lost", [one.lost for one in predictions]),
        **spread("lost_error", [abs(pair.lost_bias) for pair in pairs]),
        "lost_error_aim": LOST_AIM,
    }


if __name__ == "__main__":
    raise SystemExit(main())
