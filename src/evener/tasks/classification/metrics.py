"""Metrics of predictions, and the best adapter of a run by them."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

Kind = Literal["frozen", "start", "probe", "best", "final"]


class Evaluation(BaseModel):
    """The metrics of classified texts.

    Attributes:
        loss: Mean cross-entropy by class weight, in nats; ``nan`` of no samples.
        confusion: Samples by true class (row) and predicted class (column).
    """

    model_config = ConfigDict(frozen=True)

    loss: float
    confusion: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        """Samples."""
        return sum(map(sum, self.confusion))

    @property
    def correct(self) -> int:
        """Correctly classified samples."""
        return int(np.trace(self.confusion))

    @property
    def accuracy(self) -> float:
        """Fraction of correctly classified samples."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def f1(self) -> tuple[float, ...]:
        """Harmonic mean of precision and recall for each class; 0 without a correct sample."""
        table = np.array(self.confusion)
        both = table.sum(0) + table.sum(1)
        return tuple((2 * table.diagonal() / np.maximum(both, 1)).tolist())

    @property
    def macro_f1(self) -> float:
        """Unweighted mean of ``f1`` over classes."""
        return sum(self.f1) / len(self.f1)

    @property
    def majority_accuracy(self) -> float:
        """Accuracy of the most frequent class as a constant answer."""
        return max(map(sum, self.confusion)) / self.total if self.total else float("nan")

    def score(self, metric: str) -> float:
        """Return the number by which evaluations are compared; higher is better."""
        if metric == "loss":
            return -self.loss
        return self.accuracy if metric == "accuracy" else self.macro_f1


class EvaluationHistory(BaseModel):
    """The evaluations of a run; the same on every rank that takes part.

    Attributes:
        begun: Whether everything before the first window is done.
        best_window: Windows before the best evaluation.
        last_window: Windows before the newest one.
        since_best: Evaluations since the best.
        known: Evaluations by kind. ``frozen``: of the base with a random head, before anything was
            trained. ``start``: the same if the base or an adapter brought a head. ``probe``: of the
            base with a head that was fitted to it, before the adapter was trained. ``best``: the
            best so far. ``final``: the same adapter on all held-out samples, if the others are of a
            part of them.
    """

    begun: bool = False
    best_window: int = -1
    last_window: int = -1
    since_best: int = 0
    known: dict[Kind, Evaluation] = {}

    @property
    def result(self) -> Evaluation | None:
        """The evaluation of the best adapter over the most samples."""
        return self.known.get("final", self.known.get("best"))

    def accuracy(self, kind: Kind) -> float | None:
        """Return the accuracy of an evaluation, if it was made."""
        return self.known[kind].accuracy if kind in self.known else None

    def add(self, window: int, evaluation: Evaluation, metric: str) -> bool:
        """Add an evaluation; return whether it is the best so far, by a metric."""
        self.last_window = window
        best = self.known.get("best")
        if best is None or evaluation.score(metric) > best.score(metric):
            self.known["best"], self.best_window, self.since_best = evaluation, window, 0
            self.known.pop("final", None)
            return True
        self.since_best += 1
        return False


def count_confusion(
    true: Sequence[int], predicted: Sequence[int], num_classes: int
) -> tuple[tuple[int, ...], ...]:
    """Count pairs of true and predicted class."""
    table = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(table, (list(true), list(predicted)), 1)
    return tuple(map(tuple, table.tolist()))
