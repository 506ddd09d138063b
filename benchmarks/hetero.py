"""Throughput of unequal ranks: torch DDP, an equal split, and evener, beside each rank alone.

    python benchmarks/hetero.py --speeds 1,0.3333 --json hetero.json

All ways run in the same processes on the same model, data and emulated speeds, one after another in
each round, so that a machine whose speed drifts favours none of them. ``of_ideal`` is a way's
throughput over the sum of the solo speeds of the same round; solo is one rank alone with the same
optimizer steps per sample. Medians over rounds; the spread is the smallest and largest.

Slow ranks are emulated: they sleep in proportion to the compute that they have just measured
(forward, backward, update), before the exchange that needs it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write_report
from models import GPT, Tokens, mean_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.run.ddp import Ddp, DdpConfig
from evener.run.emulate import Slowdown
from evener.run.environment import DistributedTrainConfig

SEQ_LEN = 128
EPOCH_SAMPLES = 1 << 20


def main() -> int:
    """Starts the ranks; the first one prints and writes the report."""
    arguments = parse_arguments()
    if "RANK" in os.environ:
        return run_rank(arguments)
    world_size = len(arguments.speeds)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = []
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "HETERO_STORE": str(Path(folder) / "ddp"),
            }
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
        codes = [rank.wait() for rank in ranks]
    return max(codes)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speeds", type=speeds, default="1,0.3333", help="relative to the fastest")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=4, help="evener's per round")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def speeds(text: str) -> list[float]:
    """``1,0.5`` as numbers."""
    values = [float(t) for t in text.split(",")]
    if not values or not all(0 < v <= 1 for v in values):
        raise argparse.ArgumentTypeError("speeds are above 0 and at most 1, such as 1,0.3333")
    return values


class Way:
    """One way of training: ``run(steps)`` returns samples per second of this rank's team."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        torch.manual_seed(0)
        self.batch_size = arguments.batch_size
        self.rank = rank
        self.world_size = len(arguments.speeds)
        self.data = Tokens(EPOCH_SAMPLES, SEQ_LEN)
        self.slowdown = Slowdown(1 / arguments.speeds[rank])
        self.model: nn.Module = GPT(width=arguments.width, layers=arguments.layers, seq_len=SEQ_LEN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def timed(self, steps: int, run: Callable[[int], None]) -> float:
        """Samples per second of ``steps`` global batches, from barrier to barrier."""
        dist.barrier()
        started_s = time.perf_counter()
        run(steps)
        elapsed = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return steps * self.batch_size / float(elapsed)

    def batch(self, step: int, size: int) -> Tensor:
        """Some samples."""
        return torch.stack([self.data[step * size + i] for i in range(size)])


class Solo(Way):
    """One rank alone over whole global batches; the others wait."""

    def __init__(self, arguments: argparse.Namespace, rank: int, alone: int) -> None:
        super().__init__(arguments, rank)
        self.alone = alone

    def run(self, steps: int) -> float:
        """See ``Way``."""
        return self.timed(steps, self._train if self.rank == self.alone else lambda _: None)

    def _train(self, steps: int) -> None:
        # Micro-batches as large as evener gives to this rank, so that caches are treated alike.
        micro = -(-self.batch_size // self.world_size)
        for step in range(steps):
            started_s = time.perf_counter()
            for first in range(0, self.batch_size, micro):
                size = min(micro, self.batch_size - first)
                loss = mean_loss(self.model, self.batch(step, size))
                (loss * (size / self.batch_size)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.slowdown.after(time.perf_counter() - started_s)


class TorchDdp(Way):
    """torch's DDP with gradients as bucket views and a fused optimizer; equal shares."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        super().__init__(arguments, rank)
        self.share = self.batch_size // self.world_size
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.backward_s: list[float] = []

    def run(self, steps: int) -> float:
        """See ``Way``; one step reaches ``share * world_size`` samples."""
        self._calibrate()
        rate = self.timed(steps, self._train)
        return rate * (self.share * self.world_size) / self.batch_size

    def _calibrate(self) -> None:
        """Backward by itself: inside DDP its time includes the exchange."""
        with self.ddp.no_sync():
            loss = mean_loss(self.ddp, self.batch(0, self.share))
            started_s = time.perf_counter()
            loss.backward()
            self.backward_s.append(time.perf_counter() - started_s)
        self.optimizer.zero_grad()

    def _train(self, steps: int) -> None:
        backward_s = statistics.median(self.backward_s)
        for step in range(steps):
            started_s = time.perf_counter()
            loss = mean_loss(self.ddp, self.batch(step, self.share))
            # The exchange happens inside backward, so a slow rank's delay must come before it.
            self.slowdown.after(time.perf_counter() - started_s + backward_s)
            loss.backward()
            started_s = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.slowdown.after(time.perf_counter() - started_s)


class Evener(Way):
    """evener, by its public interface."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        rank: int,
        *,
        port: int,
        ratios: Sequence[float] | None = None,
    ) -> None:
        super().__init__(arguments, rank)
        slow = {r: 1 / s for r, s in enumerate(arguments.speeds)}
        self.ddp = Ddp.setup(
            self.model,
            self.optimizer,
            precision="fp32",
            config=DdpConfig(emulate_slow=slow, partition_ratios=ratios, quiet=True),
            environment=DistributedTrainConfig.from_env(os.environ | {"MASTER_PORT": str(port)}),
        )
        loader = self.ddp.loader(self.data, batch_size=self.batch_size, prefetch="thread")
        self.batches: Iterator[Tensor] = loader.epoch(0)
        self.shares: tuple[int, ...] = ()

    def run(self, steps: int) -> float:
        """See ``Way``."""
        return self.timed(steps, self._train)

    def _train(self, steps: int) -> None:
        goal = self.ddp.window + steps
        for ids in self.batches:
            self.ddp.backward(mean_loss(self.model, ids))
            if result := self.ddp.step():
                self.shares = tuple(r.samples for r in result.ranks)
                if self.ddp.window == goal:
                    return


def run_rank(arguments: argparse.Namespace) -> int:
    """One rank: all ways, interleaved."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), len(arguments.speeds)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.environ["HETERO_STORE"], world_size),
        rank=rank,
        world_size=world_size,
    )
    ports: list[Any] = [free_port(), free_port()]
    dist.broadcast_object_list(ports, 0)
    ways: dict[str, Any] = {f"solo.{r}": Solo(arguments, rank, r) for r in range(world_size)}
    ways["torch.ddp"] = TorchDdp(arguments, rank)
    equal = [1.0] * world_size
    ways["evener.equal_split"] = Evener(arguments, rank, port=ports[0], ratios=equal)
    ways["evener.sync"] = Evener(arguments, rank, port=ports[1])
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, way in ways.items():
            figures[name].append(way.run(steps_of(name, number, arguments)))
        if rank == 0:
            shown = ", ".join(f"{n} {v[-1]:.1f}" for n, v in figures.items())
            print(f"{'warm-up' if number == 0 else f'round {number}'}: samples/s {shown}")
    if rank == 0:
        report(figures, ways["evener.sync"].shares, arguments)
    for name in ("evener.equal_split", "evener.sync"):
        ways[name].ddp.close()
    dist.destroy_process_group()
    return 0


def steps_of(name: str, number: int, arguments: argparse.Namespace) -> int:
    """Global batches per round; a slow rank alone gets fewer, a warm-up round the least."""
    if name.startswith("solo."):
        slow = arguments.speeds[int(name.removeprefix("solo."))]
        return max(1, round(arguments.windows * slow))
    if number == 0:
        return 4 if name == "evener.sync" else 1
    return arguments.windows if name == "evener.sync" else max(1, arguments.windows // 2)


def report(
    figures: dict[str, list[float]], shares: Sequence[int], arguments: argparse.Namespace
) -> None:
    """Prints the table and writes the JSON."""
    counted = {name: values[1:] for name, values in figures.items()}
    rounds = range(arguments.rounds)
    ideal = [sum(v[i] for n, v in counted.items() if n.startswith("solo.")) for i in rounds]
    rows = []
    for name, values in counted.items():
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
    print(f"speeds {arguments.speeds} (emulated), batch {arguments.batch_size}, shares {shares}")
    print(f"{'way':20} {'samples/s':>10} {'of ideal':>9}  spread")
    for row in rows:
        low, high = row["of_ideal_spread"]
        print(
            f"{row['name']:20} {row['samples_per_s']:10.1f} {row['of_ideal']:9.3f}  {low}..{high}"
        )
    write_report(
        arguments.json,
        benchmark="hetero",
        emulated=True,
        arguments={k: v for k, v in vars(arguments).items() if k != "json"},
        shares=list(shares),
        rows=rows,
    )


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
