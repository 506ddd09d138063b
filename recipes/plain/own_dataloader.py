"""Tags letters of ragged words with a GRU: plain PyTorch, with a DataLoader that took some thought.

    python recipes/plain/own_dataloader.py [--smoke]

A collate function that pads, a sampler of its own (short words first), worker processes, clipping
and a schedule. `recipes/own_dataloader.py` is the same script on every device of the machine.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

Sample = tuple[Tensor, Tensor]


class Words(Dataset[Sample]):
    """Words of 3 to 20 letters; the tag of a letter is the largest letter so far."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.randint(3, 21, (count,), generator=generator).tolist()
        self.words = [torch.randint(12, (n,), generator=generator) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Sample:
        word = self.words[index]
        return word, word.cummax(dim=0).values


class ShortFirst(Sampler[int]):
    """A curriculum: from the shortest word to the longest."""

    def __init__(self, lengths: list[int]) -> None:
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def pad(samples: list[Sample]) -> Sample:
    """Letters and tags, int64 (B, T); what is no letter has the tag -100."""
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(
        tags, batch_first=True, padding_value=-100
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(12, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.tags = nn.Linear(64, 12)

    def forward(self, letters_BT: Tensor) -> Tensor:
        hidden_BTD, _ = self.memory(self.letters(letters_BT))
        logits_BTV: Tensor = self.tags(hidden_BTD)
        return logits_BTV


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    args = parser.parse_args()
    num_epochs, words = (2, Words(500)) if args.smoke else (10, Words(10_000))
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_epochs * 160)
    loader = DataLoader(
        words,
        batch_size=64,
        sampler=ShortFirst(words.lengths),
        collate_fn=pad,
        num_workers=0 if args.smoke else 2,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    for epoch in range(num_epochs):
        for letters, tags in loader:
            logits = model(letters.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), tags.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
