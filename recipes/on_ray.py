"""Ray Train starts the workers of an elastic team, and replaces one that dies.

    pip install 'evener[ray]'
    python recipes/on_ray.py [--workers 2] [--out FOLDER] [--smoke]

It uses the Ray cluster of this machine, or the one that RAY_ADDRESS names; without any it starts
one here. Workers may be of unequal speed. Try it: kill a process named `ray::RayTrainWorker` during
the run. The others continue, and the one that Ray starts in its place joins them. Given the same
--out, a run that was interrupted resumes from its newest checkpoint, on any number of workers.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from evener import Ddp
from evener.ray import EvenerConfig, load_checkpoint, report


def make_rings(count: int) -> TensorDataset:
    """Points (count, 2) of three noisy rings, and the number of the ring of each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (count,), generator=generator)
    angles = 6.2832 * torch.rand(count, generator=generator)
    radii = 1.0 + labels + 0.2 * torch.randn(count, generator=generator)
    points = torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1)
    return TensorDataset(points, labels)


def train(config: dict[str, Any]) -> None:
    """What each worker runs: the same calls as in a script for `evener launch`."""
    torch.manual_seed(0)
    width = config["width"]
    model = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    model.append(nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Ddp.setup(model, optimizer) as ddp:
        loader = ddp.loader(make_rings(config["count"]), batch_size=256)
        load_checkpoint(ddp)  # after the loaders, before the first epoch
        for epoch in ddp.epochs(config["epochs"]):
            total, count = 0.0, 0  # of this rank
            for points, labels in loader.epoch(epoch):
                scores = model(points.to(ddp.device))
                loss = F.cross_entropy(scores, labels.to(ddp.device))
                ddp.backward(loss)
                ddp.step()
                total, count = total + loss.item() * len(labels), count + len(labels)
            mean = ddp.weighted_mean(total / max(1, count), weight=count)
            report(ddp, {"epoch": epoch, "loss": mean, "samples": ddp.progress.samples})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2, help="at most the CPUs")
    parser.add_argument("--out", type=Path, help="folder that all nodes see; else a temporary one")
    parser.add_argument("--smoke", action="store_true", help="less of everything: a minute")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="on_ray-"))
    ray.init()
    config = {"count": 4096, "epochs": 2, "width": 64}
    if not args.smoke:
        config = {"count": 100_000, "epochs": 20, "width": 1024}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=EvenerConfig(min_workers=1),
        scaling_config=ScalingConfig(
            num_workers=args.workers, use_gpu=ray.cluster_resources().get("GPU", 0) >= args.workers
        ),
        run_config=RunConfig(
            name="rings",
            storage_path=str(out.resolve()),
            failure_config=FailureConfig(max_failures=5),  # how many workers are replaced
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print("epoch {epoch}: loss {loss:.4f} after {samples} samples".format(**result.metrics))
    print(result.checkpoint)
    ray.shutdown()


if __name__ == "__main__":
    main()
