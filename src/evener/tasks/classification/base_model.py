"""The frozen base of a classifier, with a head for the classes."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.config.loading import load_config
from evener.config.runs import ClassifyModelConfig, ModelConfig
from evener.errors import ConfigError
from evener.files import blake2b
from evener.tasks.language_model import (
    building,
    check_length,
    check_type,
    configure,
    loading,
    model_folder,
    quiet,
    scratch_keys,
    vocabulary_size,
)
from evener.tasks.text.tokenizer import check_vocabulary

GivenModel = ModelConfig | Mapping[str, Any] | str | Path
"""A base: a local folder, keys such as ``{"type": "bert", "config": {...}}``, or an object."""

_HASHED_ELEMENTS = 4096
"""Elements of each tensor, evenly spread, in a fingerprint: enough to distinguish models."""

_RESERVED_POSITIONS = 2
"""Model types that, like RoBERTa, number positions from the one after that of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The facts of a frozen base.

    Attributes:
        path: Its folder, absolute; empty if it started from random weights.
        fingerprint: Identifies the backbone.
        config: Its configuration as a classifier, with its rates of dropout.
        new_modules: Modules without saved weights, which are trained and saved with the adapter.
            Empty if the whole base started from random weights.
        new_head: Whether the head started from random weights: neither base nor adapter had one.
    """

    path: str
    fingerprint: str
    config: Any
    new_modules: tuple[str, ...]
    new_head: bool


def model_config_of(given: GivenModel) -> ModelConfig:
    """Return the configuration of a base.

    Raises:
        ConfigError: An unknown key, or a bad value.
    """
    if isinstance(given, ModelConfig):
        return given
    if isinstance(given, str | Path):
        return ClassifyModelConfig(path=str(given))
    return load_config(ClassifyModelConfig, given)


def build_base(config: ModelConfig, labels: Sequence[str], encoder: Any) -> tuple[nn.Module, Base]:
    """Make a base model with a new head, in float32 on the CPU, in ``eval()``, without dropout.

    Frozen layers have no dropout: only the adapter is regularised. A new head depends on torch's
    random generator.

    Args:
        config: A local folder, or a transformers model type with configuration keys.
        labels: Names of the classes.
        encoder: The tokenizer.

    Raises:
        ConfigError: An unknown type, a bad key, a folder without a model or with a part of one, a
            model that is too short, has too few embeddings, or is an encoder-decoder.
    """
    names = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
        "pad_token_id": encoder.pad_token_id,
        # With the problem type of another base, transformers would not treat logits as classes.
        "problem_type": "single_label_classification",
    }
    num_ids = max(encoder.get_vocab().values()) + 1
    with quiet():
        if config.path:
            with_dropout, model, new = _load(config.path, names)
        else:
            longest_text, new = encoder.model_max_length, set[str]()
            with_dropout, model = _from_scratch(config, names, num_ids, longest_text)
    if getattr(with_dropout, "is_encoder_decoder", False):
        raise ConfigError(
            f"the base model is a {with_dropout.model_type}, an encoder-decoder; give an encoder, "
            "such as bert, or a decoder, such as llama"
        )
    check_vocabulary(num_ids, vocabulary_size(model))
    check_length(with_dropout, encoder.model_max_length, "base model", "seq_len")
    prefix = f"{model.base_model_prefix}."
    return model.eval(), Base(
        path=str(model_folder(config.path).absolute()) if config.path else "",
        fingerprint=_fingerprint(model, new),
        config=with_dropout,
        new_modules=_modules_of(new, prefix),
        new_head=config.path is None or any(not name.startswith(prefix) for name in new),
    )


def _modules_of(names: Iterable[str], prefix: str) -> tuple[str, ...]:
    """Return the modules that hold parameters, by name; beside the backbone, the outermost."""
    owners = (
        name.rpartition(".")[0] if name.startswith(prefix) else name.partition(".")[0]
        for name in names
    )
    return tuple(sorted(set(owners)))


def _without_dropout(config: Any) -> Any:
    changed = copy.deepcopy(config)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(changed, key, 0.0)
    return changed


def _fingerprint(model: nn.Module, new: set[str]) -> str:
    """Hash names, shapes and a sample of values of the backbone's parameters.

    Args:
        model: With a head, which is not hashed.
        new: Parameters with random numbers, which are not hashed either.
    """
    hasher = blake2b()
    for name, parameter in sorted(model.base_model.named_parameters()):  # type: ignore[union-attr]
        if f"{model.base_model_prefix}.{name}" not in new:
            flat = parameter.detach().flatten()
            step = -(-flat.numel() // _HASHED_ELEMENTS) or 1
            hasher.update(f"{name} {tuple(parameter.shape)} ".encode())
            hasher.update(flat[::step].float().contiguous().numpy().data)
    return hasher.hexdigest()


def _load(path: str, names: Mapping[str, Any]) -> tuple[Any, nn.Module, set[str]]:
    """Return configuration and model of a folder, and the parameters that the folder lacks."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with loading(path, "classifier") as folder:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **names)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=_without_dropout(config),
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # a head for other classes
            output_loading_info=True,
        )
    mismatched = {name for name, *_ in found["mismatched_keys"]}
    new = mismatched | set(found["missing_keys"])
    prefix = f"{model.base_model_prefix}."
    # Masked language models are saved without the pooler that a classifier adds.
    for name in sorted(new):
        if name.startswith(prefix) and (name in mismatched or ".pool" not in name):
            raise ConfigError(
                f"model.path {path!r} holds no weights that fit {name!r} of the "
                f"{config.model_type} that its config.json describes; give a folder whose "
                "config.json and weights belong together"
            )
    return config, model, new


def _from_scratch(
    config: ModelConfig, names: Mapping[str, Any], vocab_size: int, seq_len: int
) -> tuple[Any, nn.Module]:
    """Return configuration and model of a type with keys."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    check_type(config.type, known, "has no classifier in transformers")
    positions = seq_len + _RESERVED_POSITIONS
    keys = scratch_keys(config, vocab_size=vocab_size, max_position_embeddings=positions)
    with building(config, "classifier"):
        built = configure(config, {**keys, **names})
        return built, AutoModelForSequenceClassification.from_config(
            _without_dropout(built), dtype=torch.float32
        )
