"""A small GPT with gradient accumulation, clipping and a warm-up, on one device."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 17, 16, 32
BATCH_SIZE, ACCUMULATE = 32, 4


class Block(nn.Module):
    """Attention, then a small network, both on normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device), 1)
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places))


def counting_sequences(num_samples: int) -> TensorDataset:
    """Sequences that count up from a random number in random steps."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    step = torch.randint(1, 4, (num_samples, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(LENGTH + 1)) % VOCABULARY)


def main(epochs: int = 2) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
    micro_batch_size = BATCH_SIZE // ACCUMULATE
    loader = DataLoader(counting_sequences(192), batch_size=micro_batch_size, shuffle=True)
    last = 0.0

    model.train()
    for _ in range(epochs):
        for number, (tokens,) in enumerate(loader):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
            if (number + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            last = loss.item()
    print(f"loss {last:.3f}")
    return model, last


if __name__ == "__main__":
    main()
