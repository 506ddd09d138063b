"""How much of its speed an elastic team keeps while its workers fail.

    python benchmarks/goodput.py --json goodput.json
    python benchmarks/goodput.py --quick

In each round a team trains undisturbed, and then with a worker killed every so many seconds.
``goodput`` is what was trained and not lost, in samples per second, over what the same team did
undisturbed just before. ``capacity`` is the mean part of workers that were there and ready to
train; ``of_capacity`` is the goodput over it. A worker is killed only while another one trains.
Workers sleep in place of computing, so cores do not limit the team.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from elastic_logs import WorkerLog, committed
from elastic_runs import ElasticTeam
from report import load_before, make_parser, spread, write_report

_LOOK_S = 0.1


def main() -> None:
    """Run a team undisturbed, then with failures, round after round."""
    arguments = parse_arguments()
    before = load_before()
    draw = random.Random(arguments.seed)
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(measure(arguments, draw))
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    figures = {key: [one[key] for one in rounds] for key in rounds[0]}
    row = {
        "name": f"evener.{arguments.policy}",
        "workers": arguments.workers,
        "every_s": arguments.every,
        "kills": sum(figures.pop("kills")),
    }
    for key, values in figures.items():
        row |= spread(key, values)
    write_report(arguments, before, [row])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=5.0, help="with failures, all rounds")
    parser.add_argument("--calm-minutes", type=float, default=1.0, help="without, all rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--policy", default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--sleep", type=float, default=0.02, metavar="SECONDS", help="per sample")
    parser.add_argument("--quick", action="store_true", help="one round of 45 s after 10 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.minutes, arguments.calm_minutes = 1, 0.75, 1 / 6
    return arguments


def measure(arguments: argparse.Namespace, draw: random.Random) -> dict[str, float]:
    """Let one team train undisturbed, then kill its workers."""
    options = ["--samples", arguments.samples, "--batch-size", arguments.batch_size]
    options += ["--sleep", arguments.sleep, "--policy", arguments.policy]
    kills = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticTeam(Path(folder), arguments.workers, options) as team,
    ):
        team.wait_for_all(windows=5)
        calm_t = time.time()
        time.sleep(60.0 * arguments.calm_minutes / arguments.rounds)
        began_t = time.time()
        next_t = began_t + arguments.every / 2
        end_t = began_t + 60.0 * arguments.minutes / arguments.rounds
        while time.time() < end_t:
            members = team.members() if time.time() > next_t else []
            if len(members) > 1:  # the last one holds what the team has trained
                next_t += arguments.every
                draw.choice(members).kill()
                kills += 1
            time.sleep(_LOOK_S)
        logs = team.logs()
    calm, disturbed = trained_per_s(logs, calm_t, began_t), trained_per_s(logs, began_t, end_t)
    present = capacity(logs, began_t, end_t) / arguments.workers
    return {
        "kills": kills,
        "undisturbed_samples_per_s": calm,
        "samples_per_s": disturbed,
        "goodput": disturbed / calm,
        "capacity": present,
        "of_capacity": disturbed / calm / present,
    }


def trained_per_s(logs: list[WorkerLog], from_t: float, to_t: float) -> float:
    """Return the speed in a span; a window that is under way at an end counts in part."""
    windows = committed(logs)
    ordered = [windows[number] for number in sorted(windows)]
    samples = np.cumsum([line["size"] for line in ordered])
    first, last = np.interp([from_t, to_t], [line["t"] for line in ordered], samples)
    return float(last - first) / (to_t - from_t)


def capacity(logs: list[WorkerLog], from_t: float, to_t: float) -> float:
    """Return the mean number of workers that were ready to train."""
    total_s = sum(max(0.0, min(o.ended_t, to_t) - max(o.ready_t, from_t)) for o in logs)
    return total_s / (to_t - from_t)


if __name__ == "__main__":
    main()
