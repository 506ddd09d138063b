"""The frozen base of a classifier, with a head for the classes and room for an adapter."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.checkpoint import find_newest
from evener.errors import ConfigError
from evener.run.config.folders import CHECKPOINTS
from evener.run.config.pretrain import ModelConfig
from evener.tasks.classification.encoding import TextEncoder
from evener.tasks.language_model import (
    SMALL_LLAMA,
    in_short,
    quiet,
    refuse_unknown_keys,
    with_given_keys,
)

_HASHED_ELEMENTS = 4096
"""Of each tensor so many, evenly spread, go into a fingerprint: enough to tell models apart."""


def base_folder(path: str) -> Path:
    """The folder that holds a base model: the one named, or a run's newest checkpoint in it.

    Raises:
        ConfigError: Neither has a ``config.json``.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    newest = find_newest(folder / CHECKPOINTS)
    if newest is not None and (newest.path / "config.json").is_file():
        return newest.path
    raise ConfigError(
        f"model.path is {path!r}, which has no config.json; give a folder written by "
        "save_pretrained, or a checkpoint or run folder of evener"
    )


def build_base(
    config: ModelConfig, labels: Sequence[str], encoder: TextEncoder
) -> tuple[nn.Module, dict[str, float]]:
    """Makes a base model with a new head, in float32 on the CPU, without dropout.

    What is frozen is not dropped out: only the adapter is regularised, and a replica's random
    numbers come from one place. A new head depends on torch's random generator.

    Args:
        config: A local folder, or a transformers model type with configuration keys.
        labels: Names of the classes.
        encoder: Makes the model's input.

    Returns:
        The model, and the dropout rates that were switched off, by configuration key.

    Raises:
        ConfigError: An unknown type, a bad key, a folder without a model, a model that is too
            short or has too few embeddings.
    """
    names = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
        "pad_token_id": encoder.pad_id,
    }
    with quiet():
        model = _load(config.path, names) if config.path else _from_scratch(config, names, encoder)
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if encoder.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {encoder.vocab_size} ids, the model only {rows} embeddings: use "
            "the tokenizer that the model was made with"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and longest < encoder.seq_len:
        raise ConfigError(
            f"seq_len is {encoder.seq_len}, but the base model takes at most {longest} tokens; "
            "lower seq_len"
        )
    rates = _dropout_rates(model.config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return model.eval(), rates


def fingerprint(model: nn.Module) -> str:
    """Hash of a base's parameters but for the head: their names, shapes and a sample of values."""
    hasher = hashlib.blake2b(digest_size=16)
    backbone = model.base_model
    assert isinstance(backbone, nn.Module)
    for name, parameter in sorted(backbone.named_parameters()):
        hasher.update(f"{name} {tuple(parameter.shape)} ".encode())
        flat = parameter.detach().reshape(-1)
        step = -(-flat.numel() // _HASHED_ELEMENTS) or 1
        hasher.update(flat[::step].float().cpu().contiguous().numpy().data)
    return hasher.hexdigest()


def _load(path: str, names: Mapping[str, Any]) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    folder = base_folder(path)
    try:
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # a head for other classes
            **names,
        )
    except Exception as error:  # damaged files, other kinds of models: each fails in its own way
        raise ConfigError(
            f"model.path {path!r} cannot be loaded as a classifier: {in_short(error)}; give a "
            "folder written by save_pretrained or a checkpoint of evener"
        ) from error
    return model


def _from_scratch(config: ModelConfig, names: Mapping[str, Any], encoder: TextEncoder) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    _check_type(config.type)
    keys = dict(SMALL_LLAMA) if config.type == "llama" and not config.config else {}
    keys |= {"vocab_size": encoder.vocab_size, "max_position_embeddings": encoder.seq_len}
    keys = with_given_keys(keys, config)
    try:
        built = AutoConfig.for_model(config.type, **keys, **names)
        refuse_unknown_keys(config, built)
        model: nn.Module = AutoModelForSequenceClassification.from_config(
            built, dtype=torch.float32
        )
    except ConfigError:
        raise
    except Exception as error:  # whatever the architecture makes of numbers that do not fit
        raise ConfigError(
            f"no classifier can be built from model.type={config.type!r} and "
            f"model.config={dict(config.config)}: {in_short(error)}"
        ) from error
    return model


def _check_type(name: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, cutoff=0.5)
        raise ConfigError(
            f"model.type {name!r} has no classifier in transformers; give such as "
            f"{', '.join(close or ('llama', 'bert', 'qwen3'))}"
        )


def _dropout_rates(config: Any) -> dict[str, float]:
    """Rates above 0 in a configuration, for whoever loads the saved model."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if ("dropout" in key or key.endswith(("_pdrop", "drop_rate")))
        and isinstance(value, float)
        and value > 0
    }
