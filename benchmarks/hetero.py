"""Throughput of unequal ranks: torch DDP, an equal split, and evener, beside each rank alone.

    python benchmarks/hetero.py --speeds 1,0.3333 --json hetero.json

All ways run in the same processes on the same model, data and emulated speeds, one after another in
each round, so that a machine whose speed drifts favours none of them. ``of_ideal`` is a way's
throughput over the sum of the solo speeds of the same round; solo is one rank alone over whole
global batches, with an optimizer step for each, in the same micro-batches as evener.
Figures are medians over rounds; the spread is the smallest and largest.

Slow ranks are emulated: they sleep until the compute that they have just measured (in processor
time), the update included, has lasted as many times longer as they are slower, before the exchange
that needs it; a wait for a busy core is not multiplied, but part of that time. torch DDP exchanges
inside backward, so there the delay comes before the exchange of each bucket, and overlap with the
rest stays possible.

Each rank has a core of its own as far as there are enough, and the slow ones share (``--cores``):
unlike devices do not take time from one another.

``evener.cadence`` and ``evener.async`` make local optimizer steps on one micro-batch each, in turns
of some windows; the window at the end of a turn, which shares out what is left, is part of it.

``evener.sync`` also says where the rest went, as parts of its time that add up to ``1 - of_ideal``:
ranks computing slower side by side than alone, ranks waiting for the last one, exchanging
gradients, and what is left (starting and ending an epoch each turn, among others).
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import load_average, write_report
from models import GPT, Tokens, mean_loss
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from evener import Ddp, DdpConfig
from evener.engine.emulate import Slowdown
from evener.engine.results import WindowResult
from evener.team.environment import STORE_FD, DistributedTrainConfig
from evener.team.launch import launch

SEQ_LEN = 128
TIMEOUT_S = 120.0
FOLDER = "HETERO_FOLDER"
SOLO = "solo."
LOCAL = ("evener.cadence", "evener.async")
WAYS = ("torch.ddp", "evener.equal_split", "evener.sync", *LOCAL)


def main() -> int:
    """Starts the ranks; the first one prints and writes the report."""
    arguments = parse_arguments()
    if FOLDER in os.environ:
        return run_rank(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {FOLDER: folder, "OMP_NUM_THREADS": "1"}
        return launch([sys.executable, *sys.argv], nproc=len(arguments.speeds))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speeds", type=speeds, default="1,0.3333", help="relative to the fastest")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=8, help="global batches a turn")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        default=4,
        help="of solo and evener. Small ones spread emulated sleep more evenly",
    )
    parser.add_argument("--anchor", type=int, default=8, help="of evener.cadence and evener.async")
    parser.add_argument("--local-windows", type=int, default=4, help="theirs a turn, about")
    parser.add_argument(
        "--ways",
        type=way_names,
        default=",".join(WAYS),
        metavar="NAME,...",
        help="measured beside solo",
    )
    parser.add_argument(
        "--cores",
        type=core_numbers,
        metavar="CORE,...",
        help="the core of each rank, as devices have theirs, or 'any'; spread by speed without",
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.cores is None:
        arguments.cores = spread(arguments.speeds)
    if arguments.cores and len(arguments.cores) != len(arguments.speeds):
        parser.error(
            f"{len(arguments.cores)} cores for {len(arguments.speeds)} ranks: give one each"
        )
    return arguments


def core_numbers(text: str) -> list[int]:
    """``0,1,1`` as numbers; none for ``any``."""
    if text == "any":
        return []
    usable = os.sched_getaffinity(0)
    cores = [int(t) if t.isdecimal() else -1 for t in text.split(",")]
    if unknown := [c for c in cores if c not in usable]:
        raise argparse.ArgumentTypeError(f"core {unknown[0]} is none of {sorted(usable)}")
    return cores


def spread(speeds: Sequence[float]) -> list[int]:
    """A core for each rank, the fastest first, each on the core that has least to do so far."""
    load = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    cores = [0] * len(speeds)
    for rank in sorted(range(len(speeds)), key=lambda r: -speeds[r]):
        cores[rank] = min(load, key=lambda core: load[core])
        load[cores[rank]] += speeds[rank]
    return cores


def speeds(text: str) -> list[float]:
    """``1,0.5`` as numbers."""
    try:
        values = [float(t) for t in text.split(",")]
    except ValueError:
        values = []
    if len(values) < 2 or not all(0 < v <= 1 for v in values):
        raise argparse.ArgumentTypeError(
            "give two or more speeds above 0 and at most 1, such as 1,0.3333"
        )
    return values


def way_names(text: str) -> list[str]:
    """Some of ``WAYS``."""
    names = text.split(",")
    if unknown := [n for n in names if n not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(WAYS)}")
    return names


def samples_of_local_turn(arguments: argparse.Namespace) -> int:
    """Samples of some windows in which the slowest rank makes ``anchor`` local steps."""
    steps = sum(arguments.anchor * s / min(arguments.speeds) for s in arguments.speeds)
    return arguments.local_windows * round(steps) * arguments.micro_batch_size


class Way:
    """One way of training: ``run(steps)`` returns samples per second of this rank's team."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        torch.manual_seed(0)
        self.batch_size = arguments.batch_size
        self.rank = rank
        self.world_size = len(arguments.speeds)
        self.micro_batch_size: int = arguments.micro_batch_size
        # An epoch is a turn of evener's. (A loop cannot be left after some windows: a rank without
        # a share does not come out of the loader for them.)
        self.data = Tokens(arguments.batch_size * arguments.windows, SEQ_LEN)
        self.slowdown = Slowdown(1 / arguments.speeds[rank])
        self.elapsed_s = 0.0
        self.model: nn.Module = GPT(width=arguments.width, layers=arguments.layers, seq_len=SEQ_LEN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def run(self, steps: int) -> float:
        """Trains on ``steps`` global batches; all ranks call it together."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what it holds."""

    def timed(self, steps: int, train: Callable[[int], None]) -> float:
        """Samples per second of ``steps`` global batches, from barrier to the last one's end."""
        dist.barrier()
        started_s = time.perf_counter()
        train(steps)
        elapsed = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        self.elapsed_s = float(elapsed)
        return steps * self.batch_size / self.elapsed_s

    def batch(self, step: int, size: int) -> Tensor:
        """Some samples."""
        return torch.stack([self.data[step * size + i] for i in range(size)])


class Solo(Way):
    """One rank alone over whole global batches; the others wait without computing."""

    def __init__(self, arguments: argparse.Namespace, rank: int, alone: int) -> None:
        super().__init__(arguments, rank)
        self.alone = alone

    def run(self, steps: int) -> float:
        """See ``Way``."""
        return self.timed(steps, self._train if self.rank == self.alone else lambda _: None)

    def _train(self, steps: int) -> None:
        micro = self.micro_batch_size
        for step in range(steps):
            started = self.slowdown.start()
            for first in range(0, self.batch_size, micro):
                size = min(micro, self.batch_size - first)
                loss = mean_loss(self.model, self.batch(step, size))
                (loss * (size / self.batch_size)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.slowdown.after(started)


class TorchDdp(Way):
    """torch's DDP with gradients as bucket views and a fused optimizer; equal shares."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        super().__init__(arguments, rank)
        self.share = self.batch_size // self.world_size
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.since = self.slowdown.start()
        if self.slowdown.factor > 1:
            self.ddp.register_comm_hook(None, self._delayed)

    def run(self, steps: int) -> float:
        """See ``Way``; a step reaches ``share * world_size`` samples."""
        return self.timed(steps, self._train) * (self.share * self.world_size) / self.batch_size

    def _train(self, steps: int) -> None:
        for step in range(steps):
            self.since = self.slowdown.start()
            mean_loss(self.ddp, self.batch(step, self.share)).backward()
            started = self.slowdown.start()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.slowdown.after(started)

    def _delayed(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A bucket of a slow rank is ready as late as its compute so far would have been."""
        self.slowdown.after(self.since)
        self.since = self.slowdown.start()
        return allreduce_hook(dist.group.WORLD, bucket)


class Evener(Way):
    """evener, by its public interface."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        rank: int,
        *,
        port: int,
        ratios: Sequence[float] | None = None,
        policy: str = "sync",
    ) -> None:
        super().__init__(arguments, rank)
        if policy != "sync":
            self.data = Tokens(samples_of_local_turn(arguments), SEQ_LEN)
        slow = {r: 1 / s for r, s in enumerate(arguments.speeds)}
        environment = {k: v for k, v in os.environ.items() if k != STORE_FD}
        self.ddp = Ddp.setup(
            self.model,
            self.optimizer,
            policy=policy,
            devices="cpu",
            precision="fp32",
            config=DdpConfig(
                emulate_slow=slow,
                partition_ratios=ratios,
                anchor=None if policy == "sync" else arguments.anchor,
                timeout_s=TIMEOUT_S,
                quiet=True,
            ),
            environment=DistributedTrainConfig.from_env(environment | {"MASTER_PORT": str(port)}),
        )
        self.loader = self.ddp.loader(
            self.data,
            # A local step takes a micro-batch: what a rank computes at once is the same everywhere.
            batch_size=self.batch_size if policy == "sync" else self.micro_batch_size,
            micro_batch_size=self.micro_batch_size,
            prefetch="thread",
        )
        self.epoch = 0
        self.committed: list[WindowResult] = []
        self.ddp.on_commit(self.committed.append)

    def run(self, steps: int) -> float:
        """See ``Way``."""
        self.committed.clear()
        return self.timed(steps, self._train) * len(self.data) / (steps * self.batch_size)

    def close(self) -> None:
        """Leaves the team."""
        self.ddp.close()

    def lost(self, solo: Sequence[float]) -> dict[str, float]:
        """Where the last turn's time went, beyond what ranks as fast as alone would have needed.

        A rank's time is compute, wait, exchange and the rest. Averaged over ranks by their solo
        speeds, compute at these speeds is just the ideal time, whatever the shares are.
        """
        parts = {"side_by_side": 0.0, "waiting": 0.0, "exchange": 0.0, "rest": 0.0}
        for rank, speed in enumerate(solo):
            part = speed / sum(solo) / self.elapsed_s
            records = [w.ranks[rank] for w in self.committed]
            alone_s = sum(r.samples / speed for r in records)
            compute_s = sum(r.compute_s for r in records)
            wait_s, sync_s = sum(r.wait_s for r in records), sum(r.sync_s for r in records)
            parts["side_by_side"] += part * (compute_s - alone_s)
            parts["waiting"] += part * wait_s
            parts["exchange"] += part * sync_s
            parts["rest"] += part * (self.elapsed_s - compute_s - wait_s - sync_s)
        return parts

    def _train(self, steps: int) -> None:
        for ids in self.loader.epoch(self.epoch):
            self.ddp.backward(mean_loss(self.model, ids))
            self.ddp.step()
        self.epoch += 1


def make_way(name: str, arguments: argparse.Namespace, rank: int) -> Way:
    """A way by its name; all ranks call it together."""
    if name == "torch.ddp":
        return TorchDdp(arguments, rank)
    port: list[Any] = [free_port()]
    dist.broadcast_object_list(port, 0)
    equal = name == "evener.equal_split"
    return Evener(
        arguments,
        rank,
        port=port[0],
        ratios=[1.0] * len(arguments.speeds) if equal else None,
        policy="sync" if equal else name.removeprefix("evener."),
    )


def run_rank(arguments: argparse.Namespace) -> int:
    """One rank: all ways, interleaved."""
    torch.set_num_threads(1)
    before = load_average()
    rank, world_size = int(os.environ["RANK"]), len(arguments.speeds)
    if arguments.cores:
        os.sched_setaffinity(0, {arguments.cores[rank]})
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(os.environ[FOLDER]) / "ddp"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    ways: dict[str, Way] = {f"{SOLO}{r}": Solo(arguments, rank, r) for r in range(world_size)}
    ways |= {name: make_way(name, arguments, rank) for name in arguments.ways}
    sync = ways.get("evener.sync")
    figures: dict[str, list[float]] = {name: [] for name in ways}
    lost: list[dict[str, float]] = []
    for number in range(arguments.rounds + 1):
        for name, way in ways.items():
            figures[name].append(way.run(steps_of(name, number, arguments)))
        if isinstance(sync, Evener):
            lost.append(sync.lost([figures[f"{SOLO}{r}"][-1] for r in range(world_size)]))
        if rank == 0:
            shown = ", ".join(f"{n} {v[-1]:.1f}" for n, v in figures.items())
            print(f"{'warm-up' if number == 0 else f'round {number}'}: samples/s {shown}")
    if rank == 0:
        # The first round pays for caches, allocations and the search for the shares.
        rows = make_rows({n: v[1:] for n, v in figures.items()})
        for row in rows:
            way = ways[row["name"]]
            if isinstance(way, Evener):
                row |= describe_windows(way.committed)
            if way is sync:
                row["lost"] = {
                    k: round(statistics.median(p[k] for p in lost[1:]), 4) for k in lost[0]
                }
        show(rows, arguments)
        write_report(
            arguments.json,
            benchmark="hetero",
            load_average=[before, load_average()],
            emulated=True,
            arguments={k: v for k, v in vars(arguments).items() if k != "json"},
            rows=rows,
        )
    for way in ways.values():
        way.close()
    dist.destroy_process_group()
    return 0


def steps_of(name: str, number: int, arguments: argparse.Namespace) -> int:
    """Global batches per round; slow ways get fewer, a warm-up round the least."""
    if name.startswith("evener."):
        return int(arguments.windows)
    if number == 0:
        return 1
    if name.startswith(SOLO):
        return max(1, round(arguments.windows * arguments.speeds[int(name.removeprefix(SOLO))]))
    return max(1, arguments.windows // 2)


def make_rows(figures: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """A row for each way; ``figures`` are samples per second by way and round."""
    solo = [values for name, values in figures.items() if name.startswith(SOLO)]
    ideal = [sum(speeds) for speeds in zip(*solo, strict=True)]
    rows: list[dict[str, Any]] = []
    for name, values in figures.items():
        ratios = [v / i for v, i in zip(values, ideal, strict=True)]
        rows.append(
            {
                "name": name,
                "of_ideal": round(statistics.median(ratios), 4),
                "of_ideal_spread": [round(min(ratios), 4), round(max(ratios), 4)],
                "samples_per_s": round(statistics.median(values), 2),
                "samples_per_s_rounds": [round(v, 2) for v in values],
            }
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints the table."""
    print(f"speeds {arguments.speeds} (emulated), global batch {arguments.batch_size}")
    print(f"{'way':20} {'samples/s':>10} {'of ideal':>9}  spread")
    for row in rows:
        low, high = row["of_ideal_spread"]
        print(f"{row['name']:20} {row['samples_per_s']:10.1f} {row['of_ideal']:9.3f}", end="  ")
        print(f"{low:.3f}..{high:.3f}")
    for row in rows:
        if "lost" in row:
            parts = ", ".join(f"{name} {part:.1%}" for name, part in row["lost"].items())
            print(f"{row['name']}: time lost: {parts}")
        if "shares" in row:
            parts = ", ".join(f"{row[k]:.1%} {k}" for k in ("waiting", "exchange"))
            anchor = f"anchor {row['anchor']}, " if "anchor" in row else ""
            windows = f"{row['windows']} windows a turn, last shares {row['shares']}"
            print(f"{row['name']}: {anchor}{windows}; {parts}")


def describe_windows(windows: Sequence[WindowResult]) -> dict[str, Any]:
    """The last turn of evener's: its windows, and parts of the ranks' time."""
    records = [r for w in windows for r in w.ranks]
    total_s = sum(r.compute_s + r.wait_s + r.sync_s for r in records)
    anchors = [w.cadence.anchor for w in windows if w.cadence is not None]
    return {
        "windows": len(windows),
        "shares": [r.samples for r in windows[-1].ranks],
        "waiting": round(sum(r.wait_s for r in records) / total_s, 4),
        "exchange": round(sum(r.sync_s for r in records) / total_s, 4),
    } | ({"anchor": min(anchors)} if anchors else {})


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
