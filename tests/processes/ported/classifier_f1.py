"""A classifier with F1 over the validation set after each epoch, as public text scripts have it."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from evener import Ddp

VOCABULARY = 40


def reviews(num_samples: int, seed: int) -> list[tuple[Tensor, int]]:
    """Word numbers of unlike lengths; one class in four is that of many low numbers."""
    draws = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_samples):
        length = int(torch.randint(3, 12, (), generator=draws))
        label = int(torch.randint(4, (), generator=draws) == 0)
        words = torch.randint(1, VOCABULARY, (length,), generator=draws)
        words[: length // 2] = words[: length // 2] % (8 if label else VOCABULARY) + (not label)
        found.append((words.clamp(1, VOCABULARY - 1), label))
    return found


def collate_batch(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    texts, labels = zip(*batch, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=0)
        self.fc = nn.Linear(12, 2)

    def forward(self, text: Tensor) -> Tensor:
        lengths = (text != 0).sum(1, keepdim=True)
        return self.fc(self.embedding(text).sum(1) / lengths)


def f1_score(predicted: Tensor, target: Tensor) -> float:
    hits = int(((predicted == 1) & (target == 1)).sum())
    return 2 * hits / max(int((predicted == 1).sum()) + int((target == 1).sum()), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = BagOfWords()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    train_loader = DataLoader(
        reviews(301, 1), batch_size=24, shuffle=True, collate_fn=collate_batch
    )
    valid_loader = DataLoader(reviews(101, 2), batch_size=16, collate_fn=collate_batch)

    ddp = Ddp.setup(model, optimizer)
    train_loader, valid_loader = ddp.loader(train_loader), ddp.eval_loader(valid_loader)
    scores: list[float] = []
    seen = 0
    for epoch in range(args.epochs):
        for text, labels in train_loader.epoch(epoch):
            seen += len(labels)
            loss = criterion(model(text.to(ddp.device)), labels.to(ddp.device))
            ddp.backward(loss)
            ddp.step()
        predicted, target = [], []
        with ddp.evaluating():
            for text, labels in valid_loader:
                logits = model(text.to(ddp.device))
                predicted.append(ddp.gather(logits.argmax(1)))
                target.append(ddp.gather(labels.to(ddp.device)))
        predicted, target = torch.cat(predicted), torch.cat(target)
        scores.append(f1_score(predicted, target))
    result = {
        "samples": seen,
        "progress": ddp.progress.samples,
        "scores": scores,
        "predicted": predicted,
        "target": target,
        "parameters": nn.utils.parameters_to_vector(model.parameters()).detach(),
    }
    torch.save(result, f"{args.out}/rank-{ddp.rank}.pt")
    ddp.close()


if __name__ == "__main__":
    main()
