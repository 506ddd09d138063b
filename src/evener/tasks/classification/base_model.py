"""The frozen base of a classifier, with a head for the classes and room for an adapter."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.config.loading import load_config
from evener.config.runs import ClassifyModelConfig, ModelConfig
from evener.errors import ConfigError
from evener.files import blake2b, require_regular
from evener.tasks.classification.encoding import TextEncoder
from evener.tasks.language_model import (
    building,
    check_type,
    configure,
    in_short,
    model_folder,
    quiet,
    scratch_keys,
    vocabulary_size,
)
from evener.tasks.text.tokenizer import check_vocabulary

GivenModel = ModelConfig | Mapping[str, Any] | str | Path
"""A base: a local folder, keys such as ``{"type": "bert", "config": {...}}``, or an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What is known of a frozen base.

    Attributes:
        path: Its folder, absolute; empty where it started from random weights.
        fingerprint: Tells the backbone from others.
        config: Its configuration as a classifier, with the rates of dropout that were switched off.
        new_modules: What the folder held no weights of, by module name, so that it is trained and
            saved with the adapter. Empty where the whole base started from random weights.
        new_head: Whether the head started from random weights: neither base nor adapter had one.
    """

    path: str
    fingerprint: str
    config: Any
    new_modules: tuple[str, ...]
    new_head: bool


_HASHED_ELEMENTS = 4096
"""Of each tensor so many, evenly spread, go into a fingerprint: enough to tell models apart."""


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


def build_base(
    config: ModelConfig, labels: Sequence[str], encoder: TextEncoder
) -> tuple[nn.Module, Base]:
    """Make a base model with a new head, in float32 on the CPU, in ``eval()``, without dropout.

    What is frozen is not dropped out: only the adapter is regularised, and a replica's random
    numbers come from one place. A new head depends on torch's random generator.

    Args:
        config: A local folder, or a transformers model type with configuration keys.
        labels: Names of the classes.
        encoder: Makes the model's input.

    Raises:
        ConfigError: An unknown type, a bad key, a folder without a model or with a part of one, a
            model that is too short, has too few embeddings, or writes what it answers.
    """
    names = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
        "pad_token_id": encoder.pad_id,
        # Of a base for another problem, transformers would not take the logits for classes.
        "problem_type": "single_label_classification",
    }
    with quiet():
        model, new = (
            _load(config.path, names)
            if config.path
            else (_from_scratch(config, names, encoder), frozenset())
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"the base model is a {model.config.model_type}, which reads a text and writes another "  # type: ignore[union-attr]
            "one; give an encoder, such as bert, or a decoder, such as llama"
        )
    check_vocabulary(encoder.tokenizer.vocab_size, vocabulary_size(model))
    longest = _longest_text(model)
    if longest < encoder.seq_len:
        raise ConfigError(
            f"seq_len is {encoder.seq_len}, but the base model takes at most {int(longest)} "
            "tokens; lower seq_len"
        )
    prefix = f"{model.base_model_prefix}."
    with_dropout = copy.deepcopy(model.config)
    _switch_off_dropout(model)
    return model.eval(), Base(
        path=str(model_folder(config.path).absolute()) if config.path else "",
        fingerprint=_fingerprint(model, new),
        config=with_dropout,
        new_modules=_modules_of(new, prefix),
        new_head=config.path is None or any(not name.startswith(prefix) for name in new),
    )


def folder_fingerprint(path: str) -> str:
    """``Base.fingerprint`` of the base in a folder.

    Raises:
        ConfigError: There is none that could be a classifier's.
    """
    with quiet():
        return _fingerprint(*_load(path, {}))


def _longest_text(model: nn.Module) -> float:
    """Tokens that a model takes; infinity where it does not say."""
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    for name, module in model.named_modules():
        # RoBERTa and its like number tokens from the place after that of padding.
        if "position" not in name or not isinstance(module, nn.Embedding):
            continue
        if module.num_embeddings == positions and module.padding_idx is not None:
            return float(positions - module.padding_idx - 1)
    return float(positions)


def _modules_of(names: Iterable[str], prefix: str) -> tuple[str, ...]:
    """Return the modules that hold parameters, by name; beside the backbone, the outermost."""
    return tuple(
        sorted(
            {n.rpartition(".")[0] if n.startswith(prefix) else n.partition(".")[0] for n in names}
        )
    )


def _switch_off_dropout(model: nn.Module) -> None:
    """Set every rate of dropout to 0: in its layers, and in the configuration that others ask."""
    config: Any = model.config
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for owner in (config, *model.modules()):
        for key, value in list(vars(owner).items()):
            if "drop" in key and isinstance(value, float):
                setattr(owner, key, 0.0)


def _fingerprint(model: nn.Module, new: frozenset[str]) -> str:
    """Hash of the backbone's parameters: their names, shapes and a sample of values.

    Args:
        model: With a head, which is left out.
        new: Parameters that hold random numbers, left out, too.
    """
    hasher = blake2b()
    prefix = f"{model.base_model_prefix}."
    for name, parameter in sorted(model.base_model.named_parameters()):  # type: ignore[union-attr]
        if prefix + name in new:
            continue
        hasher.update(f"{name} {tuple(parameter.shape)} ".encode())
        flat = parameter.detach().reshape(-1)
        step = -(-flat.numel() // _HASHED_ELEMENTS) or 1
        hasher.update(flat[::step].float().cpu().contiguous().numpy().data)
    return hasher.hexdigest()


def _load(path: str, names: Mapping[str, Any]) -> tuple[nn.Module, frozenset[str]]:
    """Return the model of a folder, and its parameters of which the folder holds no weights."""
    from transformers import AutoModelForSequenceClassification

    folder = model_folder(path)
    try:
        require_regular(folder)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # a head for other classes
            output_loading_info=True,
            **names,
        )
    except Exception as error:  # damaged files, other kinds of models: each fails in its own way
        raise ConfigError(
            f"model.path {path!r} cannot be loaded as a classifier: {in_short(error)}; give a "
            "folder written by save_pretrained or a checkpoint of evener"
        ) from error
    unlike = {name for name, *_ in found["mismatched_keys"]}
    new = frozenset(unlike | set(found["missing_keys"]))
    prefix = f"{model.base_model_prefix}."
    # Masked language models are saved without the pooler that a classifier puts on them.
    lost = [n for n in sorted(new) if n.startswith(prefix) and (n in unlike or ".pool" not in n)]
    if lost:
        raise ConfigError(
            f"model.path {path!r} holds no weights that fit {lost[0]!r}"
            + (f" and {len(lost) - 1} other parameters" if len(lost) > 1 else "")
            + f" of the {model.config.model_type} that its config.json describes; give a folder "
            "whose config.json and weights belong together"
        )
    return model, new


def _from_scratch(config: ModelConfig, names: Mapping[str, Any], encoder: TextEncoder) -> nn.Module:
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    check_type(config.type, known, "has no classifier in transformers")
    vocab_size, seq_len = encoder.tokenizer.vocab_size, encoder.seq_len
    keys = scratch_keys(config, vocab_size=vocab_size, max_position_embeddings=seq_len)
    with building(config, "classifier"):
        built = configure(config, {**keys, **names})
        make = partial(AutoModelForSequenceClassification.from_config, dtype=torch.float32)
        model: nn.Module = make(built)
        lacking = seq_len - _longest_text(model)
        if lacking > 0 and "max_position_embeddings" in keys.keys() - config.config.keys():
            built.max_position_embeddings += int(lacking)
            model = make(built)
    return model
