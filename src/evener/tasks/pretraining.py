"""``evener pretrain`` and ``evener.pretrain``: a causal language model on the whole team.

What they need comes in when they are called: a public name is cheap to import.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.config.options import Allowed, Keys, PretrainOptions, file_or_keys
from evener.errors import ConfigError
from evener.team.child import loading_libraries
from evener.team.signals import StopSignals
from evener.team.terminal import warn

if TYPE_CHECKING:
    import torch

    from evener.config.pretrain import RunConfig
    from evener.tasks.text_data import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainResult:
    """What ``pretrain`` has come to; the same on every rank.

    Attributes:
        run_folder: Events, summary, checkpoints.
        checkpoint: The last one; ``AutoModelForCausalLM.from_pretrained`` and
            ``AutoTokenizer.from_pretrained`` load it.
        heldout_loss: Mean cross-entropy per held-out token in nats; ``None`` where it was not
            evaluated after the last step.
        stopped: A signal ended the run early; ``resume=True`` goes on.
    """

    run_folder: Path
    checkpoint: Path
    heldout_loss: float | None
    stopped: bool


def run_pretraining(options: PretrainOptions) -> int:
    """Runs this rank's part of a pretraining run.

    Args:
        options: From the command line; the rank's place comes from the environment.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    signals = StopSignals()
    _run(options, None, signals)
    return signals.exit_code


def pretrain(
    config: Keys = None,
    dataset: Iterable[Any] | None = None,
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow: Sequence[Allowed] = (),
    quiet: bool = False,
) -> PretrainResult:
    """Pretrains a causal language model, as ``evener pretrain`` does; all ranks call it together.

    In a script that was started plainly there is one rank; ``evener launch``, torchrun or SLURM
    start one per device. Ctrl-C, SIGTERM and SIGUSR1 leave a checkpoint and end the call.

    Args:
        config: The keys of the run, or a YAML file that holds them; see ``docs/pretraining.md``.
        dataset: Documents instead of the files of ``data.path``: texts, or mappings with the text
            under ``data.text_key``, such as a Hugging Face ``datasets.Dataset``. It is iterated
            over more than once, in the same order; the same on every rank.
        out: Folder that runs go to.
        resume: Go on from the newest complete checkpoint of the run's name.
        allow: What may differ from that checkpoint's run: ``"data"``, ``"precision"``.
        quiet: Print neither the team nor progress.

    Returns:
        Where the model is and how good it is, the same on every rank.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    options = PretrainOptions(
        **file_or_keys(config),
        out=Path(out),
        resume=resume,
        allow=tuple(allow),
        quiet=quiet,
    )
    return _run(options, dataset, StopSignals())


def _run(
    options: PretrainOptions, records: Iterable[Any] | None, signals: StopSignals
) -> PretrainResult:
    from evener.config.pretrain_presets import resolve_config
    from evener.team.environment import DistributedTrainConfig

    environment = DistributedTrainConfig.from_env()
    config = resolve_config(options, holds_runs=environment.rank < environment.local_world_size)
    if records is not None and config.data.paths:
        raise ConfigError(
            f"data.path is {config.data.path!r}, but a data set is given as well; leave one of "
            "them out"
        )
    with loading_libraries():
        import torch

        from evener.engine.emulate import parse_emulation
        from evener.tasks.causal_lm import PretrainingRun
        from evener.tasks.optimization import TokenSchedule
        from evener.tasks.text_data import choose_vocabulary
        from evener.tasks.trainers.transformer import TransformerTrainer

    if config.idle_options and environment.rank == 0:
        warn(f"{', '.join(config.idle_options)}: no effect with policy 'sync'")
    slow = parse_emulation(options.emulate_slow, environment.world_size)
    torch.manual_seed(config.seed)
    with loading_libraries():  # transformers
        vocabulary = choose_vocabulary(config.data)
        model = _build_model(config, vocabulary)
    schedule = TokenSchedule(config.optimizer)
    trainer = TransformerTrainer(
        model,
        config.optimizer,
        schedule=schedule,
        max_steps=config.max_steps,
        max_grad_norm=config.max_grad_norm,
    )
    ddp = trainer.join_team(
        policy=config.policy,
        backend=config.backend,
        devices=config.devices,
        precision=config.precision,
        config=config.ddp_config(
            emulate_slow=slow,
            stop_when=lambda: signals.requested is not None,
            quiet=options.quiet,
        ),
        environment=environment,
    )
    # Only now: until here there is nothing to save, and a signal ends the process at once.
    with signals, ddp:
        run = PretrainingRun(config, options, trainer, vocabulary.tokenizer, records, schedule)
        return run.go()


def _build_model(config: "RunConfig", vocabulary: "Vocabulary") -> "torch.nn.Module":
    from evener.tasks.language_model import build_model, vocabulary_size
    from evener.tasks.tokenizer import check_vocabulary

    model = build_model(
        config.model,
        vocab_size=vocabulary.size,
        seq_len=config.data.seq_len,
        eos_id=vocabulary.eos_id,
    )
    check_vocabulary(vocabulary.size, vocabulary_size(model))
    return model
