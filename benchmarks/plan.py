"""Does a team do what ``evener plan`` predicts? Throughput and lost time, from an earlier run.

    python benchmarks/plan.py --json plan.json
    python benchmarks/plan.py --quick

Ranks are started anew for each pair of runs, one of SYNC and one of CADENCE. What a run does is
predicted from a run of the pair before: from the events that say how fast ranks computed there,
side by side, by the code of ``evener plan RUN``. ``told_by`` is the policy of that earlier run. (A
SYNC run is not predicted from one of CADENCE, in which updates are not timed by themselves.)

docs/benchmarks.md says what columns are.

Predictions are of the middle of an epoch: the first windows, in which the planner
learns how fast ranks are, and the tail of an epoch of CADENCE do not count. The report is written
after each pair.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from report import load_before, spread, text_of, write_report
from rounds import Team, is_rank, run_ranks
from unequal import TEAMS, make_unequal_parser, pin, sizes_of
from ways import Evener, Setting, Window, lost_time, speed_of

from evener.planning.policies import ApplyPolicy
from evener.simulation.measured_team import measured_team
from evener.simulation.prediction import TeamPrediction, predict

SYNC, CADENCE = ApplyPolicy.SYNC, ApplyPolicy.CADENCE
#: The policy of an earlier run, and that of the run which is predicted from it.
CASES = ((SYNC, SYNC), (SYNC, CADENCE), (CADENCE, CADENCE))
#: First windows of a run that do not count.
LEARNING = 4
#: What is aimed at: of the throughput, and in points of lost time.
ERROR_AIM, LOST_AIM = 0.05, 0.03

Case = tuple[ApplyPolicy, ApplyPolicy]


class Pair(NamedTuple):
    """A run and the speed of the run before it, and what was predicted of it."""

    samples_per_s: float
    lost: float
    before: float
    predicted: TeamPrediction

    @property
    def bias(self) -> float:
        """Return by which part the prediction is above the measured throughput."""
        return self.predicted.samples_per_s / self.samples_per_s - 1.0


def main() -> None:
    """Start the runs; print and write how far predictions are off."""
    arguments = parse_arguments()
    if is_rank():
        run_rank(Team(), arguments)
        return
    before = load_before()
    rows: list[dict[str, Any]] = []
    for speeds in arguments.speeds:
        found: list[dict[str, Any]] = []
        pairs: dict[Case, list[Pair]] = {case: [] for case in CASES}
        earlier = run_both(speeds)
        for number in range(arguments.runs):
            runs = run_both(speeds)
            for (told_by, of), known in pairs.items():
                predicted = predicted_from(earlier[told_by], of, arguments)
                before_per_s, _ = measured(earlier[of])
                known.append(pair := Pair(*measured(runs[of]), before_per_s, predicted))
                print(f"run {number} of {of}, told by {told_by}: {pair.bias:+.1%}", flush=True)
            earlier = runs
            found = [describe(case, known, speeds) for case, known in pairs.items()]
            write_report(arguments, before, [*rows, *found])
        rows += found
    print(text_of(rows))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_unequal_parser(__doc__, windows=20, local_windows=11)
    parser.add_argument("--runs", type=int, default=7, help="predicted runs of each policy")
    parser.add_argument("--quick", action="store_true", help="one team of two, one run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs = 1
    if arguments.speeds is None:
        arguments.speeds = [TEAMS[0]] if arguments.quick else list(TEAMS)
    return arguments


def run_both(speeds: Sequence[float]) -> dict[ApplyPolicy, list[Window]]:
    """Return the windows of a run of each policy, by ranks that are started for them."""
    rows = run_ranks(len(speeds), case=speeds)
    return {ApplyPolicy(row["policy"]): row["windows"] for row in rows}


def run_rank(team: Team, arguments: argparse.Namespace) -> None:
    """Be one rank of the runs, and leave their windows."""
    speeds = tuple(team.case)
    pin(team.rank, speeds)
    # An anchor that grew would make later windows longer than earlier ones.
    setting = Setting(speeds=speeds, max_anchor=arguments.anchor, **sizes_of(arguments))
    rows = []
    for policy in (SYNC, CADENCE):
        way = Evener(team, setting, policy)
        way.run(1)
        windows = [w for w in way.turns[-1] if not way.is_tail(w, way.turns[-1])]
        rows.append({"policy": policy, "windows": windows})
        way.close()
    team.finish(rows)


def measured(windows: Sequence[Window]) -> tuple[float, float]:
    """Return the samples per second of a run, and the part of the time that it lost."""
    inner = windows[LEARNING:]
    return speed_of(inner), sum(lost_time(inner).values())


def predicted_from(
    earlier: Sequence[Window], policy: ApplyPolicy, arguments: argparse.Namespace
) -> TeamPrediction:
    """Return what a run of a policy would do, from the windows of an earlier run."""
    team = measured_team(earlier, "the earlier run")
    anchor = arguments.anchor
    size = arguments.micro_batch_size
    team = replace(team, local_batch_size=size, anchor=anchor, max_anchor=anchor)
    return predict(team, policy)


def describe(case: Case, pairs: Sequence[Pair], speeds: Sequence[float]) -> dict[str, Any]:
    """Return the row of a policy."""
    told_by, policy = case
    row = {
        "name": f"evener.{policy}",
        "speeds": [round(s, 4) for s in speeds],
        "told_by": str(told_by),
        "runs": len(pairs),
        **spread("samples_per_s", [pair.samples_per_s for pair in pairs]),
        **spread("predicted", [pair.predicted.samples_per_s for pair in pairs]),
        **spread("error", [abs(pair.bias) for pair in pairs]),
        "error_aim": ERROR_AIM,
        **spread("bias", [pair.bias for pair in pairs]),
        **spread("drift", [abs(pair.before / pair.samples_per_s - 1.0) for pair in pairs]),
        **spread("lost", [pair.lost for pair in pairs]),
        **spread("predicted_lost", [pair.predicted.lost for pair in pairs]),
        **spread("lost_error", [abs(pair.predicted.lost - pair.lost) for pair in pairs]),
        "lost_error_aim": LOST_AIM,
    }
    is_met = row["error"] <= ERROR_AIM and row["lost_error"] <= LOST_AIM
    return {**row, "verdict": "met" if is_met else "missed"}


if __name__ == "__main__":
    main()
