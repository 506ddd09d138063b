"""The models and the data of the benchmarks."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """One block; shapes ``(batch, time, channels)``."""
        b, t, c = x_BTC.shape
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for y in self.qkv(self.norm1(x_BTC)).split(c, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class _Sleep(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep_s: float) -> Tensor:
        """Return a view of ``x``."""
        ctx.sleep_s = sleep_s
        time.sleep(sleep_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        time.sleep(2 * ctx.sleep_s)
        return grads[0], None


class GPT(nn.Module):
    """A small decoder; ``width=256, layers=4`` has 3.3 million parameters.

    Args:
        width: Of the residual stream.
        layers: How many blocks there are.
        seq_len: Tokens of a sequence.
        sleep_s: How long each block sleeps in forward; twice that in backward.
    """

    def __init__(self, *, width: int, layers: int, seq_len: int, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits ``(batch, time, vocabulary)``."""
        places = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x = self.tokens(ids_BT) + self.places(places)
        for block in self.blocks:
            x = block(x)
            if self.sleep_s:
                x = _Sleep.apply(x, self.sleep_s)
        return self.head(self.norm(x))


def mean_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token; ``ids`` has one column more than the model sees."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_small_model(features: int, width: int) -> nn.Module:
    """Return the perceptron of the benchmarks of elastic teams."""
    return nn.Sequential(
        *(nn.Linear(features, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)),
    )


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Random tokens; the content does not matter for speed."""

    def __init__(self, num_samples: int, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (min(num_samples, 4096), seq_len + 1)
        self._ids = torch.randint(VOCABULARY, shape, generator=generator)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index % len(self._ids)]
