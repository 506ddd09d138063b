"""Local SGD: each rank makes optimizer steps of its own, and the ranks average now and then.

    evener launch --nproc 2 recipes/local_sgd.py [--slow 3] [--anchor 8] [--smoke]

Trains the same model three times on the same samples: with policy "sync" (an average of gradients
in every step), with "cadence" (an average of parameters when the slowest rank has made `anchor`
steps) and with "async" (the same in the background). It prints how often the ranks exchanged, how
long they waited for it, and what loss the averaged model has on data that it has not seen.

Which is better depends on the network between the ranks and on the model: try it with yours. What
changes with the policy is the meaning of `batch_size`. In "sync" it is that of the whole team; in
the others it is that of a rank's own step, so a learning rate that is right for one may be too
large or too small for another.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from evener import Ddp, DdpConfig, DistributedTrainConfig, WindowResult

BATCH_SIZE = 32


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sums of sines: inputs (count, 32), targets (count, 1)."""
    x = torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(dim=1, keepdim=True)


@dataclass
class Outcome:
    """The result of one way of training; ``windows`` are those of the main process."""

    is_main: bool
    windows: list[WindowResult]
    heldout_loss: float
    seconds: float


def train(policy: str, samples: int, epochs: int, **options: Any) -> Outcome:
    """Trains from the same start with one policy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.BatchNorm1d(128), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows: list[WindowResult] = []
    config = DdpConfig(quiet=True, **options)
    with Ddp.setup(model, optimizer, policy=policy, config=config) as ddp:
        # Committed windows: here the model holds the consensus, the same bits on every rank.
        # Between two of them each rank has a working copy of its own.
        ddp.on_commit(windows.append)
        # Two ranks together make a step of 64 samples in "sync"; alone, steps of 32.
        batch_size = BATCH_SIZE * (ddp.world_size if policy == "sync" else 1)
        loader = ddp.loader(TensorDataset(*make_data(samples, seed=1)), batch_size=batch_size)
        started = time.perf_counter()
        for epoch in range(epochs):
            for x, y in loader.epoch(epoch):
                ddp.backward(F.mse_loss(model(x.to(ddp.device)), y.to(ddp.device)))
                ddp.step()  # in "cadence": this rank's own step, and now and then an average
        seconds = time.perf_counter() - started
        # After an epoch every rank is at the consensus: nothing is left to be averaged.
        x, y = make_data(1000, seed=2)
        with ddp.evaluating():
            own = float(F.mse_loss(model(x.to(ddp.device)), y.to(ddp.device)))
        # Rank 0, unless it was too slow in "sync" and has been parked: then it has missed windows.
        return Outcome(ddp.is_main_process, windows, ddp.weighted_mean(own), seconds)


def describe(policy: str, outcome: Outcome) -> str:
    """One line: exchanges, the work of each rank, waiting, and the loss."""
    windows = outcome.windows
    samples = sum(w.size for w in windows)
    parts = []
    for rank in range(len(windows[0].ranks)):
        own = [w.ranks[rank] for w in windows]
        idle_s = sum(r.wait_s + r.sync_s for r in own)
        busy_s = sum(r.compute_s for r in own)
        share = sum(r.samples for r in own) / samples
        parts.append(f"rank {rank} does {share:.0%}, idle {idle_s / (idle_s + busy_s):.0%}")
    return (
        f"{policy:8} {samples} samples in {len(windows)} windows, {outcome.seconds:.1f} s | "
        f"{' | '.join(parts)} | held-out loss {outcome.heldout_loss:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, default=3.0, help="factor for the last rank")
    parser.add_argument("--anchor", type=int, default=8, help="steps of the slowest in a window")
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    args = parser.parse_args()
    samples, epochs = (4096, 2) if args.smoke else (32768, 5)

    place = DistributedTrainConfig.from_env()  # what the launcher told this rank
    slow = {place.world_size - 1: args.slow}
    for policy in ("sync", "cadence", "async"):
        anchor = None if policy == "sync" else args.anchor  # sync averages in every step
        outcome = train(policy, samples, epochs, emulate_slow=slow, anchor=anchor)
        if outcome.is_main:
            print(describe(policy, outcome))


if __name__ == "__main__":
    main()
