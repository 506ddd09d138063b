"""The user's own code in ``docs/porting.md``: small models and data, the same in every process.

A batch of 64 samples is the whole data set, so that the order of samples, which every library
draws in its own way, changes no result.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from helpers import models

NUM_SAMPLES = 64


def make_model() -> nn.Module:
    """Two convolutions: images (B, 1, 8, 8) to logits (B, 4)."""
    return models.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(72, 4),
        ),
        0,
        torch.float32,
    )


def make_dataset() -> TensorDataset:
    return TensorDataset(*models.image_data(NUM_SAMPLES))


def make_gpt() -> nn.Module:
    return models.transformer(vocab_size=16, seq_len=8, dim=16, num_layers=1)


def make_texts() -> TensorDataset:
    return TensorDataset(*models.token_data(NUM_SAMPLES, seq_len=8, vocab_size=16))


def make_generator() -> nn.Module:
    """Noise (B, 4) to faces (B, 1, 8, 8)."""
    return models.seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 32),
            nn.ReLU(),
            nn.Unflatten(1, (8, 2, 2)),
            nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
        ),
        1,
        torch.float32,
    )


def make_discriminator() -> nn.Module:
    """Faces (B, 1, 8, 8) to logits (B, 1)."""
    return models.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32, 1),
        ),
        2,
        torch.float32,
    )


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)

    def forward(self, faces: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = torch.tanh(self.encoder(faces.flatten(1))).chunk(2, 1)
        code = mean + noise * torch.exp(0.5 * log_variance)
        return self.decoder(code).view_as(faces), mean, log_variance


def make_vae() -> nn.Module:
    return models.seeded(VAE, 3, torch.float32)


def make_faces() -> TensorDataset:
    """Images, each with its noise: drawn in the loop, it would differ from script to script."""
    images, _ = models.image_data(NUM_SAMPLES)
    return TensorDataset(images, images.flatten(1)[:, :4].contiguous())


def make_causal_lm() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens, _ = models.token_data(NUM_SAMPLES, seq_len=8, vocab_size=16)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_tokens() -> Tokens:
    return Tokens()
