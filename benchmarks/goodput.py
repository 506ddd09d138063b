"""How much of its speed a team keeps while its workers fail, beside what else there is.

    python benchmarks/goodput.py --json goodput.json
    python benchmarks/goodput.py --ways evener --quick

In each round each way trains undisturbed, and then with a worker killed every so many seconds.
``goodput`` is what was trained and not lost, in samples per second, over what the same team did
undisturbed just before. ``capacity`` is the mean part of workers that were there and ready to
train; ``of_capacity`` is the goodput over it. Ways take turns, in an order that changes.

*torchrun* restarts all workers (``--max-restarts``) from a checkpoint; its interval is that of
Young and Daly for what a checkpoint costs and the time between failures, at least 2 s. *torchft*
has its Manager in each worker: replicas that remain continue, and the global batch is smaller for
as long as one lacks. The benchmark starts a replica again as soon as it is killed. A worker is
killed only while another one trains. Workers sleep in place of computing, so cores do not limit the
team.
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
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from competitors import enter, missing
from elastic_logs import committed
from elastic_runs import PATIENCE_S, ElasticTeam
from machine import load_before, write_report
from options import make_parser, some_of
from runs import clean_environment

FOLDER = Path(__file__).parent
#: Seconds for a checkpoint, as assumed for its interval: up to 0.13 s that is its least.
CHECKPOINT_S = 0.01
_LOOK_S = 0.1

Progress = tuple[list[float], list[float]]
"""Moments, and the samples that were trained and not lost until then."""


def main() -> None:
    """Run each way undisturbed, then with failures, round after round."""
    arguments = parse_arguments()
    if "torchft" in arguments.ways:
        enter(["torchft"])
        arguments.ways = [way for way in arguments.ways if way not in missing(["torchft"])]
    before = load_before()
    measured: dict[str, list[Measured]] = {way: [] for way in arguments.ways}
    draw = random.Random(arguments.seed)
    for number in range(arguments.rounds):
        turn = number % len(arguments.ways)
        for name in (*arguments.ways[turn:], *arguments.ways[:turn]):
            with tempfile.TemporaryDirectory() as folder:
                one = measure(WAYS[name](arguments, Path(folder)), arguments, draw)
            measured[name].append(one)
            print(f"round {number + 1}: {name}: {shown(one)}", flush=True)
    rows = [row_of(name, arguments, each) for name, each in measured.items()]
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=5.0, help="with failures, all rounds")
    parser.add_argument("--calm-minutes", type=float, default=1.0, help="without, all rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--ways", type=some_of(WAYS), default=list(WAYS))
    parser.add_argument("--policy", default="sync", help="of evener")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--sleep", type=float, default=0.02, metavar="SECONDS", help="per sample")
    parser.add_argument("--quick", action="store_true", help="one round of 45 s after 10 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.minutes, arguments.calm_minutes = 1, 0.75, 1 / 6
    return arguments


class Way:
    """A team of one kind, for the length of a ``with`` block.

    Args:
        arguments: The command line.
        folder: For logs, new and empty.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.running = ExitStack()

    def __enter__(self) -> "Way":
        with self.running:  # a failure on the way ends what has been started
            self.start()
            self.running = self.running.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.running.close()

    def start(self) -> None:
        """Start the workers."""
        raise NotImplementedError

    def look(self) -> None:
        """Do what the one who runs the team has to do now and then."""

    def is_ready(self) -> bool:
        """Return whether all workers train."""
        return len(self.victims()) == self.arguments.workers and len(self.progress()[0]) >= 5

    def victims(self) -> list[int]:
        """Return the processes of workers that are at work."""
        return [pid for pid in self.ready_times() if is_alive(pid)]

    def ready_times(self) -> dict[int, float]:
        """Return when workers were ready to train, by process."""
        return {line["pid"]: line["ready"] for line in self.lines() if "ready" in line}

    def progress(self) -> Progress:
        """Return what was trained."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return what else is known."""
        return {}

    def lines(self) -> list[dict[str, Any]]:
        """Return what workers have logged."""
        found = []
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # half of a line
                    found.append(json.loads(line))
        return found

    def run(self, *words: object, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process of this Python, which ends with the block."""
        output = self.running.enter_context((self.folder / "output.txt").open("a"))
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=clean_environment() | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self.running.callback(end, process)
        return process


class Evener(Way):
    """evener's elastic team."""

    def start(self) -> None:
        """See ``Way``."""
        sizes = ("--samples", self.arguments.samples, "--batch-size", self.arguments.batch_size)
        more = ("--sleep", self.arguments.sleep, "--policy", self.arguments.policy)
        team = ElasticTeam(self.folder, self.arguments.workers, (*sizes, *more))
        self.team = self.running.enter_context(team)

    def is_ready(self) -> bool:
        """See ``Way``."""
        return sum(len(log.commits) >= 5 for log in self.team.alive()) == self.arguments.workers

    def victims(self) -> list[int]:
        """See ``Way``."""
        return [log.pid for log in self.team.members()]

    def ready_times(self) -> dict[int, float]:
        """See ``Way``."""
        return {log.pid: log.ready_t for log in self.team.logs()}

    def progress(self) -> Progress:
        """See ``Way``."""
        windows = committed(self.team.logs())
        ordered = [windows[number] for number in sorted(windows)]
        return [line["t"] for line in ordered], [*np.cumsum([line["size"] for line in ordered])]


class Torchrun(Way):
    """torch's DDP under torchrun, with checkpoints."""

    def start(self) -> None:
        """See ``Way``."""
        arguments = self.arguments
        interval_s = max(2.0, (2 * CHECKPOINT_S * arguments.every) ** 0.5)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", 10_000)
        script = (FOLDER / "goodput_torchrun.py", "--folder", self.folder)
        sizes = ("--samples", arguments.samples, "--batch-size", arguments.batch_size)
        more = ("--sleep", arguments.sleep, "--checkpoint-every", interval_s)
        # Without this, workers that restart find addresses of the ones before, and fail or hang.
        self.run(
            *(*launcher, "--nproc-per-node", arguments.workers, *script, *sizes, *more),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def victims(self) -> list[int]:
        """See ``Way``."""
        return [line["pid"] for line in self.lines() if "pid" in line and is_alive(line["pid"])]

    def ready_times(self) -> dict[int, float]:
        """Nothing: all of them start again together."""
        return {}

    def progress(self) -> Progress:
        """See ``Way``; a step that is done again counts once."""
        steps = sorted((line["t"], line["step"]) for line in self.lines() if "step" in line)
        return [t for t, _ in steps], [step * self.arguments.batch_size for _, step in steps]

    def facts(self) -> dict[str, Any]:
        """See ``Way``."""
        costs = [line["checkpoint_s"] for line in self.lines() if "checkpoint_s" in line]
        return {"checkpoint_s": float(np.median(costs))} if costs else {}


class Torchft(Way):
    """torchft's Manager in each worker."""

    def start(self) -> None:
        """See ``Way``."""
        os.environ.setdefault("RUST_LOG", "error")
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000
        )
        self.running.callback(lighthouse.shutdown)
        self.address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
        self.replicas = [self.replica(number) for number in range(self.arguments.workers)]

    def replica(self, number: int) -> subprocess.Popen[bytes]:
        """Start a replica."""
        arguments = self.arguments
        script = (FOLDER / "goodput_torchft.py", "--folder", self.folder, "--replica", number)
        share = arguments.batch_size // arguments.workers
        sizes = ("--samples", arguments.samples, "--share", share, "--sleep", arguments.sleep)
        return self.run(*script, *sizes, "--lighthouse", self.address)

    def look(self) -> None:
        """Start replicas again that have ended."""
        for number, process in enumerate(self.replicas):
            if process.poll() is not None:
                self.replicas[number] = self.replica(number)

    def progress(self) -> Progress:
        """See ``Way``."""
        lines = sorted((one["t"], one["batches"]) for one in self.lines() if "batches" in one)
        share = self.arguments.batch_size // self.arguments.workers
        return [t for t, _ in lines], [share * batches for _, batches in lines]


WAYS: dict[str, type[Way]] = {"evener": Evener, "torchrun": Torchrun, "torchft": Torchft}

Measured = dict[str, Any]


def measure(way: Way, arguments: argparse.Namespace, draw: random.Random) -> Measured:
    """Let one team train undisturbed, then kill its workers."""
    calm_s = 60.0 * arguments.calm_minutes / arguments.rounds
    disturbed_s = 60.0 * arguments.minutes / arguments.rounds
    ends: dict[int, float] = {}
    with way:
        deadline_s = time.monotonic() + PATIENCE_S
        while not way.is_ready():
            way.look()
            if time.monotonic() > deadline_s:
                raise RuntimeError((way.folder / "output.txt").read_text()[-5000:])
            time.sleep(_LOOK_S)
        calm_t = time.time()
        time.sleep(calm_s)
        began_t = time.time()
        next_t, end_t = began_t + arguments.every / 2, began_t + disturbed_s
        while time.time() < end_t:
            way.look()
            alive = (
                [pid for pid in way.victims() if pid not in ends] if time.time() > next_t else []
            )
            if len(alive) > 1:  # the last one holds what the team has trained
                next_t += arguments.every
                pid = draw.choice(sorted(alive))
                ends[pid] = time.time()
                os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        progress, ready_times, facts = way.progress(), way.ready_times(), way.facts()
    return {
        "kills": len(ends),
        "calm": trained(progress, calm_t, began_t) / (began_t - calm_t),
        "disturbed": trained(progress, began_t, end_t) / (end_t - began_t),
        "capacity": capacity(ready_times, ends, began_t, end_t) / arguments.workers,
        **facts,
    }


def trained(progress: Progress, from_t: float, to_t: float) -> float:
    """Return the samples of a span; a window that is under way at an end counts in part."""
    first, last = np.interp([from_t, to_t], *progress)
    return float(last - first)


def capacity(
    ready_times: dict[int, float], ends: dict[int, float], from_t: float, to_t: float
) -> float:
    """Return the mean number of workers that were ready; 0 where that is not known."""
    total_s = 0.0
    for pid, ready_t in ready_times.items():
        total_s += max(0.0, min(ends.get(pid, to_t), to_t) - max(ready_t, from_t))
    return total_s / (to_t - from_t)


def row_of(name: str, arguments: argparse.Namespace, rounds: Sequence[Measured]) -> dict[str, Any]:
    """Return what a way did in all rounds together."""
    goodput = sum(r["disturbed"] for r in rounds) / sum(r["calm"] for r in rounds)
    share = float(np.mean([r["capacity"] for r in rounds]))
    row: dict[str, Any] = {
        "name": f"evener.{arguments.policy}" if name == "evener" else name,
        "workers": arguments.workers,
        "every_s": arguments.every,
        "kills": sum(r["kills"] for r in rounds),
        "undisturbed_samples_per_s": round(float(np.mean([r["calm"] for r in rounds])), 2),
        "samples_per_s": round(float(np.mean([r["disturbed"] for r in rounds])), 2),
        "goodput": round(goodput, 3),
        "goodput_by_round": [round(r["disturbed"] / r["calm"], 3) for r in rounds],
    }
    if share:
        row |= {"capacity": round(share, 3), "of_capacity": round(goodput / share, 3)}
    costs = [r["checkpoint_s"] for r in rounds if "checkpoint_s" in r]
    return row | ({"checkpoint_s": round(float(np.median(costs)), 4)} if costs else {})


def shown(one: Measured) -> str:
    """Return the figures of a round for the terminal."""
    return ", ".join(f"{key} {value:.3g}" for key, value in one.items())


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is not merely listed."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if need be."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30.0)
    process.kill()
    process.wait()


if __name__ == "__main__":
    main()
