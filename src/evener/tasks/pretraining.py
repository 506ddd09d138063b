"""``evener pretrain`` and ``evener.pretrain``: a causal language model on the whole team.

Their dependencies are imported when they are called, so that a public name is fast to import.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evener.config.keys import Allowed, Keys
from evener.config.options import PretrainOptions
from evener.errors import ConfigError
from evener.tasks.run_results import PretrainResult
from evener.team.child import loading_libraries
from evener.team.environment import DistributedTrainConfig
from evener.team.signals import StopSignals


def run_pretraining(options: PretrainOptions, environment: DistributedTrainConfig) -> int:
    """Run this rank's part of a pretraining run.

    Args:
        options: From the command line.
        environment: The rank's place.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the run, whichever rank it
        was sent to.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    signals = StopSignals()
    result = _run(options, None, signals, environment)
    return signals.exit_code(stopped=result.stopped)


def pretrain(
    config: Keys = None,
    dataset: Iterable[Any] | None = None,
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow: Sequence[Allowed] = (),
    quiet: bool = False,
) -> PretrainResult:
    """Pretrain a causal language model, as ``evener pretrain`` does; all ranks call it together.

    In a script that was started plainly there is one rank; ``evener launch``, torchrun or SLURM
    start one per device. On Ctrl-C, SIGTERM and SIGUSR1 a checkpoint is written and the call ends.

    Args:
        config: The keys of the run, or a YAML file with them; see ``docs/pretraining.md``.
        dataset: Documents instead of the files of ``data.path``: texts, or mappings with the text
            under ``data.text_key``, such as a Hugging Face ``datasets.Dataset``. It is read more
            than once, in the same order; the same on every rank.
        out: Folder of runs.
        resume: Continue from the newest complete checkpoint of the run's name.
        allow: What may differ from that checkpoint's run: ``"data"``, ``"precision"``.
        quiet: Print neither the team nor progress.

    Returns:
        The folders of the run and its held-out loss, the same on every rank.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    options = PretrainOptions(
        config=config,
        out=Path(out),
        resume=resume,
        allow=tuple(allow),
        quiet=quiet,
    )
    return _run(options, dataset, StopSignals(), DistributedTrainConfig.from_env())


def _run(
    options: PretrainOptions,
    records: Iterable[Any] | None,
    signals: StopSignals,
    environment: DistributedTrainConfig,
) -> PretrainResult:
    from evener.config.presets import resolve_config

    config = resolve_config(options)
    if records is not None and config.data.paths:
        raise ConfigError(
            f"data.path is {config.data.path!r}, but a data set is given as well; leave one of "
            "them out"
        )
    with loading_libraries():  # torch, transformers
        from evener.tasks.causal_lm import CausalLanguageModel
        from evener.tasks.job import run_job

        task = CausalLanguageModel(config, options, records)
    return PretrainResult(**asdict(run_job(task, config, options, signals, environment)))
