"""Turns what the user of ``evener classify`` typed into a checked configuration. No torch here."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evener.config.classify import ClassifyRunConfig
from evener.config.folders import CHECKPOINTS, check_name, check_resumable, runs_of
from evener.config.loading import load_config
from evener.config.options import ClassifyOptions
from evener.config.pretrain_presets import DEMO, check_surroundings
from evener.errors import ConfigError

#: Ranks where nothing is said at all: as many as small machines have cores.
DEFAULT_NPROC = 2

#: Functions of the standard library by package, on the demo's model: some minutes on two cores.
DEFAULT: Mapping[str, Any] = {
    "name": "classify",
    "batch_size": 16,
    "micro_batch_size": 8,
    "epochs": 6,
    "seq_len": DEMO["data"]["seq_len"],
    "end_tokens": 4,
    "precision": "fp32",
    "lora": {"rank": 16, "alpha": 64.0, "dropout": 0.05},
    "optimizer": {"lr": 5e-4},
    "data": {"heldout_fraction": 0.25},
    "eval": {"every": 180},
    "checkpoint": {"every": 360, "keep_last": 2},
}


def resolve_classify(options: ClassifyOptions, *, holds_runs: bool = True) -> ClassifyRunConfig:
    """The configuration of a run: a YAML file's, given keys or the default, then ``--set``.

    Returns:
        The configuration, its name chosen: ``--name``, else the key, else that of the file.

    Raises:
        ConfigError: See ``load_config``; a bad name; no model for data of one's own; a file of
            samples beside given ones.
        DataError: Something that the configuration points to does not exist.
        CheckpointError: There is no run to resume.
    """
    base = options.keys
    if options.config is None and options.keys is None and not options.has_samples:
        base = DEFAULT
    config = load_config(ClassifyRunConfig, options.config, options.overrides, base=base)
    name = options.run_name(config.name, "classify")
    check_name(name)
    if options.has_samples and config.data.path is not None:
        raise ConfigError(
            f"data.path is {config.data.path!r}, but samples are given as well; leave one of them "
            "out"
        )
    own_data = options.has_samples or not needs_demo_base(config)
    if own_data and "model" not in config.model_fields_set:
        raise ConfigError(
            "model.path is missing: name the local folder of the base model, or give model.type "
            "(and model.config) to start from random weights"
        )
    _check_packages()
    # A saved classifier needs no files but its own.
    places = _places(config) if options.predict is None else {}
    check_surroundings(places.items(), tensorboard=config.tensorboard)
    if options.resume and holds_runs:
        check_resumable(options.parent, name)
    return config.model_copy(update={"name": name})


def needs_demo_base(config: ClassifyRunConfig) -> bool:
    """Whether the base is the model of the pretraining demo: no model and no data were named."""
    return "model" not in config.model_fields_set and config.data.path is None


def find_demo_base(parent: Path) -> Path | None:
    """The newest checkpoint of the pretraining demo, if it has been run."""
    for folder in runs_of(parent, str(DEMO["name"])):
        found = [
            (int(path.parent.name.removeprefix("step-")), path.parent)
            for path in (folder / CHECKPOINTS).glob("step-*/manifest.json")
            if path.parent.name.removeprefix("step-").isdecimal()
        ]
        if found:
            return max(found)[1]
    return None


def demo_arguments(parent: Path, *, quiet: bool) -> list[str]:
    """The command that trains the demo's model into ``parent``."""
    arguments = ["pretrain", "--demo", "--set", "measure=false", "--out", str(parent)]
    return [*arguments, "--quiet"] if quiet else arguments


def model_override(base: Path | None) -> str:
    """The ``--set`` that names a base.

    Raises:
        ConfigError: The demo was run and has left no checkpoint.
    """
    if base is None:
        raise ConfigError("the demo has left no checkpoint; name a base model with model.path")
    return f"model.path={json.dumps(str(base))}"


def _places(config: ClassifyRunConfig) -> dict[str, str | None]:
    return {
        "data.path": config.data.path,
        "data.heldout_path": config.data.heldout_path,
        "data.tokenizer": config.data.tokenizer,
        "model.path": config.model.path,
        "model.adapter": config.model.adapter,
    }


def _check_packages() -> None:
    for package in ("transformers", "peft", "sklearn"):
        if find_spec(package) is None:
            raise ConfigError(
                f"classification needs {package}, which is missing: pip install 'evener[hf]'"
            )
