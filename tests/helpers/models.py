"""Small models for tests: the same weights for the same seed, in any dtype, whatever ran before."""

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEEDED = threading.Lock()
"""Ranks may be threads, which share torch's generator."""


def seeded(
    make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build a module from a seed, the same on every rank, and leave torch's generator as it was.

    Weights are drawn in float32 and converted, so that all dtypes start from the same numbers.
    """
    with SEEDED, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype)


# ── multi-layer perceptron ───────────────────────────────────────────────────────────────────────


def mlp(
    num_inputs: int = 8,
    num_hidden: int = 16,
    num_outputs: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Two layers with a tanh between them: float ``(B, num_inputs)`` to ``(B, num_outputs)``."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(num_inputs, num_hidden), nn.Tanh(), nn.Linear(num_hidden, num_outputs)
        ),
        seed,
        dtype,
    )
    assert isinstance(model, nn.Sequential)
    return model


# ── causal transformer ───────────────────────────────────────────────────────────────────────────


class TinyTransformer(nn.Module):
    """A causal language model with tied embeddings: int64 ``(B, T)`` to logits ``(B, T, V)``.

    Shapes: B samples, T positions, D features, V words.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        dim: int,
        num_heads: int,
        num_layers: int,
        *,
        tied: bool,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, dim)
        self.places = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.words(tokens_BT) + self.places(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.norm_1(x_BTD)).view(B, T, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


def transformer(
    vocab_size: int = 32,
    seq_len: int = 16,
    dim: int = 16,
    num_heads: int = 2,
    num_layers: int = 2,
    *,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TinyTransformer:
    """A causal transformer of about 7,000 parameters."""
    model = seeded(
        lambda: TinyTransformer(vocab_size, seq_len, dim, num_heads, num_layers, tied=tied),
        seed,
        dtype,
    )
    assert isinstance(model, TinyTransformer)
    return model


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not -100."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=-100)


# ── convolutions with batch statistics ───────────────────────────────────────────────────────────


def cnn(
    num_classes: int = 4,
    num_channels: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Two convolutions with BatchNorm: float ``(B, 1, H, W)`` to ``(B, num_classes)``."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, num_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
            nn.ReLU(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(num_channels, num_classes),
        )

    model = seeded(make, seed, dtype)
    assert isinstance(model, nn.Sequential)
    return model


# ── data ─────────────────────────────────────────────────────────────────────────────────────────


def regression_data(
    num_samples: int,
    num_inputs: int = 8,
    num_outputs: int = 4,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Inputs ``(N, num_inputs)`` and targets ``(N, num_outputs)`` that a linear map explains."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, num_inputs, generator=generator)
    truth = torch.randn(num_inputs, num_outputs, generator=generator)
    noise = torch.randn(num_samples, num_outputs, generator=generator)
    return x.to(dtype), (x @ truth + 0.1 * noise).to(dtype)


def token_data(
    num_samples: int, seq_len: int = 16, vocab_size: int = 32, *, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Input tokens and next tokens, int64 ``(N, seq_len)``, of a rule that can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(vocab_size, (num_samples, 1), generator=generator)
    step = torch.randint(1, 4, (num_samples, 1), generator=generator)
    tokens = (first + step * torch.arange(seq_len + 1)) % vocab_size
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def image_data(
    num_samples: int, size: int = 8, num_classes: int = 4, *, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Images ``(N, 1, size, size)`` and int64 labels ``(N,)``, which set the brightness."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (num_samples,), generator=generator)
    noise = torch.randn(num_samples, 1, size, size, generator=generator)
    return noise + labels.view(-1, 1, 1, 1), labels
