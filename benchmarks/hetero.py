"""Throughput of unequal ranks, and where their time goes: evener beside what else there is.

    python benchmarks/hetero.py --json hetero.json
    python benchmarks/hetero.py --quick
    python benchmarks/hetero.py --speeds 1,0.3333 --slowed-by sleep --ways evener.sync

All ways run in the same processes on the same model, data and speeds, one after another in each
round, in an order that changes, so that a machine whose speed drifts favours none of them. Slow
ranks sleep in proportion to what they have computed, or have a quota of processor time (as root, on
Linux). Each rank has a core of its own as far as there are enough, and the slow ones share.

``of_ideal`` is a way's throughput over the sum of the solo speeds of the same round: one rank alone
over whole global batches, with an optimizer step for each. ``of_ceiling`` is that over the ceiling
of the same round: the same ranks side by side with the same local batches, and an optimizer step
for each, without any exchange; with a step for each micro-batch for ways that make local steps.
Figures are medians over rounds; ``_90`` is the interval that holds 90 % of them.

``lost`` is the part of ranks' time that was not compute, from the events of their windows: waiting
for others, exchange, and bookkeeping. ``unnamed`` is the part of a turn's time that its windows'
times fail to name. ``evener.cadence`` and ``evener.async`` make local optimizer steps on one
micro-batch each.

At last, a rank with a fiftieth of the speed on a small model: it is parked, with a warning, and
``of_fastest`` is the throughput from the 20th window on over that of the fast rank alone.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import quota
from lost import TOLERANCE, Lost, lost_time, over_ranks, unnamed
from machine import load_average, write_report
from rounds import Team, is_rank, ratios, run_ranks, shuffled, some_of, spread
from tables import text_of
from ways import Ceiling, Evener, LocalCeiling, Setting, Solo, TorchDdp, TunedDdp, Way, speed_of

SLOWED_BY = ("sleep", "quota")
TEAMS = ((1.0, 1 / 3), (1.0, 0.5, 0.25))
FAR = (1.0, 0.02)
#: A rank slower than this is not worth its exchange: what counts is what it costs the others.
FAR_BELOW = 1 / 16
#: From this window on it costs nothing any more.
FAR_FROM = 20
FAR_MODEL = {"width": 64, "layers": 2, "batch_size": 32, "windows": 60}
#: What a way may lose of its ranks' time.
AIMS = {"evener.sync": 0.06, "evener.cadence": 0.03, "evener.async": 0.02}
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
    before, rows = load_average(), []
    for slowed_by in arguments.slowed_by:
        if slowed_by == "quota" and (reason := quota.why_not()):
            print(f"left out: ranks under a quota: {reason}")
            continue
        for speeds in arguments.speeds:
            os.environ[_CASE] = f"{slowed_by} {','.join(map(str, speeds))}"
            with quota.Quotas(speeds) if slowed_by == "quota" else nullcontext():
                rows += run_ranks(len(speeds), threads=1)
    print(text_of(rows))
    write_report(
        arguments.json,
        benchmark="hetero",
        load_average=[before, load_average()],
        arguments={k: v for k, v in vars(arguments).items() if k != "json"},
        rows=rows,
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--speeds",
        type=read_speeds,
        action="append",
        metavar="1,SPEED,...",
        help="of the ranks, relative to the fastest; several times for several teams",
    )
    parser.add_argument("--slowed-by", type=some_of(SLOWED_BY), default=list(SLOWED_BY))
    parser.add_argument("--ways", type=some_of(WAYS), default=list(WAYS), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=8, help="global batches a turn")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="of solo and evener")
    parser.add_argument("--anchor", type=int, default=8, help="of evener.cadence and evener.async")
    parser.add_argument("--local-windows", type=int, default=6, help="theirs a turn, about")
    parser.add_argument(
        "--cores",
        type=core_numbers,
        metavar="CORE,...",
        help="the core of each rank, as devices have theirs, or 'any'; spread by speed without",
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one team of two, asleep; 3 rounds")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.slowed_by = 3, ["sleep"]
    if arguments.speeds is None:
        arguments.speeds = [TEAMS[0], FAR] if arguments.quick else [*TEAMS, FAR]
    return arguments


def read_speeds(text: str) -> tuple[float, ...]:
    """``1,0.5`` as numbers."""
    try:
        values = tuple(float(t) for t in text.split(","))
    except ValueError:
        values = ()
    if len(values) < 2 or not all(0 < v <= 1 for v in values):
        raise argparse.ArgumentTypeError(
            "give two or more speeds above 0 and at most 1, such as 1,0.3333"
        )
    return values


def core_numbers(text: str) -> list[int]:
    """``0,1,1`` as numbers; none for ``any``."""
    if text == "any":
        return []
    usable = os.sched_getaffinity(0)
    cores = [int(t) if t.isdecimal() else -1 for t in text.split(",")]
    if unknown := [c for c in cores if c not in usable]:
        raise argparse.ArgumentTypeError(f"core {unknown[0]} is none of {sorted(usable)}")
    return cores


def spread_cores(speeds: Sequence[float]) -> list[int]:
    """A core for each rank, the fastest first, each on the core that has least to do so far."""
    load = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    cores = [0] * len(speeds)
    for rank in sorted(range(len(speeds)), key=lambda r: -speeds[r]):
        cores[rank] = min(load, key=lambda core: load[core])
        load[cores[rank]] += speeds[rank]
    return cores


FROM_COMMAND_LINE = (
    *("batch_size", "micro_batch_size", "windows", "anchor", "local_windows", "width", "layers"),
)


class Case:
    """One rank's part in measuring one team: all ways, interleaved.

    Args:
        team: This rank among the others.
        speeds: Of the ranks.
        slowed_by: What makes slow ranks slow.
        arguments: The command line.
    """

    #: What is not from the command line.
    model: Mapping[str, int] = {}

    def __init__(
        self, team: Team, speeds: Sequence[float], slowed_by: str, arguments: argparse.Namespace
    ) -> None:
        cores = spread_cores(speeds) if arguments.cores is None else arguments.cores
        if cores:
            os.sched_setaffinity(0, {cores[team.rank % len(cores)]})
        quota.join(team.rank)
        self.team, self.arguments = team, arguments
        self.setting = Setting(
            speeds=tuple(speeds),
            sleeps=slowed_by == "sleep",
            **{name: getattr(arguments, name) for name in FROM_COMMAND_LINE} | self.model,
        )
        self.facts = {
            "speeds": [round(s, 4) for s in speeds],
            "slowed_by": slowed_by,
            "batch_size": self.setting.batch_size,
            "params": sum(p.numel() for p in Way(team, self.setting).model.parameters()),
        }

    def run(self) -> None:
        """Measures, and leaves the rows."""
        team, setting, arguments = self.team, self.setting, self.arguments
        made: list[Way] = [Solo(team, setting, rank) for rank in range(team.world_size)]
        made += [Ceiling(team, setting), LocalCeiling(team, setting)]
        made += [WAYS[name](team, setting) for name in arguments.ways]
        ways = {way.name: way for way in made}
        figures: dict[str, list[float]] = {name: [] for name in ways}
        lost: dict[str, list[Mapping[int, Lost]]] = {name: [] for name in ways}
        unnamed_parts: dict[str, list[float]] = {name: [] for name in ways}
        team.tell(f"speeds {self.facts['speeds']}, slowed by {self.facts['slowed_by']}")
        for number, names in enumerate(shuffled(list(ways), arguments.rounds + 1)):
            for name in names:
                way = ways[name]
                figures[name].append(way.run(self.steps_of(way, short=number == 0)))
                if isinstance(way, Evener):
                    walls_s = [s for [s] in team.gather([way.walls_s[-1]])]
                    if way.turns[-1]:
                        lost[name].append(lost_time(way.inner(way.turns[-1])))
                        unnamed_parts[name].append(unnamed(way.turns[-1], walls_s))
            shown = ", ".join(f"{n} {v[-1]:.1f}" for n, v in figures.items())
            team.tell(f"{f'round {number}' if number else 'warm-up'}: samples/s {shown}")
        rows = []
        for name, way in ways.items():
            rows.append({"name": name, **self.facts, **speeds_of(way, figures)})
            if lost[name]:
                rows[-1] |= describe_lost(name, lost[name][1:], unnamed_parts[name][1:])
                rows[-1] |= describe_windows(way.turns[-1])
        team.finish(rows)
        for way in made:
            way.close()

    def steps_of(self, way: Way, *, short: bool) -> int:
        """Global batches of a turn; slow ways get fewer, a warm-up round the least."""
        windows: int = self.setting.windows
        if short and not isinstance(way, Evener):
            return 1
        if isinstance(way, Solo):
            return max(1, round(windows * self.setting.speeds[way.alone] / 2))
        return max(1, windows // 2 if isinstance(way, Ceiling) else windows // 4)


class FarCase(Case):
    """A rank that is so slow that the others are faster without it, on a small model."""

    model = FAR_MODEL

    def run(self) -> None:
        """Measures, and leaves the rows."""
        team, setting = self.team, self.setting
        fastest = max(range(team.world_size), key=lambda rank: setting.speeds[rank])
        solo, sync = Solo(team, setting, fastest), Evener(team, setting)
        figures: dict[str, list[float]] = {solo.name: [], sync.name: []}
        team.tell(f"speeds {self.facts['speeds']}, slowed by {self.facts['slowed_by']}")
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


def speeds_of(way: Way, figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A row's speeds; ``figures`` are samples per second by way and round, the warm-up first."""
    solo = [values[1:] for name, values in figures.items() if name.startswith("solo.")]
    ideal = [sum(speeds) for speeds in zip(*solo, strict=True)]
    values, ceiling = figures[way.name][1:], figures[way.ceiling][1:]
    return {
        **spread("samples_per_s", values),
        **spread("of_ideal", ratios(values, ideal)),
        **spread("of_ceiling", ratios(values, ceiling)),
    }


