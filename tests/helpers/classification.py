"""Tiny classifiers and labelled texts for tests."""

import random
from typing import Any

import sklearn  # noqa: F401  # sets environment variables for good, so before any test

from evener.config.runs import ClassifyConfig
from evener.tasks.classification.samples import Sample

#: What a rank imports before it can train a classifier, or compare it with a linear one.
NEEDED = (
    "evener.cli",
    "evener.tasks.classification.task",
    "peft",
    "sklearn.feature_extraction.text",
    "sklearn.linear_model",
    "transformers.models.llama.modeling_llama",
)

LABELS = ["first", "second", "third"]

TINY_LLAMA: dict[str, Any] = {
    "type": "llama",
    "config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    },
}

TINY_BERT: dict[str, Any] = {
    "type": "bert",
    "config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
}

_WORDS = (("alpha", "beta"), ("gamma", "delta"), ("kappa", "sigma"))


def config(**changes: Any) -> ClassifyConfig:
    """A configuration without dropout, in float32."""
    keys: dict[str, Any] = {
        "labels": LABELS,
        "seq_len": 24,
        "precision": "fp32",
        "lora": {"rank": 4, "dropout": 0.0},
        "optimizer": {"lr": 1e-2},
    }
    return ClassifyConfig.model_validate(keys | changes)


def samples(number: int, *, seed: int = 0, first: int = 0) -> list[Sample]:
    """Texts of unequal lengths whose words tell their class; each text occurs once."""
    draw = random.Random(f"{seed} {first}")
    made = []
    for i in range(first, first + number):
        label = draw.randrange(3)
        words = draw.choices(_WORDS[label], k=draw.randrange(1, 4))
        made.append(Sample(f"{i} {' '.join(words)}", label))
    return made
