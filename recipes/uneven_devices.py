"""Devices of unequal speed: equal shares, measured shares, and shares from a hint.

    evener launch --nproc 2 recipes/uneven_devices.py [--slow 3] [--smoke]

Trains the same model on the same data three times: with equal shares, as data-parallel training
usually does; with shares by measured speed, which is what evener does by itself; and with a hint
that spares the measuring. Without unequal devices at hand, `--slow 3` makes the last rank compute
three times as slowly.

The result is the same each time: the gradient of a window is that of the whole batch, however
it was split. Only the time differs, and what was rounded off in the order of sums.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from evener import Ddp, DdpConfig, DistributedTrainConfig, WindowResult

Data = Dataset[tuple[Tensor, ...]]


def make_data(count: int) -> Data:
    """Sums of sines: inputs (count, 64), targets (count, 1)."""
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def train(dataset: Data, steps: int, width: int, **options: Any) -> list[WindowResult]:
    """Trains from the same start; returns the committed windows, on the main process alone."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    windows: list[WindowResult] = []
    with Ddp.setup(model, optimizer, config=DdpConfig(**options)) as ddp:
        ddp.on_commit(windows.append)  # on every rank, with the same numbers
        # A small micro-batch lets a rank that is slow take a small part: shares are whole samples.
        loader = ddp.loader(dataset, batch_size=256, micro_batch_size=64, max_steps=steps)
        epoch = 0
        while not ddp.stopping and ddp.window < steps:
            for x, y in loader.epoch(epoch):
                ddp.backward(F.mse_loss(model(x.to(ddp.device)), y.to(ddp.device)))
                ddp.step()
            epoch += 1
        # Rank 0, unless it was too slow and has been parked: then it has missed windows.
        return windows if ddp.is_main_process else []


def describe(name: str, windows: list[WindowResult], seconds: float) -> str:
    """One line: speed, the share of each rank, and how long each one waited for others."""
    settled = windows[len(windows) // 2 :]
    samples = sum(w.size for w in windows)
    parts = []
    for rank in range(len(windows[0].ranks)):
        own = [w.ranks[rank] for w in settled]
        share = sum(r.samples for r in own) / sum(w.size for w in settled)
        wait_s, busy_s = sum(r.wait_s for r in own), sum(r.compute_s for r in own)
        waits = wait_s / max(wait_s + busy_s, 1e-9)
        parts.append(f"rank {rank} does {share:.0%} and waits {waits:.0%}")
    speed = samples / seconds
    return f"{name:16} {speed:8,.0f} samples/s | {' | '.join(parts)} | loss {windows[-1].loss:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, default=3.0, help="factor for the last rank")
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    args = parser.parse_args()
    steps, width = (10, 512) if args.smoke else (60, 1024)
    dataset = make_data(256 * steps)

    place = DistributedTrainConfig.from_env()  # what the launcher told this rank
    slow = {place.world_size - 1: args.slow}
    speeds = [1.0 / slow.get(rank, 1.0) for rank in range(place.world_size)]
    ways: dict[str, dict[str, Any]] = {
        "equal shares": {"partition_ratios": [1.0] * place.world_size},
        "measured": {},
        "with a hint": {"speed_hint": speeds},
    }
    for name, options in ways.items():
        started = time.perf_counter()
        windows = train(dataset, steps, width, emulate_slow=slow, quiet=True, **options)
        if windows:
            print(describe(name, windows, time.perf_counter() - started))


if __name__ == "__main__":
    main()
