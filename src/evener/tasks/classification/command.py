"""``evener classify`` and ``evener.classify``: a text classifier on the whole team.

Their dependencies are imported when they are called, so that a public name is fast to import.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evener.config.folders import runs_of
from evener.config.keys import Keys
from evener.config.options import ClassifyOptions
from evener.config.presets import (
    find_demo_base,
    needs_demo_base,
    resolve_classify,
)
from evener.errors import ConfigError
from evener.tasks.run_results import ClassifyResult
from evener.team.child import loading_libraries
from evener.team.environment import DistributedTrainConfig
from evener.team.signals import StopSignals
from evener.team.terminal import answer, say


def run_classification(options: ClassifyOptions, environment: DistributedTrainConfig) -> int:
    """Run this rank's part of a classification run.

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


def classify(
    config: Keys = None,
    samples: Iterable[Any] | None = None,
    *,
    out: str | Path = "runs",
    resume: bool = False,
    quiet: bool = False,
) -> ClassifyResult:
    """Train a text classifier, as ``evener classify`` does; all ranks call it together.

    In a script that was started plainly there is one rank; ``evener launch``, torchrun or SLURM
    start one per device. On Ctrl-C, SIGTERM and SIGUSR1 a checkpoint is written and the call ends.

    Args:
        config: The keys of the run, or a YAML file with them; see ``docs/classification.md``.
        samples: Labelled texts instead of the file of ``data.path``, the same on every rank:
            instances of ``Sample``, or mappings with text and label under ``data.text_key`` and
            ``data.label_key``, such as the rows of a Hugging Face ``datasets.Dataset``.
        out: Folder of runs.
        resume: Continue from the newest complete checkpoint of the run's name.
        quiet: Print neither the team nor progress.

    Returns:
        The folders of the run and the adapter's metrics, the same on every rank.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    options = ClassifyOptions(
        config=config,
        has_samples=samples is not None,
        out=Path(out),
        resume=resume,
        quiet=quiet,
    )
    return _run(options, samples, StopSignals(), DistributedTrainConfig.from_env())


def predict_file(options: ClassifyOptions) -> int:
    """Classify the texts of a file with a finished run, and print a line of JSON for each.

    Args:
        options: ``predict`` is the file; name and folder identify the run.

    Returns:
        The exit code: 0.

    Raises:
        SystemExit: The reader of the output has ended; see ``answer``.
        UserError: There is no finished run of that name, or the file is malformed.
    """
    from evener.tasks.classification.labelled_data import read_records
    from evener.tasks.classification.pipeline import ClassifyPipeline

    config = resolve_classify(options)
    parent, name = options.out, str(config.name)
    finished = [run for run in runs_of(parent, name) if (run / "adapter").is_dir()]
    if not finished:
        raise ConfigError(
            f"no run {name!r} in {parent.absolute()} holds an adapter to predict with; train one "
            "first, or check --out and --name"
        )
    assert options.predict is not None
    records = read_records(options.predict, config.data, has_labels=False)
    pipeline = ClassifyPipeline.load(finished[0])
    if not options.quiet:
        say(f"classifying {len(records):,} texts with {finished[0]}")
    for prediction in pipeline.predict([record.text for record in records]):
        probability = prediction.probabilities[prediction.index]
        document = {"label": prediction.label, "index": prediction.index}
        answer(json.dumps({**document, "probability": round(probability, 6)}))
    return 0


def _run(
    options: ClassifyOptions,
    samples: Iterable[Any] | None,
    signals: StopSignals,
    environment: DistributedTrainConfig,
) -> ClassifyResult:
    config = resolve_classify(options)
    if needs_demo_base(config):
        base = find_demo_base(options.out)
        if base is None:
            raise ConfigError(
                "the default base model is that of the pretraining demo, which has not been run: "
                "run 'evener pretrain --demo' first, or name a model with model.path"
            )
        model = config.model.model_copy(update={"path": str(base)})
        config = config.model_copy(update={"model": model})
    with loading_libraries():  # torch, transformers
        from evener.tasks.classification.task import TextClassifier
        from evener.tasks.job import run_job

        task = TextClassifier(config, samples, quiet=environment.rank != 0)
    return task.result(run_job(task, config, options, signals, environment))
