"""How long a team is held up when a worker is killed, and whether anything is lost.

    python benchmarks/kill.py --workers 2,3 --kills 20 --json kill.json

A worker is killed by SIGKILL at a random moment. Measured is the time from the kill to the next
committed window, less the length of a window. The killed worker is replaced by the launcher; the
next kill comes once all take part again. The command fails if a run ends, if a worker holds other
bits than the others after a window, or if a sample of an epoch is not committed exactly once.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from elastic_runs import ElasticTeam, committed, times_seen
from machine import load_average, load_before, write_report
from options import make_parser, numbers

#: Delays above this are listed one by one.
LISTED_S = 3.0


def main() -> None:
    """Kills workers of each team as often as was asked for."""
    arguments = parse_arguments()
    before = load_before()
    draw = random.Random(arguments.seed)
    rows = [kill(arguments, workers, draw) for workers in arguments.workers]
    for row in rows:
        print(
            f"{row['workers']} workers: {row['continued']} of {row['kills']} kills survived; "
            f"beyond a window of {row['window_s']:.3f} s: median {row['delay_s']:.2f} s, "
            f"90th percentile {row['delay_s_p90']:.2f} s; back after {row['back_s']:.1f} s; "
            f"samples by number of times: {row['times_seen']}"
        )
    write_report(arguments, before, rows)
    whole = all(set(row["times_seen"]) <= {"1"} for row in rows)
    sys.exit(0 if whole and all(row["continued"] == row["kills"] for row in rows) else 1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=numbers, default=[2, 3])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.004, metavar="SECONDS", help="per sample")
    return parser.parse_args()


def kill(arguments: argparse.Namespace, workers: int, draw: random.Random) -> dict[str, Any]:
    """Kills one worker after the other."""
    options = ("--samples", arguments.samples, "--batch-size", arguments.batch_size)
    more = ("--sleep", arguments.sleep, "--epochs", 1_000_000)
    delays, backs, listed, window_s = [], [], [], 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticTeam(Path(folder), workers, (*options, *more)) as team,
    ):
        for _ in range(arguments.kills):
            team.wait_for_all(windows=5)
            window_s = usual_window_s(team)
            time.sleep(draw.uniform(0.0, 3 * window_s))
            killed_t = draw.choice(team.alive()).kill()
            delay_s = team.wait_for_commit(killed_t) - killed_t - window_s
            delays.append(max(0.0, delay_s))
            if delay_s > LISTED_S:
                listed.append({"delay_s": round(delay_s, 2), "load": load_average()})
            team.wait_for_all()
            backs.append(time.time() - killed_t)
        windows = committed(team.logs())
    return {
        "name": "evener.elastic",
        "workers": workers,
        "kills": arguments.kills,
        "continued": len(delays),
        "window_s": round(window_s, 4),
        "delay_s": round(statistics.median(delays), 3),
        "delay_s_p90": round(float(np.quantile(delays, 0.9)), 3),
        "delay_s_max": round(max(delays), 3),
        "back_s": round(statistics.median(backs), 2),
        "above_3_s": listed,
        "times_seen": {str(k): v for k, v in times_seen(windows, arguments.samples).items()},
    }


def usual_window_s(team: ElasticTeam) -> float:
    """The median time between the latest commits that a worker has seen."""
    times = [c["t"] for c in max(team.alive(), key=lambda log: len(log.commits)).commits[-12:]]
    return statistics.median(b - a for a, b in pairwise(times))


if __name__ == "__main__":
    main()
