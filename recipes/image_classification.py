"""A task of your own on evener's driver: small pictures, drawn here, and a network that names them.

    evener launch --nproc 2 --emulate-slow 1:3 recipes/image_classification.py [--smoke] [--resume]
    python recipes/image_classification.py            # the accelerators of this machine, or one CPU

`Pictures` says what is trained and how good it is. The driver, `run_task`, does the rest: shares by
speed, evaluation over all ranks, checkpoints, resume, smaller micro-batches where memory runs out,
Ctrl-C, events, the summary and the closing table in `runs/pictures/`. With `--emulate-slow 1:3` the
second rank computes three times as slowly, and is given less.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from evener import Job, Task, run_task

SHAPES = ("disc", "ring", "square", "cross", "stripes", "checks")
SIZE = 20
Data = Dataset[tuple[Tensor, ...]]


def draw(shape: str, cx: float, cy: float, radius: float) -> Tensor:
    """A picture (SIZE, SIZE) of 0 and 1."""
    y, x = torch.meshgrid(torch.arange(SIZE) - cy, torch.arange(SIZE) - cx, indexing="ij")
    far = (x.square() + y.square()).sqrt()
    box = torch.maximum(x.abs(), y.abs()) <= radius
    inside = {
        "disc": far <= radius,
        "ring": (far <= radius) & (far >= radius - 2),
        "square": box,
        "cross": box & ((x.abs() <= 1) | (y.abs() <= 1)),
        "stripes": box & (torch.floor(y / 2) % 2 == 0),
        "checks": box & ((torch.floor(x / 2) + torch.floor(y / 2)) % 2 == 0),
    }
    return inside[shape].float()


def make_data(count: int, seed: int) -> Data:
    """Shapes of any size in any place, under noise: pictures (count, 1, SIZE, SIZE), labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    places = torch.rand(count, 3, generator=generator)
    pictures = torch.stack(
        [
            draw(SHAPES[label], 7 + 6 * cx, 7 + 6 * cy, 4 + 3 * size)
            for label, (cx, cy, size) in zip(labels.tolist(), places.tolist(), strict=True)
        ]
    )
    noise = 0.3 * torch.randn(pictures.shape, generator=generator)
    return TensorDataset((pictures + noise).unsqueeze(1), labels)


class Pictures(Task):
    """What is this task's own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.accuracy = 0.0
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, 64), nn.ReLU()),
            nn.Linear(64, len(SHAPES)),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def open_data(self, job: Job) -> tuple[Data, Data]:
        self.device, self.is_main = job.ddp.device, job.ddp.is_main_process
        return make_data(self.count, seed=1), make_data(self.count // 4, seed=2)

    def loss(self, batch: Any) -> tuple[Tensor, float]:
        pictures, labels = batch
        logits = self.model(pictures.to(self.device))
        return F.cross_entropy(logits, labels.to(self.device)), len(labels)

    def measure(self, samples: list[Any]) -> Sequence[float]:
        pictures, labels = self.collate(samples)
        logits = self.model(pictures.to(self.device)).cpu()
        correct = (logits.argmax(-1) == labels).sum().item()
        return F.cross_entropy(logits, labels, reduction="sum").item(), len(labels), correct

    def judge(self, window: int, totals: Sequence[float]) -> str:
        _, count, correct = totals  # of all ranks, the same on each
        self.accuracy = correct / count
        return f"accuracy {self.accuracy:.1%}"

    def figures(self, job: Job, *, stopped: bool) -> Mapping[str, Any]:
        return {"accuracy": self.accuracy, "classes": len(SHAPES)}  # also into summary.json

    def in_words(self, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**figures, "accuracy": f"{figures['accuracy']:.1%}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs", help="folder that runs go to")
    parser.add_argument("--resume", action="store_true", help="continue the newest run")
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    args = parser.parse_args()
    torch.manual_seed(0)
    keys = {"name": "pictures", "epochs": 4, "batch_size": 64, "micro_batch_size": 8}
    more = {"eval": {"every": 40}, "checkpoint": {"every": 80}}
    task = Pictures(1500 if args.smoke else 6000)
    result = run_task(task, {**keys, **more}, out=args.out, resume=args.resume)
    if task.is_main and not result.stopped:
        summary = json.loads((result.run_folder / "summary.json").read_text())
        words = "of the held-out pictures named right"
        print(f"{summary['accuracy']:.1%} {words}: {result.run_folder}")


if __name__ == "__main__":
    main()
