"""Teams of unequal ranks: the options of benchmarks of them, and their cores."""

import argparse
import os
from collections.abc import Sequence

from report import make_parser

#: Speeds of ranks, relative to the fastest.
TEAMS = ((1.0, 1 / 3), (1.0, 0.5, 0.25))


def make_unequal_parser(
    description: str, *, windows: int, local_windows: int
) -> argparse.ArgumentParser:
    """Return a command line with the sizes of a run.

    Args:
        description: Of the benchmark.
        windows: Of a turn of SYNC, unless told otherwise.
        local_windows: Of one of CADENCE or ASYNC.
    """
    parser = make_parser(description)
    parser.add_argument(
        "--speeds",
        type=read_speeds,
        action="append",
        metavar="1,SPEED,...",
        help="of the ranks, relative to the fastest; several times for several teams",
    )
    parser.add_argument("--windows", type=int, default=windows, help="of a turn of sync")
    parser.add_argument("--local-windows", type=int, default=local_windows)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="also of a local step")
    parser.add_argument("--anchor", type=int, default=8, help="of cadence and async")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    return parser


def sizes_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of a run, as ``ways.Setting`` takes them."""
    names = ("batch_size", "micro_batch_size", "windows", "anchor", "local_windows")
    return {name: getattr(arguments, name) for name in (*names, "width", "layers")}


def read_speeds(text: str) -> tuple[float, ...]:
    """Read ``1,0.5`` as numbers."""
    try:
        values = tuple(float(t) for t in text.split(","))
    except ValueError:
        values = ()
    if len(values) < 2 or not all(0 < v <= 1 for v in values):
        raise argparse.ArgumentTypeError(
            "give two or more speeds above 0 and at most 1, such as 1,0.3333"
        )
    return values


def pin(rank: int, speeds: Sequence[float]) -> None:
    """Give this rank a core: the fastest first, each the core that has least to do so far."""
    load = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    cores = {}
    for each in sorted(range(len(speeds)), key=lambda r: -speeds[r]):
        cores[each] = min(load, key=lambda core: load[core])
        load[cores[each]] += speeds[each]
    os.sched_setaffinity(0, {cores[rank]})
