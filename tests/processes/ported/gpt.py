"""A GPT loop with accumulation, clipping and a learning rate of its own, as small public ones have.

Their `iter_num` is `ddp.window`, their micro-steps are `micro_batch_size`.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evener import Ddp, DdpConfig

block_size, n_embd, vocab_size = 16, 24, 32
learning_rate, min_lr, warmup_iters = 1e-2, 1e-3, 4
batch_size, gradient_accumulation_steps = 6, 4
eval_interval = 5


class Blocks(Dataset):
    """Every block of a text of whole numbers, and what follows each of its tokens."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (num_tokens,), generator=draws)
        self.data = steps.cumsum(0) % vocab_size

    def __len__(self) -> int:
        return (len(self.data) - 1) // block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * block_size
        block = self.data[start : start + block_size + 1]
        return block[:-1], block[1:]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.ln = nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        mask = torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool, device=idx.device).triu(1)
        y = self.ln(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        logits = self.lm_head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it: int, max_iters: int) -> float:
    """Linear warm-up, then half a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_iters", type=int, default=16)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    ddp = Ddp.setup(model, optimizer, config=DdpConfig(max_grad_norm=1.0))
    train_loader = ddp.loader(
        Blocks(2500, seed=1),
        batch_size=batch_size * gradient_accumulation_steps,
        micro_batch_size=batch_size,
        max_steps=args.max_iters,
    )
    val_loader = ddp.eval_loader(Blocks(420, seed=2), batch_size=batch_size)

    def estimate_loss() -> float:
        total, count = 0.0, 0
        with ddp.evaluating():
            for x, y in val_loader:
                total += model(x.to(ddp.device), y.to(ddp.device)).item() * len(x)
                count += len(x)
        return ddp.weighted_mean(total / max(count, 1), weight=count)

    evaluations: dict[int, float] = {}
    rates: dict[int, float] = {}

    @ddp.on_commit
    def evaluate(result: object) -> None:
        rates[ddp.window] = result.lr
        if ddp.window % eval_interval == 0:
            evaluations[ddp.window] = estimate_loss()

    seen = epoch = 0
    while ddp.window < args.max_iters and not ddp.stopping:
        for x, y in train_loader.epoch(epoch):
            lr = get_lr(ddp.window, args.max_iters)
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr
            seen += len(x)
            loss = model(x.to(ddp.device), y.to(ddp.device))
            ddp.backward(loss)
            ddp.step()
        epoch += 1
    result = {
        "samples": seen,
        "progress": ddp.progress.samples,
        "steps": ddp.progress.steps,
        "evaluations": evaluations,
        "rates": rates,
        "parameters": nn.utils.parameters_to_vector(model.parameters()).detach(),
    }
    torch.save(result, f"{args.out}/rank-{ddp.rank}.pt")
    ddp.close()


if __name__ == "__main__":
    main()
