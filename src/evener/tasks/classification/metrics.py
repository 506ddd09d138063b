"""What predictions are worth: accuracy, F1, and which class is taken for which. Plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evener.parsing import Fields, short, whole

Confusion = tuple[tuple[int, ...], ...]
"""Row: the true class. Column: the predicted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How well labelled texts are classified.

    Attributes:
        loss: Mean cross-entropy by class weight, in nats.
        confusion: Samples by true class (row) and predicted class (column).
    """

    loss: float
    confusion: Confusion

    @property
    def total(self) -> int:
        """Samples."""
        return sum(map(sum, self.confusion))

    @property
    def correct(self) -> int:
        """Samples whose class was found."""
        return sum(row[i] for i, row in enumerate(self.confusion))

    @property
    def accuracy(self) -> float:
        """Part of the samples whose class was found."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def f1(self) -> tuple[float, ...]:
        """Harmonic mean of precision and recall for each class; 0 where a class was never hit."""
        table = np.array(self.confusion)
        both = table.sum(0) + table.sum(1)
        return tuple((2 * table.diagonal() / np.maximum(both, 1)).tolist())

    @property
    def macro_f1(self) -> float:
        """Mean of ``f1`` over classes, each counting the same."""
        return sum(self.f1) / len(self.f1)

    @property
    def majority_accuracy(self) -> float:
        """The best that a constant answer could do on these samples."""
        return max(map(sum, self.confusion)) / self.total if self.total else float("nan")

    def score(self, metric: str) -> float:
        """Return the number that decides which of two is better: the higher one."""
        if metric == "loss":
            return -self.loss
        return self.accuracy if metric == "accuracy" else self.macro_f1

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {"loss": self.loss, "confusion": [list(row) for row in self.confusion]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Evaluation":
        """Inverse of ``to_json``.

        Raises:
            ValueError: It is not from there.
        """
        fields = Fields(document)
        rows = fields.items("confusion")
        if not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
            raise ValueError(f"confusion is {short(rows)}, not a row and a column for each class")
        loss = fields["loss"]  # of no samples it is not a number
        return cls(
            loss=loss if isinstance(loss, float) else fields.number("loss"),
            confusion=tuple(tuple(whole(n, "a count of confusion") for n in row) for row in rows),
        )


def count_confusion(true: Sequence[int], predicted: Sequence[int], num_classes: int) -> Confusion:
    """Count pairs of true and predicted class."""
    table = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(table, (list(true), list(predicted)), 1)
    return tuple(map(tuple, table.tolist()))
