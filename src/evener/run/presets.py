"""Turns what the user typed into a checked configuration; the demo's configuration lives here."""

from collections.abc import Mapping
from typing import Any

from evener.errors import ConfigError
from evener.run.config import RunConfig, load_run_config
from evener.run.options import PretrainOptions

#: Ranks of the demo, and how much slower the second one is.
DEMO_NPROC = 2
DEMO_EMULATE_SLOW = ("1:3",)

#: A small Llama on the Python standard library's own sources: under a minute on two cores.
DEMO: Mapping[str, Any] = {
    "name": "demo",
    "batch_size": 32,
    "micro_batch_size": 8,
    "max_steps": 60,
    "data": {"seq_len": 128},
    "optimizer": {"lr": 3e-3, "warmup": 0.1},
    "eval": {"every": 30, "max_sequences": 64},
    "checkpoint": {"every": 30, "keep_last": 2},
    "measure": True,
}


def resolve_config(options: PretrainOptions) -> RunConfig:
    """The configuration of a run: the demo's, a YAML file's or the defaults, then ``--set``.

    Raises:
        ConfigError: See ``load_run_config``; or a file together with ``--demo``.
    """
    if options.demo and options.config is not None:
        raise ConfigError(
            f"--demo brings its own configuration, so it takes no file (got {options.config}); "
            "leave one of them out"
        )
    base = DEMO if options.demo else None
    return load_run_config(options.config, options.overrides, base=base)
