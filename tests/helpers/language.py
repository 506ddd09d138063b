"""Small causal language models and batches for them, and a plain loop to compare with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener import LMBatch
from helpers.models import seeded

VOCABULARY = 40


def llama(
    num_blocks: int = 3,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> nn.Module:
    """A Llama of 9,000 parameters, the same for the same seed."""
    import transformers

    keys = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
    }
    config = transformers.LlamaConfig(**{**keys, **changes})
    return seeded(lambda: transformers.LlamaForCausalLM(config), seed, dtype)


def gpt2(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A GPT-2 of two blocks, which computes in its dtype throughout (a Llama's norms do not)."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        initializer_range=0.1,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return seeded(lambda: transformers.GPT2LMHeadModel(config), seed, dtype)


def lm_batch(number: int, num_sequences: int, *, vocabulary: int = VOCABULARY) -> LMBatch:
    """Sequences of 12 tokens of which some do not count, the same for the same number."""
    generator = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(vocabulary, (num_sequences, 13), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(num_sequences):
        labels[row, 3 + (5 * row + number) % 9 :] = -100
    return LMBatch(tokens[:, :-1].contiguous(), labels)


def union(batches: Sequence[LMBatch]) -> LMBatch:
    """All sequences of several batches in one."""
    return LMBatch(
        torch.cat([b.input_ids for b in batches]), torch.cat([b.labels for b in batches])
    )


def plain_loss(model: nn.Module, batch: LMBatch) -> Tensor:
    """Mean cross-entropy per counted token."""
    logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)
    return F.cross_entropy(logits, batch.labels.flatten(), ignore_index=-100)


def train_plainly(
    model: nn.Module, batches: Sequence[LMBatch], *, lr: float, max_norm: float | None = 1.0
) -> nn.Module:
    """One process, torch alone: an AdamW step on each batch, at a constant learning rate."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
    )
    for batch in batches:
        optimizer.zero_grad()
        plain_loss(model, batch).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return model


def vector(model: nn.Module) -> Tensor:
    """All parameters behind one another, in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def relative_error(mine: Tensor, true: Tensor) -> float:
    """2-norm of the difference, relative to that of what is true."""
    return float(torch.linalg.vector_norm(mine - true) / torch.linalg.vector_norm(true))
