"""How much of its speed a team keeps while its workers fail, beside torchrun with checkpoints.

    python benchmarks/goodput.py --workers 5 --minutes 5 --every 15 --json goodput.json

A worker is killed every so many seconds. ``goodput`` is what was trained and not lost, in samples
per second, over what the same team does undisturbed. ``capacity`` is the mean number of workers
that took part, over all. torchrun restarts all workers (``--max-restarts``) from a checkpoint; its
interval is that of Young and Daly for the cost of a checkpoint and the time between failures, at
least 2 s. Workers sleep in place of computing, so cores do not limit the team.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_runs import ElasticTeam, WorkerLog, committed
from machine import load_before, write_report
from options import make_parser, some_of
from runs import clean_environment

TORCHRUN_WORKER = Path(__file__).with_name("goodput_torchrun.py")
#: Seconds for a checkpoint of the small model, as assumed: up to 0.13 s the interval is its least.
CHECKPOINT_S = 0.003
WAYS = ("evener", "torchrun")


def main() -> None:
    """Runs each way undisturbed, then with failures."""
    arguments = parse_arguments()
    before = load_before()
    rows = []
    for way in arguments.ways:
        measure = elastic if way == "evener" else torchrun
        calm, _, _ = measure(arguments, kills=False)
        rate, capacity, kills = measure(arguments, kills=True)
        row: dict[str, Any] = {
            "name": way,
            "workers": arguments.workers,
            "kills": kills,
            "undisturbed_samples_per_s": round(calm, 2),
            "samples_per_s": round(rate, 2),
            "goodput": round(rate / calm, 3),
        }
        if capacity:
            row |= {"capacity": round(capacity, 3), "of_capacity": round(rate / calm / capacity, 3)}
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--calm-minutes", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--ways", type=some_of(WAYS), default=list(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--sleep", type=float, default=0.02, metavar="SECONDS", help="per sample")
    return parser.parse_args()


def options_of(arguments: argparse.Namespace) -> tuple[object, ...]:
    """What both kinds of workers are told."""
    sizes = ("--samples", arguments.samples, "--batch-size", arguments.batch_size)
    return (*sizes, "--sleep", arguments.sleep)


def length_s(arguments: argparse.Namespace, *, kills: bool) -> float:
    """Seconds of a measurement."""
    return 60.0 * float(arguments.minutes if kills else arguments.calm_minutes)


def elastic(arguments: argparse.Namespace, *, kills: bool) -> tuple[float, float, int]:
    """Samples per second that were committed, mean part of workers at work, number of kills."""
    draw, ends, num_kills = random.Random(arguments.seed), {}, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticTeam(
            Path(folder), arguments.workers, (*options_of(arguments), "--epochs", 1_000_000)
        ) as team,
    ):
        team.wait_for_all(windows=5)
        began_t = time.time()
        end_t = began_t + length_s(arguments, kills=kills)
        next_t = began_t + arguments.every
        while time.time() < end_t:
            time.sleep(min(0.2, max(0.0, end_t - time.time())))
            if kills and time.time() >= next_t:
                next_t += arguments.every
                victim = draw.choice([log for log in team.alive() if log.commits])
                ends[victim.member] = victim.kill()
                num_kills += 1
        windows = committed(team.logs())
        took_part = [time_within(log, began_t, end_t, ends) for log in team.logs()]
    size = sum(line["size"] for line in windows.values() if began_t <= line["t"] < end_t)
    seconds = end_t - began_t
    return size / seconds, sum(took_part) / (arguments.workers * seconds), num_kills


def time_within(log: WorkerLog, began_t: float, end_t: float, ends: dict[str, float]) -> float:
    """Seconds for which a worker took part: from its first commit to its end."""
    if not log.commits:
        return 0.0
    first_t, last_t = float(log.commits[0]["t"]), ends.get(log.member, end_t)
    return max(0.0, min(last_t, end_t) - max(first_t, began_t))


def torchrun(arguments: argparse.Namespace, *, kills: bool) -> tuple[float, float, int]:
    """The same for torchrun, without the part of workers at work: all start again together."""
    draw, num_kills = random.Random(arguments.seed), 0
    interval_s = max(2.0, (2 * CHECKPOINT_S * arguments.every) ** 0.5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        team = ("--nproc-per-node", arguments.workers, "--max-restarts", 10_000)
        script = (TORCHRUN_WORKER, "--folder", folder, *options_of(arguments))
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [str(word) for word in (*launcher, *team, *script)]
                + ["--checkpoint-every", str(interval_s)],
                env=clean_environment() | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while last_step(folder) < 5 and process.poll() is None:
                    time.sleep(0.1)
                if process.poll() is not None:
                    raise RuntimeError((folder / "output.txt").read_text())
                began_t, first = time.time(), last_step(folder)
                end_t = began_t + length_s(arguments, kills=kills)
                next_t = began_t + arguments.every
                while time.time() < end_t and process.poll() is None:
                    time.sleep(min(0.2, max(0.0, end_t - time.time())))
                    if kills and time.time() >= next_t and (pids := alive(folder)):
                        next_t += arguments.every
                        os.kill(draw.choice(pids), signal.SIGKILL)
                        num_kills += 1
                last = last_step(folder)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30.0)
                process.kill()
    return (last - first) * arguments.batch_size / (end_t - began_t), 0.0, num_kills


def last_step(folder: Path) -> int:
    """The step that the newest rank 0 has reached: those before it that were lost do not count."""
    logs = [path.read_text().splitlines() for path in folder.glob("*.jsonl")]
    latest: tuple[float, int] = (0.0, 0)
    for lines in logs:
        for line in lines[-2:]:
            with suppress(ValueError):
                found = json.loads(line)
                if "step" in found:
                    latest = max(latest, (found["t"], found["step"]))
    return latest[1]


def alive(folder: Path) -> list[int]:
    """Processes of the workers that run."""
    found = []
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            os.kill(int(path.stem), 0)
            found.append(int(path.stem))
    return sorted(found)


if __name__ == "__main__":
    main()
