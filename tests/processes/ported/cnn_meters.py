"""A convolutional network with BatchNorm and meters, as public ImageNet scripts have it."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener import Ddp, WindowResult


class AverageMeter:
    """The last value of a figure, and its mean."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / max(self.count, 1)


def pictures(num_samples: int, seed: int) -> TensorDataset:
    """Noise with a bright quadrant; the class says which one."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num_samples,), generator=draws)
    images = 0.5 * torch.randn(num_samples, 1, 8, 8, generator=draws)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[0, row : row + 4, column : column + 4] += 1.0
    return TensorDataset(images, labels)


def accuracy(output: Tensor, target: Tensor) -> float:
    return float((output.argmax(1) == target).double().mean())


def validate(ddp: Ddp, val_loader: DataLoader, model: nn.Module) -> float:
    top1 = AverageMeter("Acc@1")
    with ddp.evaluating():
        for images, target in val_loader:
            output = model(images.to(ddp.device))
            top1.update(accuracy(output, target.to(ddp.device)), len(images))
    return ddp.weighted_mean(top1.avg, weight=top1.count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=14, gamma=0.1)
    train_loader = DataLoader(pictures(209, 1), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(pictures(65, 2), batch_size=args.batch_size)

    ddp = Ddp.setup(model, optimizer, scheduler)
    train_loader, val_loader = ddp.loader(train_loader), ddp.eval_loader(val_loader)
    losses = AverageMeter("Loss")

    @ddp.on_commit  # every window of the team, on one rank: another one follows where it is parked
    def count(result: WindowResult) -> None:
        if ddp.is_main_process:
            losses.update(result.loss, result.size)

    seen = 0
    counts, losses_of_epochs = [], []
    best_acc1 = 0.0
    for epoch in range(args.epochs):
        losses.reset()
        top1 = AverageMeter("Acc@1")
        for images, target in train_loader.epoch(epoch):
            images, target = images.to(ddp.device), target.to(ddp.device)
            output = model(images)
            loss = criterion(output, target)
            top1.update(accuracy(output, target), len(images))  # of this rank's own samples
            seen += len(images)
            ddp.backward(loss)
            ddp.step()
        losses_of_epochs.append(ddp.weighted_mean(losses.avg, weight=losses.count))
        counts.append((losses.count, top1.count))
        best_acc1 = max(best_acc1, validate(ddp, val_loader, model))
    result = {
        "samples": seen,
        "counts": counts,
        "losses": losses_of_epochs,
        "best_acc1": best_acc1,
        "progress": ddp.progress.samples,
        "statistics": torch.cat([b.flatten().double() for b in model.buffers()]),
        "parameters": nn.utils.parameters_to_vector(model.parameters()).detach(),
    }
    torch.save(result, f"{args.out}/rank-{ddp.rank}.pt")
    ddp.close()


if __name__ == "__main__":
    main()
