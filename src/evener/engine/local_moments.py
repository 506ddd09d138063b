"""Optimizer states of ranks that make steps of their own, as a checkpoint holds them."""

from collections.abc import Sequence
from typing import final

from torch.optim import Optimizer

from evener.comm.base import Communicator
from evener.engine.moments import SavedState, mean_states
from evener.engine.schedule import Schedule


@final
class RecentMoments:
    """Forms the mean of the ranks' optimizer states, weighted by recent work.

    Args:
        comm: The ranks.
        optimizers: This rank's.
        schedule: Knows the learning rates that all ranks have agreed on.
    """

    def __init__(
        self, comm: Communicator, optimizers: Sequence[Optimizer], schedule: Schedule
    ) -> None:
        self._comm = comm
        self._optimizers = optimizers
        self._schedule = schedule
        self._weight = 0.0
        self._formed: tuple[int, list[SavedState]] | None = None

    def add(self, weight: float) -> None:
        """Counts this rank's work of a window.

        Recent work counts, as it does in the moments; one window alone may have had none.
        """
        self._weight = 0.5 * self._weight + weight

    def form(self, window: int) -> None:
        """Forms the mean, once a window; all ranks call it together."""
        if self._formed is None or self._formed[0] != window:
            with self._schedule.as_agreed():
                states = mean_states(self._comm, self._optimizers, self._weight)
            self._formed = (window, states)

    @property
    def states(self) -> list[SavedState]:
        """What was formed last, complete on rank 0."""
        assert self._formed is not None, "form comes first"
        return self._formed[1]
