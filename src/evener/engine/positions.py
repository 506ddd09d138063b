"""Data positions of a rank's loaders: what checkpoints hold, and ranks that join receive."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from evener.data.cursor import Cursor
from evener.errors import UsageError


@final
class Positions:
    """The data positions of all loaders. All ranks make the same loaders, in the same order."""

    def __init__(self) -> None:
        self._own: list[Cursor] = []
        #: States from a checkpoint or another rank, also of loaders that are not made yet.
        self._known: Sequence[Mapping[str, Any]] = ()
        self._allows_new_data = False

    def hold(self, position: Cursor) -> None:
        """Add that of a new loader; it continues from the state that is known of it."""
        self._restore([position], self._known[len(self._own) :])
        self._own.append(position)

    def states(self) -> list[Mapping[str, Any]]:
        """Return the positions, in the order in which the loaders were made."""
        return [position.state_dict() for position in self._own]

    def restore(self, states: Sequence[Mapping[str, Any]], *, allow_new_data: bool = False) -> None:
        """Continue from other positions, also in loaders that are made later.

        Args:
            states: In the order in which the loaders are made.
            allow_new_data: Begin with the first epoch if a state is of other data.

        Raises:
            CheckpointError: A state is of other data.
        """
        self._known, self._allows_new_data = states, allow_new_data
        self._restore(self._own, states)

    def _restore(self, own: Iterable[Cursor], states: Iterable[Mapping[str, Any]]) -> None:
        for position, state in zip(own, states, strict=False):
            if self._allows_new_data and not position.is_of(state):
                position.restart()
            else:
                position.load_state_dict(state)

    def state_dict(self, current: Cursor | None) -> dict[str, Any]:
        """Return the positions, in JSON.

        Args:
            current: Of the loader whose epoch was begun last, if windows of it are planned.
        """
        number = self._own.index(current) if current in self._own else None
        return {"positions": self.states(), "current": number}

    def load_state_dict(self, state: Mapping[str, Any]) -> Cursor | None:
        """Continue from the positions of another rank.

        Returns:
            That of the loader whose epoch was begun last.

        Raises:
            UsageError: This rank has not made that loader.
        """
        saved, current = state["positions"], state["current"]
        # The other one says nothing of loaders that are yet to be made.
        self.restore([*saved, *self._known[len(saved) :]], allow_new_data=self._allows_new_data)
        if current is not None and current >= len(self._own):
            raise UsageError(
                f"this worker has made {len(self._own)} loaders, and the team {len(saved)}, "
                f"of which number {current + 1} is iterated over now: a worker that joins needs "
                "it before its first epoch. Make all loaders before the loop over epochs"
            )
        return None if current is None else self._own[current]
