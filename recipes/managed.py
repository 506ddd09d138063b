"""A recurrent network learns how deep each bracket is nested; evener owns the loop.

    python recipes/managed.py [--devices 2] [--out runs/managed] [--smoke]

Sequences differ in length, so a loss is a mean over characters, and `train_fn` says over how many.
One worker process trains on each device while this script prints what lands and stops when it is
good enough; the model is saved on the way. With a single device the same code runs in this process.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from evener import Ddp, record_scalar

DEEPEST = 6
PADDING = -100
GOOD_ENOUGH = 0.995

Batch = tuple[Tensor, Tensor]


class Brackets(Dataset[Batch]):
    """Random brackets as (characters, depths), both int64 (length,); 0 opens, 1 closes."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        draw = random.Random(self.seed * 1_000_003 + index)
        depth, characters, depths = 0, [], []
        for _ in range(draw.randint(8, 40)):
            opens = depth == 0 or (depth < DEEPEST and draw.random() < 0.5)
            depth += 1 if opens else -1
            characters.append(0 if opens else 1)
            depths.append(depth)
        return torch.tensor(characters), torch.tensor(depths)


def pad(samples: list[Batch]) -> Batch:
    """A batch (B, T) of sequences of unequal length."""
    characters, depths = zip(*samples, strict=True)
    return (
        pad_sequence(characters, batch_first=True),
        pad_sequence(depths, batch_first=True, padding_value=PADDING),
    )


class Counter(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DEEPEST + 1)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(characters))
        scores: Tensor = self.head(states)
        return scores


def accuracy(scores: Tensor, depths: Tensor) -> Tensor:
    known = depths != PADDING
    return (scores.argmax(dim=-1) == depths)[known].float().mean()


def train(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch, and over how many characters it is the mean."""
    characters, depths = batch
    scores = model(characters)
    record_scalar("accuracy", accuracy(scores, depths))
    loss = F.cross_entropy(scores.flatten(0, 1), depths.flatten(), ignore_index=PADDING)
    return loss, (depths != PADDING).sum()


def evaluate(model: nn.Module) -> float:
    device = next(model.parameters()).device
    dataset = Brackets(500, seed=2)
    characters, depths = pad([dataset[i] for i in range(len(dataset))])
    return float(accuracy(model(characters.to(device)), depths.to(device)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, help="how many; else every CUDA device, or the CPU")
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/managed"), help="for checkpoints")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    last = args.out / "last.pt"
    learning_rate = 1e-2

    builder = (
        Ddp.builder(
            lambda device: Counter().to(device),
            lambda params: torch.optim.Adam(params, lr=learning_rate),
            train,
        )
        .dataset(Brackets(1200 if args.smoke else 20_000, seed=1))
        .collate_fn(pad)
        .batch_size(64)
        .num_epochs(3 if args.smoke else 20)
        .max_grad_norm(1.0)
        .devices(args.devices or "auto")
        .eval_fn(evaluate)
        .checkpoint_every(10)
        .checkpoint_fn(lambda _, model: torch.save(model.state_dict(), last))
        .quiet(args.smoke)
    )
    with builder.run() as handle:
        for m in handle.metrics():
            shares = ", ".join(f"{share:.0%}" for share in m.per_rank_batch_share)
            print(
                f"epoch {m.epoch}: loss {m.avg_loss:.3f}, accuracy {m.scalars['accuracy']:.1%}, "
                f"on new sequences {m.eval['eval']:.1%} (shares {shares})"
            )
            if m.eval["eval"] >= GOOD_ENOUGH:
                handle.stop()
        state = handle.join()

    model = Counter()
    model.load_state_dict(state.state_dict())
    model.eval()
    text = "(()(()))()"
    with torch.no_grad():
        scores = model(torch.tensor([["()".index(c) for c in text]]))
    print(text)
    print("".join(str(int(d)) for d in scores.argmax(dim=-1)[0]))
    print(f"{state.progress.steps} steps; the last checkpoint is {last}")


if __name__ == "__main__":
    main()
