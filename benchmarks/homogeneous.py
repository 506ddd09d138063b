"""Throughput of equal ranks: evener beside torch's DDP.

    python benchmarks/homogeneous.py --json homogeneous.json
    python benchmarks/homogeneous.py --quick

All ways train the same model on the same number of tokens, in turns, in processes that stay for a
whole case; a case is a size of the model and a number of tokens per rank and step. Ranks are pinned
to no core and compute on (cores / ranks) threads each.

docs/benchmarks.md says what ways and columns are.
"""

import argparse
import os
from contextlib import closing
from dataclasses import replace

from report import load_before, make_parser, numbers, some_of, text_of, write_report
from rounds import Team, is_rank, run_ranks
from ways import POLICIES, Ceiling, Comparison, Evener, Setting, Solo, TorchDdp, TunedDdp, Way

SEQ_LEN = 128
LEAST_ANCHOR, MOST_ANCHOR = 4, 8
#: Windows of a turn of a local policy that count.
LEAST_LOCAL_WINDOWS = 3

#: Width and layers.
MODELS = {"0.8M": (128, 4), "3M": (256, 4), "10M": (384, 6)}


def main() -> None:
    """Start the ranks; print and write what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return
    before = load_before()
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    rows = run_ranks(arguments.ranks, threads=threads)
    print(text_of(rows))
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS), metavar="NAME,...")
    parser.add_argument(
        "--samples", type=numbers, default=[1, 8], help=f"of {SEQ_LEN} tokens, per rank and step"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn-s", type=float, default=0.5, help="length of a turn, about")
    parser.add_argument("--quick", action="store_true", help="5 rounds, 2 models, one sample")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.samples = ["0.8M", "3M"], [1]
        arguments.rounds, arguments.turn_s = 5, 0.4
    return arguments


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """Measure every case: one rank's part."""
    rows = []
    for name in arguments.models:
        for share in arguments.samples:
            setting = make_setting(team, MODELS[name], share, arguments.turn_s)
            ways: list[Way] = [Solo(team, setting, rank) for rank in range(team.world_size)]
            ways += [kind(team, setting) for kind in (Ceiling, TorchDdp, TunedDdp)]
            ways += [Evener(team, setting, policy) for policy in POLICIES]
            team.tell(f"{name}, {share} samples per rank and step")
            with closing(Comparison(team, ways, setting.windows)) as comparison:
                comparison.run(arguments.rounds)
                facts = {
                    "params": sum(p.numel() for p in ways[0].model.parameters()),
                    "tokens_per_rank": share * SEQ_LEN,
                    "ranks": team.world_size,
                }
                rows += comparison.rows(facts)
    team.finish(rows)


def make_setting(team: Team, model: tuple[int, int], share: int, turn_s: float) -> Setting:
    """Return what all ways train, and how many steps fit into a turn here."""
    width, layers = model
    setting = Setting(
        speeds=(1.0,) * team.world_size,
        batch_size=share * team.world_size,
        micro_batch_size=share,
        max_anchor=0,
        width=width,
        layers=layers,
        seq_len=SEQ_LEN,
    )
    trial = Ceiling(team, setting)
    trial.run(2)
    # On all ranks alike: a turn has this many steps of each policy, of a local policy in windows.
    steps = team.first(max(1, round(turn_s * trial.run(4) / setting.batch_size)))
    anchor = max(LEAST_ANCHOR, min(MOST_ANCHOR, steps // 2))
    local_windows = max(LEAST_LOCAL_WINDOWS, steps // anchor)
    return replace(setting, windows=steps, anchor=anchor, local_windows=local_windows)


if __name__ == "__main__":
    main()
