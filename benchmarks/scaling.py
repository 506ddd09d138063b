"""Throughput by the number of ranks, where compute is mostly waiting, as for a device of one's own.

    python benchmarks/scaling.py --json scaling.json
    python benchmarks/scaling.py --quick

Each rank sleeps for each of its samples, and computes next to nothing: so one machine holds more
ranks than it has cores, and what is measured is what a team costs. The samples of a rank stay the
same; the global batch grows with the team. ``of_ideal`` is over the ranks' number times what one
does alone, ``of_ceiling`` over the same ranks without any exchange, both of the same round: what
the ceiling lacks of 1, ranks take from one another on shared cores.
"""

import argparse

from comparison import EVENER, Comparison
from machine import load_before, write_report
from options import make_parser, numbers
from rounds import Team, is_rank, run_ranks
from tables import text_of
from ways import Ceiling, LocalCeiling, Setting, Solo, TunedDdp, Way

RANKS = (1, 2, 4, 8)


def main() -> int:
    """Starts teams of each size; prints and writes what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return 0
    before, rows = load_before(), []
    for count in arguments.ranks:
        rows += run_ranks(count, threads=1)
    print(text_of(rows))
    write_report(arguments, before, rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=numbers, default=list(RANKS), metavar="N,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=10, help="global batches a turn")
    parser.add_argument("--samples", type=int, default=16, help="of a global batch, for each rank")
    parser.add_argument("--sample-s", type=float, default=0.01, help="sleep for each of them")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="1, 2 and 4 ranks, 2 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.rounds = [1, 2, 4], 2
    return arguments


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """One rank of a team of one size."""
    setting = Setting(
        speeds=(1.0,) * team.world_size,
        batch_size=arguments.samples * team.world_size,
        micro_batch_size=arguments.samples // 2,
        windows=arguments.windows,
        anchor=max(2, arguments.windows // 2),
        local_windows=4,
        sleeps=False,
        width=arguments.width,
        layers=1,
        seq_len=8,
        sample_sleep_s=arguments.sample_s,
    )
    ways: list[Way] = [Solo(team, setting, 0), Ceiling(team, setting), LocalCeiling(team, setting)]
    ways += [TunedDdp(team, setting), *(make(team, setting) for make in EVENER.values())]
    comparison = Comparison(team, ways, setting.windows)
    team.tell(f"{team.world_size} ranks")
    comparison.run(arguments.rounds)
    params = sum(p.numel() for p in ways[0].model.parameters())
    team.finish(comparison.rows({"ranks": team.world_size, "params": params}))
    comparison.close()


if __name__ == "__main__":
    raise SystemExit(main())
