"""What evener costs on one rank: its loop against a plain PyTorch loop.

    python benchmarks/overhead.py --json overhead.json
    python benchmarks/overhead.py --dataloader

Both loops train copies of one model in one process: same samples a step, same fused AdamW, with
and without clipping. They take short turns, each going first in every other one, so that a machine
whose speed drifts favours none. ``ratio`` is evener's time over that of the plain loop in the same
round of several turns: median, and 5th to 95th percentile. ``cpu_ratio`` is the same in processor
time, and ``best_ratio`` compares the fastest turn of each: other programs on the machine disturb
these less. Everything runs on one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from machine import load_before, write_report
from models import GPT, Tokens, mean_loss
from options import make_parser, some_of
from tables import ratios, spread, text_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator

NUM_SAMPLES = 50_000
TURNS_A_ROUND = 4
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    name: str
    width: int
    layers: int
    seq_len: int
    batch_size: int


#: From steps that are nearly all Python to steps that are nearly all arithmetic.
CASES = {
    case.name: case
    for case in (
        Case("0.1M", width=64, layers=2, seq_len=64, batch_size=8),
        Case("0.8M", width=128, layers=4, seq_len=128, batch_size=4),
        Case("3.3M", width=256, layers=4, seq_len=128, batch_size=2),
        Case("10.8M", width=384, layers=6, seq_len=128, batch_size=1),
    )
}


class Plain:
    """A loop as one writes it without any library."""

    def __init__(self, case: Case, clip: bool, dataloader: bool) -> None:
        self.model, self.optimizer = make_model(case)
        self.data = Tokens(NUM_SAMPLES, case.seq_len)
        self.clip = clip
        self.batches = self._batches(case.batch_size)
        if dataloader:
            self.batches = iter(DataLoader(self.data, case.batch_size, shuffle=True))

    def run(self, steps: int) -> None:
        """Trains on."""
        for _ in range(steps):
            loss = mean_loss(self.model, next(self.batches))
            self.optimizer.zero_grad()
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()

    def close(self) -> None:
        """Nothing to give back."""

    def _batches(self, batch_size: int) -> Iterator[Tensor]:
        order = torch.randperm(NUM_SAMPLES).tolist()
        for first in range(0, NUM_SAMPLES, batch_size):
            yield torch.stack([self.data[i] for i in order[first : first + batch_size]])


class Evener:
    """The same with ``Ddp`` on one rank."""

    def __init__(self, case: Case, clip: bool, dataloader: bool) -> None:
        self.model, optimizer = make_model(case)
        data = Tokens(NUM_SAMPLES, case.seq_len)
        self.ddp = Ddp.setup(
            self.model,
            optimizer,
            devices="cpu",
            precision="fp32",
            config=DdpConfig(max_grad_norm=MAX_GRAD_NORM if clip else None, quiet=True),
            communicator=Communicator(),
        )
        if dataloader:
            loader = self.ddp.loader(DataLoader(data, case.batch_size, shuffle=True))
        else:
            loader = self.ddp.loader(data, batch_size=case.batch_size)
        self.batches = loader.epoch(0)

    def run(self, steps: int) -> None:
        """Trains on."""
        for _ in range(steps):
            self.ddp.backward(mean_loss(self.model, next(self.batches)))
            self.ddp.step()

    def close(self) -> None:
        """Leaves the team."""
        self.ddp.close()


def main() -> None:
    """Measures every case with and without clipping."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    before = load_before()
    rows = []
    for name in arguments.cases:
        rows += [measure(CASES[name], clip, arguments) for clip in (False, True)]
        print(f"{name}: measured", flush=True)
    print(text_of(rows))
    write_report(arguments, before, rows, threads=1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-s", type=float, default=1.2, help="length of a round")
    parser.add_argument("--cases", type=some_of(CASES), default=list(CASES), help=",".join(CASES))
    parser.add_argument(
        "--batch-size", type=int, help="samples a step, in place of each case's own"
    )
    parser.add_argument(
        "--dataloader", action="store_true", help="both loops read through a torch DataLoader"
    )
    return parser.parse_args()


def measure(case: Case, clip: bool, arguments: argparse.Namespace) -> dict[str, object]:
    """One row: both loops, taking turns."""
    case = replace(case, batch_size=arguments.batch_size or case.batch_size)
    rounds, round_s, dataloader = arguments.rounds, arguments.round_s, arguments.dataloader
    plain, evener = Plain(case, clip, dataloader), Evener(case, clip, dataloader)
    # Caches, lazily made optimizer state, and how many steps fit into a turn.
    for way in (plain, evener):
        timed(way.run, 3)
    wall_s, _ = timed(plain.run, 3)
    steps = max(1, round(round_s / (2 * TURNS_A_ROUND) / (wall_s / 3)))
    turns: dict[str, list[tuple[float, float]]] = {"plain": [], "evener": []}
    for number in range(rounds * TURNS_A_ROUND):
        pair = [("plain", plain), ("evener", evener)]
        for name, way in pair if number % 2 else reversed(pair):
            turns[name].append(timed(way.run, steps))
    evener.close()
    walls, cpus = (
        ratios(per_round(turns["evener"], kind), per_round(turns["plain"], kind)) for kind in (0, 1)
    )
    best = {name: 1000 * min(wall_s for wall_s, _ in turns[name]) / steps for name in turns}
    middle = {
        name: 1000 * statistics.median(wall_s for wall_s, _ in turns[name]) / steps
        for name in turns
    }
    return {
        "name": case.name,
        "clip": clip,
        "params": sum(p.numel() for p in plain.model.parameters()),
        "batch_size": case.batch_size,
        "seq_len": case.seq_len,
        "steps_a_turn": steps,
        "plain_ms": round(middle["plain"], 4),
        "evener_ms": round(middle["evener"], 4),
        **spread("ratio", walls),
        **spread("cpu_ratio", cpus),
        "best_ratio": round(best["evener"] / best["plain"], 4),
        "best_plain_ms": round(best["plain"], 4),
    }


def per_round(turns: Sequence[tuple[float, float]], kind: int) -> list[float]:
    """Seconds of each round; ``kind`` 0 for wall time, 1 for processor time."""
    seconds = [turn[kind] for turn in turns]
    return [sum(seconds[k : k + TURNS_A_ROUND]) for k in range(0, len(seconds), TURNS_A_ROUND)]


def timed(run: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Seconds of wall and of processor time."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run(steps)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def make_model(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model for both loops."""
    torch.manual_seed(0)
    model = GPT(width=case.width, layers=case.layers, seq_len=case.seq_len)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


if __name__ == "__main__":
    main()
