"""What a run knows of its evaluations: which adapter is the best, and whether to go on."""

from collections.abc import Mapping
from typing import Any

from evener.config.classify import ClassifyEvalConfig
from evener.parsing import Fields
from evener.tasks.classification.metrics import Evaluation

_KINDS = ("frozen", "start", "probe", "best")


class EvaluationHistory:
    """The evaluations of a run; the same on every rank that takes part.

    Args:
        settings: Which number decides, and how long to wait for a better one.

    Attributes:
        begun: Whether all that comes before the first window is done.
        known: Evaluations by kind. ``frozen``: of the base with a random head, before anything was
            trained. ``start``: the same where the head was not random, as the base or an adapter
            brought it. ``probe``: of the base with a head that was fitted to it, before the adapter
            was trained. ``best``: the best so far.
        best_window: Windows before the best one.
        last_window: Windows before the newest one.
        since_best: Evaluations since the best.
    """

    def __init__(self, settings: ClassifyEvalConfig) -> None:
        self._settings = settings
        self.begun = False
        self.known: dict[str, Evaluation] = {}
        self.best_window = -1
        self.last_window = -1
        self.since_best = 0

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far."""
        return self.known.get("best")

    def note(self, kind: str, evaluation: Evaluation) -> None:
        """Keep an evaluation from before the first window."""
        self.known[kind] = evaluation

    def begin(self) -> None:
        """Note that all that comes before the first window is done."""
        self.begun = True

    def add(self, window: int, evaluation: Evaluation) -> bool:
        """Take an evaluation; return whether it is the best so far."""
        metric, best = self._settings.metric, self.best
        self.last_window = window
        if best is None or evaluation.score(metric) > best.score(metric):
            self.known["best"], self.best_window, self.since_best = evaluation, window, 0
            return True
        self.since_best += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether so many evaluations brought nothing better that the run shall end."""
        patience = self._settings.patience
        return bool(patience) and self.since_best >= patience

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        known = {kind: evaluation.to_json() for kind, evaluation in self.known.items()}
        return {
            "begun": self.begun,
            **{kind: known.get(kind) for kind in _KINDS},
            "best_window": self.best_window,
            "last_window": self.last_window,
            "since_best": self.since_best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``.

        Raises:
            ValueError: It is damaged.
        """
        fields = Fields(dict(state))
        self.begun = fields.flag("begun")
        documents = {kind: fields[kind] for kind in _KINDS}
        self.known = {k: Evaluation.from_json(d) for k, d in documents.items() if d is not None}
        self.best_window = fields.whole("best_window", least=-1)
        self.last_window = fields.whole("last_window", least=-1)
        self.since_best = fields.whole("since_best")
