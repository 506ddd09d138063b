"""What a run knows of its evaluations: which adapter is the best, and for how long."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from evener.parsing import Fields
from evener.tasks.classification.metrics import Evaluation

_KINDS = ("frozen", "start", "probe", "best", "final")


@dataclass(kw_only=True)
class EvaluationHistory:
    """The evaluations of a run; the same on every rank that takes part.

    Attributes:
        begun: Whether all that comes before the first window is done.
        best_window: Windows before the best evaluation.
        last_window: Windows before the newest one.
        since_best: Evaluations since the best.
        known: Evaluations by kind. ``frozen``: of the base with a random head, before anything was
            trained. ``start``: the same where the head was not random, as the base or an adapter
            brought it. ``probe``: of the base with a head that was fitted to it, before the adapter
            was trained. ``best``: the best so far. ``final``: the same adapter on all held-out
            samples, where the others are of a part of them.
    """

    begun: bool = False
    best_window: int = -1
    last_window: int = -1
    since_best: int = 0
    known: dict[str, Evaluation] = field(default_factory=dict)

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far."""
        return self.known.get("best")

    @property
    def result(self) -> Evaluation | None:
        """What is known best of the best adapter."""
        return self.known.get("final", self.best)

    def note(self, kind: str, evaluation: Evaluation) -> None:
        """Keep an evaluation from before the first window."""
        self.known[kind] = evaluation

    def add(self, window: int, evaluation: Evaluation, metric: str) -> bool:
        """Take an evaluation; return whether it is the best so far, by a metric."""
        self.last_window = window
        if self.best is None or evaluation.score(metric) > self.best.score(metric):
            self.known["best"], self.best_window, self.since_best = evaluation, window, 0
            self.known.pop("final", None)
            return True
        self.since_best += 1
        return False

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        known = {kind: evaluation.to_json() for kind, evaluation in self.known.items()}
        document = {**asdict(self), **dict.fromkeys(_KINDS), **known}
        del document["known"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``.

        Raises:
            ValueError: It is damaged.
        """
        fields = Fields(dict(document))
        known = {kind: fields[kind] for kind in _KINDS}
        return cls(
            begun=fields.flag("begun"),
            best_window=fields.whole("best_window", least=-1),
            last_window=fields.whole("last_window", least=-1),
            since_best=fields.whole("since_best"),
            known={k: Evaluation.from_json(d) for k, d in known.items() if d is not None},
        )