def describe_lost(
    name: str, turns: Sequence[Mapping[int, Lost]], unnamed_parts: Sequence[float]
) -> dict[str, Any]:
    """What a way of evener's lost, and whether its windows' times add up."""
    of_team = [asdict(over_ranks(turn)) for turn in turns]
    by_rank = {
        rank: round(statistics.median(turn[rank].total for turn in turns), 4) for rank in turns[0]
    }
    rest = statistics.median(unnamed_parts)
    return {
        **spread("lost", [over_ranks(turn).total for turn in turns]),
        "lost_aim": AIMS.get(name),
        **{
            f"lost_{part}": round(statistics.median(turn[part] for turn in of_team), 4)
            for part in of_team[0]
        },
        "lost_by_rank": by_rank,
        "unnamed": round(rest, 4),
        "adds_up": abs(rest) <= TOLERANCE,
    }


def describe_windows(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last turn of evener's."""
    shares = [row["samples"] for row in max(windows, key=lambda w: w["window"])["ranks"]]
    anchors = [window["anchor"] for window in windows if "anchor" in window]
    return {"windows": len(windows), "shares": shares} | (
        {"anchor": max(anchors)} if anchors else {}
    )


def make_equal_split(team: Team, setting: Setting) -> Way:
    """evener with equal shares."""
    return Evener(team, setting, equal=True)


def make_cadence(team: Team, setting: Setting) -> Way:
    """evener, whose ranks make local steps and then average."""
    return Evener(team, setting, "cadence")


def make_async(team: Team, setting: Setting) -> Way:
    """evener, whose ranks average in the background."""
    return Evener(team, setting, "async")


#: What is measured beside each rank alone and the ceilings.
WAYS: dict[str, Callable[[Team, Setting], Way]] = {
    "torch.ddp": TorchDdp,
    "torch.ddp.tuned": TunedDdp,
    "evener.equal_split": make_equal_split,
    "evener.sync": Evener,
    "evener.cadence": make_cadence,
    "evener.async": make_async,
}


if __name__ == "__main__":
    raise SystemExit(main())
