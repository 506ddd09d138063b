"""The weighted mean of the ranks' optimizer states, for checkpoints of local steps."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from evener.checkpoint import flatten_optimizer
from evener.comm.base import Communicator
from evener.engine.schedule import Schedule

#: Tensors by name, and the document that puts them in their places.
OptimizerState = tuple[dict[str, Tensor], dict[str, Any]]


def own_state(optimizer: Optimizer) -> OptimizerState:
    """Return an optimizer's state as tensors and a document."""
    return flatten_optimizer(optimizer.state_dict())


@final
class RecentMoments:
    """Averages the optimizer states of ranks that make local steps, weighted by recent work.

    Args:
        comm: The ranks.
        optimizers: This rank's.
        schedule: Knows the learning rates that all ranks have agreed on.

    Attributes:
        states: The state of each optimizer as ``form`` averaged it last; complete on rank 0.
    """

    def __init__(
        self, comm: Communicator, optimizers: Sequence[Optimizer], schedule: Schedule
    ) -> None:
        self.states: list[OptimizerState]
        self._comm = comm
        self._optimizers = optimizers
        self._schedule = schedule
        self._weight = 0.0
        self._window = -1

    def use(self, comm: Communicator) -> None:
        """Continue with other ranks, of which some may be new."""
        self._comm, self._window = comm, -1

    def add(self, weight: float) -> None:
        """Count this rank's weight in a window.

        Each new window counts as much as all before it together, as in the moments themselves;
        one window alone may have had no weight.
        """
        self._weight = 0.5 * self._weight + weight

    def are_of(self, window: int) -> bool:
        """Return whether ``states`` were averaged after so many windows."""
        return self._window == window

    def form(self, window: int) -> None:
        """Average the states after so many windows; all ranks call it together.

        Where a rank is lost meanwhile, ``states`` are those of this rank alone.

        Floating-point tensors become their mean by weight, over the ranks that have them; single
        numbers (step counts) are rounded. Everything else is rank 0's.
        """
        with self._schedule.as_agreed():
            self.states = [own_state(optimizer) for optimizer in self._optimizers]
            if self._comm.world_size > 1:
                self.states = [self._mean(*state) for state in self.states]
        self._window = window

    @torch.no_grad()
    def _mean(self, own: dict[str, Tensor], document: dict[str, Any]) -> OptimizerState:
        comm = self._comm
        index = {
            name: [list(t.shape), str(t.dtype)] for name, t in own.items() if t.is_floating_point()
        }
        note = {"tensors": index, "weight": self._weight, "document": document}
        notes = comm.all_gather_json(note, what="optimizer states")
        # A rank that has made no step yet has no state; the ranks with a state determine the mean.
        richest = max(notes, key=lambda n: len(n["tensors"]))
        somewhere = next(iter(own.values()), torch.empty(0))
        mean: dict[str, Tensor] = {}
        for name, (shape, dtype) in richest["tensors"].items():
            weights = [n["weight"] for n in notes if name in n["tensors"]]
            total = math.fsum(weights)
            kind = getattr(torch, dtype.removeprefix("torch."))
            part = torch.zeros(shape, dtype=kind, device=own.get(name, somewhere).device)
            if name in index:
                part.copy_(own[name])
                part.mul_(self._weight / total if total else 1.0 / len(weights))
            comm.all_reduce(part, what=f"optimizer state {name}")
            mean[name] = part if shape else part.round()
        return {**own, **mean}, document if len(own) >= len(mean) else richest["document"]
