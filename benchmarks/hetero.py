"""Throughput of unequal ranks, and where their time goes: evener beside what else there is.

    python benchmarks/hetero.py --json hetero.json
    python benchmarks/hetero.py --quick
    python benchmarks/hetero.py --speeds 1,0.3333 --slowed-by sleep --ways evener.sync
    python benchmarks/hetero.py --with accelerate,fabric,torchft

All ways run in the same processes on the same model, data and speeds, one after another in each
round, in an order that changes, so that a machine whose speed drifts favours none of them. Slow
ranks sleep in proportion to what they have computed, or have a quota of processor time (as root, on
Linux). Each rank has a core of its own as far as there are enough, and the slow ones share.

``of_ideal`` is a way's throughput over the sum of the solo speeds of the same round: one rank alone
over whole global batches, with an optimizer step for each. ``of_ceiling`` is that over the ceiling
of the same round: the same ranks side by side with the same local batches, and an optimizer step
for each, without any exchange; with a step for each micro-batch for ways that make local steps.
Figures are medians over rounds; ``_90`` is their 5th and 95th percentile.

``lost`` is the part of ranks' time that was not compute, from the events of their windows: waiting
for others, exchange, and bookkeeping. ``unnamed`` is the part of a turn's time that its windows'
times fail to name. ``evener.cadence`` and ``evener.async`` make local optimizer steps on one
micro-batch each.

At last, a rank with a fiftieth of the speed on a small model: it is parked, with a warning, and
``of_fastest`` is the throughput from the 20th window on over that of the fast rank alone.

The table of a team is printed, and the report written, once the team has been measured.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import quota
from comparison import EVENER, Comparison
from competitors import add_libraries, enter, missing, ways_of
from machine import load_before, write_report
from options import some_of
from rounds import Team, is_rank, run_ranks
from tables import ratios, spread, text_of
from unequal import TEAMS, make_unequal_parser, read_speeds, sizes_of, spread_cores
from ways import Ceiling, Evener, LocalCeiling, Setting, Solo, TorchDdp, TunedDdp, Way, speed_of

SLOWED_BY = ("sleep", "quota")
FAR = (1.0, 0.02)
#: A rank slower than this is not worth its exchange: what counts is what it costs the others.
FAR_BELOW = 1 / 16
#: From this window on it costs nothing any more.
FAR_FROM = 20
FAR_MODEL = {"width": 64, "layers": 2, "batch_size": 32}
_CASE = "EVENER_BENCHMARK_CASE"


def main() -> int:
    """Starts a team for each case; prints and writes what they measured."""
    arguments = parse_arguments()
    if is_rank():
        slowed_by, text = os.environ[_CASE].split()
        speeds = read_speeds(text)
        case = FarCase if min(speeds) < FAR_BELOW else Case
        case(Team(), speeds, slowed_by, arguments).run()
        return 0
    enter(arguments.libraries)
    before, rows = load_before(), []
    for slowed_by in arguments.slowed_by:
        if slowed_by == "quota" and (reason := quota.why_not()):
            print(f"left out: ranks under a quota: {reason}")
            continue
        for speeds in arguments.speeds:
            os.environ[_CASE] = f"{slowed_by} {','.join(map(str, speeds))}"
            with quota.Quotas(speeds) if slowed_by == "quota" else nullcontext():
                of_team = run_ranks(len(speeds), threads=1)
            print(text_of(of_team), flush=True)
            rows += of_team
            write_report(arguments, before, rows)  # a run that is cut off keeps these teams
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_unequal_parser(__doc__, windows=6, local_windows=5)
    parser.add_argument("--slowed-by", type=some_of(SLOWED_BY), default=list(SLOWED_BY))
    parser.add_argument("--ways", type=some_of(WAYS), default=USUAL, metavar="NAME,...")
    add_libraries(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--far-windows", type=int, default=40, help="with a rank far slower")
    parser.add_argument(
        "--cores",
        type=core_numbers,
        metavar="CORE,...",
        help="the core of each rank, as devices have theirs, or 'any'; spread by speed without",
    )
    parser.add_argument("--quick", action="store_true", help="one team of two, asleep; 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.slowed_by = 3, ["sleep"]
    if arguments.speeds is None:
        arguments.speeds = [TEAMS[0], FAR] if arguments.quick else [*TEAMS, FAR]
    return arguments


def core_numbers(text: str) -> list[int]:
    """``0,1,1`` as numbers; none for ``any``."""
    if text == "any":
        return []
    usable = os.sched_getaffinity(0)
    cores = [int(t) if t.isdecimal() else -1 for t in text.split(",")]
    if unknown := [c for c in cores if c not in usable]:
        raise argparse.ArgumentTypeError(f"core {unknown[0]} is none of {sorted(usable)}")
    return cores


class Case:
    """One rank's part in measuring one team: all ways, interleaved.

    Args:
        team: This rank among the others.
        speeds: Of the ranks.
        slowed_by: What makes slow ranks slow.
        arguments: The command line.
    """

    def __init__(
        self, team: Team, speeds: Sequence[float], slowed_by: str, arguments: argparse.Namespace
    ) -> None:
        self.team, self.arguments = team, arguments
        cores = spread_cores(speeds) if arguments.cores is None else arguments.cores
        if cores:
            os.sched_setaffinity(0, {cores[team.rank % len(cores)]})
        quota.join(team.rank)
        self.setting = Setting(
            speeds=tuple(speeds),
            sleeps=slowed_by == "sleep",
            **sizes_of(arguments) | self.sizes(),
        )
        self.facts = {
            "speeds": [round(s, 4) for s in speeds],
            "slowed_by": slowed_by,
            "batch_size": self.setting.batch_size,
            "params": sum(p.numel() for p in Way(team, self.setting).model.parameters()),
        }

    def sizes(self) -> Mapping[str, int]:
        """What is another than the command line says."""
        return {}

    def run(self) -> None:
        """Measures, and leaves the rows."""
        team, setting, arguments = self.team, self.setting, self.arguments
        ways: list[Way] = [Solo(team, setting, rank) for rank in range(team.world_size)]
        ways += [Ceiling(team, setting), LocalCeiling(team, setting)]
        ways += [WAYS[name](team, setting) for name in arguments.ways]
        for library in arguments.libraries:
            ways += [kind(team, setting) for kind in ways_of(library) if not missing([library])]
        comparison = Comparison(team, ways, setting.windows)
        self.tell()
        comparison.run(arguments.rounds)
        team.finish(comparison.rows(self.facts))
        comparison.close()

    def tell(self) -> None:
        """Prints who is measured."""
        self.team.tell(f"speeds {self.facts['speeds']}, slowed by {self.facts['slowed_by']}")


class FarCase(Case):
    """A rank that is so slow that the others are faster without it, on a small model."""

    def sizes(self) -> Mapping[str, int]:
        """See ``Case``."""
        return FAR_MODEL | {"windows": self.arguments.far_windows}

    def run(self) -> None:
        """Measures, and leaves the rows."""
        team, setting = self.team, self.setting
        fastest = max(range(team.world_size), key=lambda rank: setting.speeds[rank])
        solo, sync = Solo(team, setting, fastest), Evener(team, setting)
        figures: dict[str, list[float]] = {solo.name: [], sync.name: []}
        self.tell()
        for number in range(self.arguments.rounds + 1):
            figures[solo.name].append(solo.run(setting.windows if number else 1))
            sync.run(setting.windows)
            late = [w for turn in sync.turns[-1:] for w in turn if w["window"] >= FAR_FROM]
            figures[sync.name].append(max(s for [s] in team.gather([speed_of(late)])))
            shown = ", ".join(f"{n} {v[-1]:.1f}" for n, v in figures.items())
            team.tell(f"{f'round {number}' if number else 'warm-up'}: samples/s {shown}")
        of_fastest = ratios(figures[sync.name][1:], figures[solo.name][1:])
        rows = []
        for name, values in figures.items():
            rows.append({"name": name, **self.facts, **spread("samples_per_s", values[1:])})
        windows = [window for turn in sync.turns for window in turn]
        parked = [window["window"] for window in windows if window["parked"]]
        rows[-1] |= spread("of_fastest", of_fastest)
        rows[-1] |= {"parked_from": min(parked, default=None), "windows": len(windows)}
        team.finish(rows)
        sync.close()


def make_equal_split(team: Team, setting: Setting) -> Way:
    """evener with equal shares."""
    return Evener(team, setting, equal=True)


#: What is measured beside each rank alone and the ceilings.
WAYS: dict[str, Callable[[Team, Setting], Way]] = {
    "torch.ddp": TorchDdp,
    "torch.ddp.tuned": TunedDdp,
    "evener.equal_split": make_equal_split,
    **EVENER,
}

USUAL = [name for name in WAYS if name != "evener.equal_split"]


if __name__ == "__main__":
    raise SystemExit(main())
