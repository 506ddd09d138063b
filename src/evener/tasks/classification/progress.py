"""What a run knows of its evaluations: which adapter is the best, and whether to go on."""

from collections.abc import Mapping
from typing import Any

from evener.config.classify import ClassifyEvalConfig
from evener.parsing import Fields
from evener.tasks.classification.metrics import Evaluation


class EvaluationHistory:
    """The evaluations of a run; the same on every rank that takes part.

    Args:
        settings: Which number decides, and how long to wait for a better one.

    Attributes:
        begun: Whether all that comes before the first window is done.
        frozen: Of the base with a random head, before anything was trained.
        start: The same where the head was not random: the base or an adapter brought it.
        probe: Of the base with a head that was fitted to it, before the adapter was trained.
        best: The best so far, and the window it was made after.
        last_window: The newest one's window.
        since_best: Evaluations since the best.
    """

    def __init__(self, settings: ClassifyEvalConfig) -> None:
        self._settings = settings
        self.begun = False
        self.frozen: Evaluation | None = None
        self.start: Evaluation | None = None
        self.probe: Evaluation | None = None
        self.best: Evaluation | None = None
        self.best_window = -1
        self.last_window = -1
        self.since_best = 0

    def add(self, window: int, evaluation: Evaluation) -> bool:
        """Takes an evaluation; true when it is the best so far."""
        metric = self._settings.metric
        self.last_window = window
        if self.best is None or evaluation.score(metric) > self.best.score(metric):
            self.best, self.best_window, self.since_best = evaluation, window, 0
            return True
        self.since_best += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether so many evaluations brought nothing better that the run shall end."""
        patience = self._settings.patience
        return bool(patience) and self.since_best >= patience

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "begun": self.begun,
            "frozen": None if self.frozen is None else self.frozen.to_json(),
            "start": None if self.start is None else self.start.to_json(),
            "probe": None if self.probe is None else self.probe.to_json(),
            "best": None if self.best is None else self.best.to_json(),
            "best_window": self.best_window,
            "last_window": self.last_window,
            "since_best": self.since_best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``.

        Raises:
            ValueError: It is damaged.
        """
        fields = Fields(dict(state))
        self.begun = fields.flag("begun")
        for name in ("frozen", "start", "probe", "best"):
            known = None if fields[name] is None else Evaluation.from_json(fields[name])
            setattr(self, name, known)
        self.best_window = fields.whole("best_window", least=-1)
        self.last_window = fields.whole("last_window", least=-1)
        self.since_best = fields.whole("since_best")
