"""Throughput of unequal ranks, and where their time goes: evener beside torch's DDP.

    python benchmarks/hetero.py --json hetero.json
    python benchmarks/hetero.py --quick
    python benchmarks/hetero.py --speeds 1,0.3333 --ways evener.sync

Slow ranks sleep in proportion to what they have computed. Each rank has a core of its own as far as
there are enough, and the slow ones share.

At last, a rank with a fiftieth of the speed on a small model: it is parked, with a warning, and
``of_fastest`` is the throughput from the 20th window on over that of the fast rank alone.
"""

import argparse
from collections.abc import Callable
from typing import Any

from report import load_before, ratios, some_of, spread, text_of, write_report
from rounds import Team, is_rank, run_ranks
from unequal import TEAMS, make_unequal_parser, pin, sizes_of
from ways import (
    POLICIES,
    Ceiling,
    Comparison,
    Evener,
    LocalCeiling,
    Setting,
    Solo,
    TorchDdp,
    TunedDdp,
    Way,
    speed_of,
)

FAR = (1.0, 0.02)
#: A rank slower than this is not worth its exchange: what counts is what it costs the others.
FAR_BELOW = 1 / 16
#: From this window on it costs nothing any more.
FAR_FROM = 20
FAR_MODEL = {"width": 64, "layers": 2, "batch_size": 32}

#: What is measured beside each rank alone and the ceilings.
WAYS: dict[str, Callable[[Team, Setting], Way]] = {
    "torch.ddp": TorchDdp,
    "torch.ddp.tuned": TunedDdp,
    "evener.equal_split": lambda team, setting: Evener(team, setting, equal=True),
    **{f"evener.{p}": lambda team, setting, p=p: Evener(team, setting, p) for p in POLICIES},
}
USUAL = [name for name in WAYS if name != "evener.equal_split"]


def main() -> None:
    """Start a team for each case; print and write what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return
    before, rows = load_before(), []
    for speeds in arguments.speeds:
        of_team = run_ranks(len(speeds), case=speeds)
        print(text_of(of_team), flush=True)
        rows += of_team
        write_report(arguments, before, rows)  # a run that is cut off keeps these teams


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_unequal_parser(__doc__, windows=6, local_windows=4)
    parser.add_argument("--ways", type=some_of(WAYS), default=USUAL, metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--far-windows", type=int, default=40, help="with a rank far slower")
    parser.add_argument("--quick", action="store_true", help="one team of two; 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 3
    if arguments.speeds is None:
        arguments.speeds = [TEAMS[0], FAR] if arguments.quick else [*TEAMS, FAR]
    return arguments


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """Measure one team: one rank's part."""
    speeds = tuple(team.case)
    pin(team.rank, speeds)
    is_far = min(speeds) < FAR_BELOW
    sizes = sizes_of(arguments) | (FAR_MODEL | {"windows": arguments.far_windows} if is_far else {})
    setting = Setting(speeds=speeds, **sizes)
    facts = {
        "speeds": [round(s, 4) for s in speeds],
        "batch_size": setting.batch_size,
        "params": sum(p.numel() for p in Way(team, setting).model.parameters()),
    }
    team.tell(f"speeds {facts['speeds']}")
    if is_far:
        team.finish(measure_far(team, setting, arguments.rounds, facts))
        return
    ways: list[Way] = [Solo(team, setting, rank) for rank in range(team.world_size)]
    ways += [Ceiling(team, setting), LocalCeiling(team, setting)]
    ways += [WAYS[name](team, setting) for name in arguments.ways]
    comparison = Comparison(team, ways, setting.windows)
    comparison.run(arguments.rounds)
    team.finish(comparison.rows(facts))
    comparison.close()


def measure_far(
    team: Team, setting: Setting, rounds: int, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure a rank that is so slow that the others are faster without it."""
    fastest = max(range(team.world_size), key=lambda rank: setting.speeds[rank])
    solo, sync = Solo(team, setting, fastest), Evener(team, setting)
    figures: dict[str, list[float]] = {solo.name: [], sync.name: []}
    for number in range(rounds + 1):
        figures[solo.name].append(solo.run(setting.windows if number else 1))
        sync.run(setting.windows)
        late = [w for turn in sync.turns[-1:] for w in turn if w["window"] >= FAR_FROM]
        figures[sync.name].append(max(s for [s] in team.gather([speed_of(late)])))
        team.tell(", ".join(f"{n} {v[-1]:.1f} samples/s" for n, v in figures.items()))
    rows = [
        {"name": name, **facts, **spread("samples_per_s", values[1:])}
        for name, values in figures.items()
    ]
    parked = [w["window"] for turn in sync.turns for w in turn if w["parked"]]
    rows[-1] |= spread("of_fastest", ratios(figures[sync.name][1:], figures[solo.name][1:]))
    rows[-1] |= {"parked_from": min(parked, default=None)}
    sync.close()
    return rows


if __name__ == "__main__":
    main()
