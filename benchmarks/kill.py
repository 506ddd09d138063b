"""How long a team is held up when a worker is killed, and whether anything is lost.

    python benchmarks/kill.py --json kill.json
    python benchmarks/kill.py --quick
    python benchmarks/kill.py --what stop --workers 3 --kills 10

A worker is killed by SIGKILL at a random moment. Measured is the time from the kill to the first
commit of a window that no worker had applied at that moment, less the usual length of a window: a
window that was over before the kill does not count. The launcher replaces the worker; the next kill
comes once all take part again. The workers of ``--workers`` compute, those of ``--sleepers`` sleep.
``--what stop`` stops a worker (SIGSTOP) and continues it ``--stopped-s`` after the team has
committed without it.

The command fails if a run ends, if a window is missing, if workers hold different bits after a
window or begin one with others (so a restarted worker contributes only with the team's bits), if no
epoch was completed, or if a sample of one was not trained on exactly once.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_logs import WorkerLog, first_commit, redone, verdict, window_s
from elastic_runs import ElasticTeam, send
from report import load_before, make_parser, numbers, some_of, spread, write_report

WHAT = ("kill", "stop")


def main() -> None:
    """Disturb each team as often as was asked for."""
    arguments = parse_arguments()
    before = load_before()
    draw = random.Random(arguments.seed)
    teams = [(workers, False) for workers in arguments.workers]
    teams += [(workers, True) for workers in arguments.sleepers]
    rows = [
        measure(arguments, what, workers, draw, sleep=sleep)
        for what in arguments.what
        for workers, sleep in teams
    ]
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_report(arguments, before, rows)
    sys.exit(0 if all(row["sound"] for row in rows) else 1)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--what", type=some_of(WHAT), default=["kill"], metavar="WHAT,...")
    parser.add_argument("--workers", type=numbers, help="of teams that compute; 2,3 by default")
    parser.add_argument("--sleepers", type=numbers, help="of teams that sleep; 5 by default")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--policy", default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--sleep", type=float, default=0.0005, help="seconds per sample, asleep")
    parser.add_argument("--stopped-s", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="3 kills of one of 2 that sleep")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kills = min(arguments.kills, 3)
    if arguments.workers is None and arguments.sleepers is None:
        arguments.workers, arguments.sleepers = ([], [2]) if arguments.quick else ([2, 3], [5])
    arguments.workers, arguments.sleepers = arguments.workers or [], arguments.sleepers or []
    return arguments


def measure(
    arguments: argparse.Namespace, what: str, workers: int, draw: random.Random, *, sleep: bool
) -> dict[str, Any]:
    """Disturb one team again and again, and check what it has done."""
    options = ["--samples", arguments.samples, "--batch-size", arguments.batch_size]
    options += ["--policy", arguments.policy]
    options += ["--sleep", arguments.sleep] if sleep else ["--width", arguments.width]
    moments: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticTeam(Path(folder), workers, options) as team,
    ):
        team.wait_for_all(windows=5)
        usual_s = window_s(team.logs())
        for _ in range(arguments.kills):
            time.sleep(draw.uniform(0.0, 3 * usual_s))
            victim = draw.choice(team.members())
            t = over_t = victim.kill() if what == "kill" else send(victim.pid, signal.SIGSTOP)
            if what == "stop":
                team.wait_for_commits(t, windows=3)
                time.sleep(arguments.stopped_s)
                over_t = send(victim.pid, signal.SIGCONT)
            moments.append(t)
            team.wait_for_all(windows=5, since_t=over_t)
        logs = team.logs()
    return {
        "name": f"evener.{arguments.policy}",
        "what": what,
        "workers": workers,
        "asleep": sleep,
        "times": len(moments),
        **describe(logs, moments, arguments.policy),
        **verdict(logs, arguments.samples, arguments.policy),
    }


def describe(logs: Sequence[WorkerLog], moments: Sequence[float], policy: str) -> dict[str, Any]:
    """Return what the moments cost, in seconds, and how much work was done twice."""
    delays, twice, usual = [], [], []
    for t, end_t in pairwise([*moments, float("inf")]):
        usual.append(window_s(logs, t))
        delays.append(max(0.0, first_commit(logs, t) - t - usual[-1]))
        twice.append(redone(logs, t, end_t))
    return {
        "window_s": round(statistics.median(usual), 4),
        **spread("delay_s", delays),
        "delay_s_max": round(max(delays), 3),
        # In ASYNC a window begins before the one before is over, so its work is not told apart.
        "redone_windows_max": None if policy == "async" else round(max(twice), 3),
    }


if __name__ == "__main__":
    main()
