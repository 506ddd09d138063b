"""Turns what the user typed into a checked configuration; the demo's configuration lives here."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evener.config.folders import check_name, check_resumable
from evener.config.options import ALLOWED, PretrainOptions
from evener.config.pretrain import BPE, RunConfig, load_run_config
from evener.errors import ConfigError, DataError

#: Ranks of the demo, and how much slower the second one is.
DEMO_NPROC = 2
DEMO_EMULATE_SLOW = ("1:3",)

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
    "measure": True,
}


def resolve_config(options: PretrainOptions, *, holds_runs: bool = True) -> RunConfig:
    """The configuration of a run: the demo's, a YAML file's or the defaults, then ``--set``.

    What can be known to be wrong without torch is found here, before any rank starts.

    Args:
        options: What the user typed.
        holds_runs: Whether the run to resume must be on this machine. Ranks on other machines than
            rank 0's find out together, so that all of them say so.

    Returns:
        The configuration, its name chosen: ``--name``, else the key, else that of the file.

    Raises:
        ConfigError: See ``load_run_config``; a file together with ``--demo``; a bad name;
            ``--allow`` without ``--resume``.
        DataError: Something that the configuration points to does not exist.
        CheckpointError: There is no run to resume.
    """
    if options.demo and options.config is not None:
        raise ConfigError(
            f"--demo brings its own configuration, so it takes no file (got {options.config}); "
            "leave one of them out"
        )
    base = DEMO if options.demo else options.keys
    config = load_run_config(options.config, options.overrides, base=base)
    for what in options.allow:
        if what not in ALLOWED:
            raise ConfigError(f"--allow {what}: choose from {', '.join(ALLOWED)}")
    if options.allow and not options.resume:
        raise ConfigError(
            f"--allow {options.allow[0]} says what may differ from the checkpoint, but nothing is "
            "resumed; add --resume, or leave it out"
        )
    name = options.run_name(config.name, "pretrain")
    check_name(name)
    check_surroundings(_places(config), tensorboard=config.tensorboard)
    if options.resume and holds_runs:
        check_resumable(options.parent, name)
    return config.model_copy(update={"name": name})


def _places(config: RunConfig) -> list[tuple[str, str | None]]:
    places: list[tuple[str, str | None]] = [("data.path", path) for path in config.data.paths]
    if config.data.tokenizer == BPE and Path(BPE).is_dir():
        raise ConfigError(
            f"data.tokenizer is {BPE!r}, which trains a tokenizer, but there is a folder of that "
            f"name as well; write ./{BPE} for the folder, or rename it"
        )
    if config.data.tokenizer != BPE:
        places.append(("data.tokenizer", config.data.tokenizer))
    return [*places, ("model.path", config.model.path)]


def check_surroundings(places: Iterable[tuple[str, str | None]], *, tensorboard: bool) -> None:
    """Refuse a configuration for which something is missing on this machine.

    Args:
        places: Keys and the paths that they name.
        tensorboard: Whether files for TensorBoard are to be written.

    Raises:
        ConfigError: The package tensorboard is missing.
        DataError: A path does not exist.
    """
    for key, path in places:
        if path is not None and not Path(path).expanduser().exists():
            raise DataError(
                f"{key} is {path!r}, which does not exist: check the path (relative ones start at "
                f"{Path.cwd()}); evener downloads nothing"
            )
    if tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard is true, but the package tensorboard is missing: pip install "
            "'evener[tensorboard]', or leave the key out"
        )
