"""Results of the driver's runs; the same on every rank."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The result of a run; the same on every rank.

    Attributes:
        run_folder: Events, summary, checkpoints.
        checkpoint: The last one; ``resume=True`` continues from it.
        heldout_loss: Mean held-out loss per unit of weight, in nats for cross-entropy; ``None``
            if it was not evaluated after the last step.
        stopped: A signal ended the run early; ``resume=True`` continues it.
    """

    run_folder: Path
    checkpoint: Path
    heldout_loss: float | None
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainResult(TaskResult):
    """The result of ``pretrain``.

    ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load the
    checkpoint. The held-out loss is the mean cross-entropy per held-out token, in nats.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyResult(TaskResult):
    """The result of ``classify``, with the metrics of the best adapter.

    The held-out loss is its mean cross-entropy per held-out sample in nats, weighted by class.

    Attributes:
        adapter: The best adapter and its head; ``ClassifyPipeline.load(run_folder)`` and peft load
            it. ``None`` without an evaluation.
        merged: Base and adapter in one; ``AutoModelForSequenceClassification.from_pretrained``
            loads it.
        labels: The classes, by index.
        accuracy: Fraction of the held-out samples that the best adapter classifies correctly.
        macro_f1: Its F1, averaged over the classes.
    """

    adapter: Path | None
    merged: Path | None
    labels: tuple[str, ...]
    accuracy: float | None
    macro_f1: float | None
