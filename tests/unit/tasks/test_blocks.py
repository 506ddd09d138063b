"""The buckets of real architectures."""

import pytest
import torch
import transformers
from torch import nn

from evener.tasks.blocks import gradient_buckets
from helpers.models import transformer

SMALL = {"vocab_size": 20, "pad_token_id": None}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2}
OPT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 8}
NEOX = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def labels(model: nn.Module) -> list[str]:
    buckets = gradient_buckets(model)
    assert buckets is not None
    named = [name for _, names in buckets for name in names]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    return [label for label, _ in buckets]


@pytest.mark.parametrize(
    ("kind", "keys", "head"),
    [
        (transformers.GPT2LMHeadModel, GPT2, []),  # tied
        (transformers.OPTForCausalLM, {**OPT, "word_embed_proj_dim": 8}, []),
        (transformers.GPTNeoXForCausalLM, NEOX, ["LM head"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_blocks_come_last_to_first_then_head_norm_and_embedding(
    kind: type, keys: dict[str, int], head: list[str]
) -> None:
    model = kind(kind.config_class(**SMALL, **keys))
    assert labels(model) == ["block 1", "block 0", *head, "final norm", "embedding"]


def test_a_model_that_is_not_of_transformers_has_blocks_too() -> None:
    assert labels(transformer(tied=False)) == [
        "block 1",
        "block 0",
        "LM head",
        "final norm",
        "embedding",
    ]


class Stack(nn.Module):
    """A model whose blocks are in a ``Sequential``, as many are that people write themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(20, 8)
        self.places = nn.Parameter(torch.zeros(1, 9, 8))
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3)))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 20))


def test_blocks_may_be_in_a_sequential() -> None:
    order = ["block 2", "block 1", "block 0", "LM head", "final norm", "embedding"]
    assert labels(Stack()) == order


def test_a_model_without_blocks_has_no_buckets() -> None:
    assert gradient_buckets(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) is None
