"""Configurations as callers may give them: as objects, or as their keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.config.classify import ClassifyConfig, ClassifyModelConfig
from evener.config.loading import load_config
from evener.config.runs import ModelConfig
from evener.errors import ConfigError
from evener.tasks.classification.samples import LabelSet

GivenModel = ModelConfig | Mapping[str, Any] | str | Path
"""A base: a local folder, keys such as ``{"type": "bert", "config": {...}}``, or an object."""


def model_config_of(given: GivenModel) -> ModelConfig:
    """The configuration of a base.

    Raises:
        ConfigError: An unknown key, or a bad value.
    """
    if isinstance(given, ModelConfig):
        return given
    if isinstance(given, str | Path):
        return ClassifyModelConfig(path=str(given))
    return load_config(ClassifyModelConfig, None, base=given)


def classify_config_of(given: ClassifyConfig | Mapping[str, Any]) -> ClassifyConfig:
    """What is trained, and how.

    Raises:
        ConfigError: An unknown key, or a bad value.
    """
    if isinstance(given, ClassifyConfig):
        return given
    return load_config(ClassifyConfig, None, base=given)


def labels_of(config: ClassifyConfig) -> LabelSet:
    """The classes that a configuration names.

    Raises:
        ConfigError: It names none, and there is no data to take them from.
    """
    if config.labels is None:
        raise ConfigError("ClassifyConfig.labels is missing; name the classes in order")
    return LabelSet(config.labels)
