"""Turn what the user typed into a checked configuration; the keys of the demos. No torch."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from evener.config.folders import CHECKPOINTS, check_name, runs_of
from evener.config.keys import ALLOWED
from evener.config.loading import load_config
from evener.config.options import ClassifyOptions, PretrainOptions, TaskOptions
from evener.config.runs import BPE, ClassifyRunConfig, JobConfig, RunConfig
from evener.errors import ConfigError, DataError
from evener.files import explaining

_Config = TypeVar("_Config", bound=JobConfig)
_Places = Mapping[str, str | Sequence[str] | None]

#: A small Llama on the Python standard library's own sources: under a minute on two cores.
DEMO: Mapping[str, Any] = {
    "name": "demo",
    "batch_size": 16,
    "micro_batch_size": 8,
    "max_steps": 200,
    "data": {"seq_len": 128},
    "optimizer": {"lr": 1e-2, "warmup": 0.1},
    "eval": {"every": 50, "max_sequences": 64},
    "checkpoint": {"every": 100, "keep_last": 2},
}

#: Changes without policy "sync". Each of the two ranks makes as many steps as the team, with half
#: of its batch. With whole batches a rank would make half as many steps, which raises the loss more
#: than local steps do. Smaller batches need a lower learning rate.
DEMO_LOCAL: Mapping[str, Any] = {
    **DEMO,
    "batch_size": 8,
    "max_steps": 400,
    "anchor": 4,
    "optimizer": {"lr": 5e-3, "warmup": 0.1},
}

#: Classifies names of the standard library, with the demo's model: one minute on two cores.
CLASSIFY_DEMO: Mapping[str, Any] = {
    "name": "classify",
    "batch_size": 32,
    "micro_batch_size": 16,
    "epochs": 2,
    "seq_len": 32,
    "end_tokens": 4,
    "precision": "fp32",
    "lora": {"rank": 16, "alpha": 64.0, "dropout": 0.05, "target_modules": "all-linear"},
    "optimizer": {"lr": 2e-3},
    "eval": {"every": 200},
    "checkpoint": {"every": 400, "keep_last": 2},
}


def resolve_config(options: PretrainOptions) -> RunConfig:
    """Return the configuration of a run: the demo's, a YAML file's or the defaults, then ``--set``.

    Errors that can be found without torch are raised here, before any rank starts.

    Args:
        options: What the user typed.

    Returns:
        The configuration, its name chosen: ``--name``, else the key, else that of the file.

    Raises:
        ConfigError: See ``load_config``; a file together with ``--demo``; a bad name; ``--allow``
            without ``--resume``; a missing package.
        DataError: Something that the configuration points to does not exist.
        CheckpointError: There is no run to resume.
    """
    if options.demo and options.config is not None:
        raise ConfigError(
            f"--demo brings its own configuration, so it takes no file (got {options.config}); "
            "leave one of them out"
        )
    _require("transformers")
    config = load_config(RunConfig, DEMO if options.demo else options.config, options.overrides)
    if options.demo and config.policy != "sync":
        config = load_config(RunConfig, DEMO_LOCAL, options.overrides)
    for what in options.allow:
        if what not in ALLOWED:
            raise ConfigError(f"--allow {what}: choose from {', '.join(ALLOWED)}")
    if options.allow and not options.resume:
        raise ConfigError(
            f"--allow {options.allow[0]} has an effect only with --resume; add --resume, or leave "
            "it out"
        )
    tokenizer = config.data.tokenizer
    places: _Places = {
        "data.path": config.data.paths,
        "data.tokenizer": None if tokenizer == BPE else tokenizer,
        "model.path": config.model.path,
    }
    return _settle(config, options, places, "pretrain")


def resolve_classify(options: ClassifyOptions) -> ClassifyRunConfig:
    """Return the configuration of a run: a YAML file's, given keys or the demo, then ``--set``.

    Args:
        options: What the user typed.

    Raises:
        ConfigError: See ``load_config``; a bad name; own data without a model; a file of samples
            beside given ones; a missing package.
        DataError: Something that the configuration points to does not exist.
        CheckpointError: There is no run to resume.
    """
    given = CLASSIFY_DEMO if options.config is None and not options.has_samples else options.config
    config = load_config(ClassifyRunConfig, given, options.overrides)
    if options.has_samples and config.data.path is not None:
        raise ConfigError(
            f"data.path is {config.data.path!r}, but samples are given as well; leave one of them "
            "out"
        )
    if "model" not in config.model_fields_set and (
        options.has_samples or config.data.path is not None
    ):
        raise ConfigError(
            "model.path is missing: name the local folder of the base model, or give model.type "
            "(and model.config) to start from random weights"
        )
    _require("transformers", "peft", "sklearn")
    places: _Places = {
        "data.path": config.data.path,
        "data.heldout_path": config.data.heldout_path,
        "data.tokenizer": config.data.tokenizer,
        "model.path": config.model.path,
        "model.adapter": config.model.adapter,
    }
    if options.predict is not None:
        places = {}  # a saved classifier needs no files but its own
    return _settle(config, options, places, "classify")


def resolve_job(options: TaskOptions, default: str) -> JobConfig:
    """Return the configuration of a run of the user's own task; see ``resolve_config``.

    Args:
        options: What the user gave.
        default: Name of the run if neither the keys nor a file name it.
    """
    return _settle(load_config(JobConfig, options.config, options.overrides), options, {}, default)


def needs_demo_base(config: ClassifyRunConfig) -> bool:
    """Return whether the demo's base model is used: neither model nor data were given."""
    return "model" not in config.model_fields_set and config.data.path is None


def find_demo_base(parent: Path) -> Path | None:
    """Return the newest checkpoint of the pretraining demo, if there is one."""
    for folder in runs_of(parent, str(DEMO["name"])):
        steps = {
            int(number): manifest.parent
            for manifest in (folder / CHECKPOINTS).glob("step-*/manifest.json")
            if (number := manifest.parent.name.removeprefix("step-")).isdecimal()
        }
        if steps:
            return steps[max(steps)]
    return None


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(f"{package} is needed and missing: pip install 'evener[hf]'")


def _settle(config: _Config, options: TaskOptions, places: _Places, default: str) -> _Config:
    """Check the files and packages that a run needs, and choose its name."""
    stem = Path(options.config).stem if isinstance(options.config, str | Path) else default
    name = (config.name or stem) if options.name is None else options.name
    check_name(name)
    for key, paths in places.items():
        for path in [paths] if isinstance(paths, str) else paths or ():
            with explaining(f"{key} {path}", "give this user access to it", DataError):
                is_there = Path(path).expanduser().exists()
            if not is_there:
                raise DataError(
                    f"{key} is {path!r}, which does not exist: check the path (relative ones start "
                    f"at {Path.cwd()}); evener downloads nothing"
                )
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard is true, but the package tensorboard is missing: pip install "
            "'evener[tensorboard]', or leave the key out"
        )
    return config.model_copy(update={"name": name})
