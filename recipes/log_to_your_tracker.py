"""Logs to the experiment tracker of your choice: loss, learning rate, shares, waiting, evaluation.

    evener launch --nproc 2 recipes/log_to_your_tracker.py [--out FILE] [--smoke]

Anything with `log(numbers, step)` will do: `wandb.log`, an MLflow or Aim run, or, as here, a file
with a JSON object a line. Three things to know:

- `ddp.on_commit(fn)` calls `fn` for every window that is final, on each rank that took part.
  Numbers of ranks are in the result already; nothing has to be gathered, and one rank writes. Ask
  `ddp.is_main_process` each time: another rank takes over where the main one is parked.
- `ddp.window` counts windows. It is the same on every rank, which a counter in your loop is not:
  ranks run different numbers of iterations.
- What all ranks do together, such as an evaluation of which each does a part, belongs between
  epochs, which all of them reach, also a parked one (it costs more than it contributes).
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from evener import Ddp, WindowResult


class JsonLines:
    """Stands for your tracker; another process may continue the log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")

    def log(self, numbers: dict[str, float], step: int) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")


def rings(count: int, seed: int) -> TensorDataset:
    """Points (count, 2) in a square, and which of five rings each is in: int64 (count,)."""
    points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(points, (points.norm(dim=1) * 4).long().clamp(max=4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/rings.jsonl"))
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    args = parser.parse_args()
    num_epochs = 3 if args.smoke else 30
    train, test = rings(4096, seed=1), rings(501, seed=2)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_epochs * 16)
    ddp = Ddp.setup(
        model,
        optimizer,
        scheduler,  # follows the team's steps
    )
    tracker = JsonLines(args.out)
    if ddp.is_main_process:
        tracker.begin()

    parts = ddp.eval_loader(test, batch_size=128)

    def evaluate() -> float:
        """Accuracy on the test set: a part on each rank, exact whatever their sizes are."""
        right = count = 0
        with ddp.evaluating():
            for points, labels in parts:
                found = model(points.to(ddp.device)).argmax(dim=1).cpu()
                right, count = right + int((found == labels).sum()), count + len(labels)
        return ddp.weighted_mean(right / max(count, 1), weight=count)

    @ddp.on_commit
    def log(result: WindowResult) -> None:
        numbers = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
        for rank, record in enumerate(result.ranks):
            numbers[f"rank_{rank}/samples"] = record.samples
            numbers[f"rank_{rank}/wait_s"] = record.wait_s
        if ddp.is_main_process:
            tracker.log(numbers, step=result.progress.samples)

    loader = ddp.loader(train, batch_size=256, micro_batch_size=64)
    for epoch in range(num_epochs):
        for points, labels in loader.epoch(epoch):
            ddp.backward(F.cross_entropy(model(points.to(ddp.device)), labels.to(ddp.device)))
            ddp.step()
        accuracy = evaluate()
        if ddp.is_main_process:
            tracker.log({"accuracy": accuracy}, step=ddp.progress.samples)
    if ddp.is_main_process:
        print(f"{ddp.window} windows logged to {args.out}, accuracy {accuracy:.1%}")
    ddp.close()


if __name__ == "__main__":
    main()
