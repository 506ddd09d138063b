"""Data positions of a rank's loaders: what checkpoints hold, and ranks that join receive."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from evener.data.cursor import Cursor
from evener.errors import UsageError


class Position(Protocol):
    """The data position of a loader."""

    @property
    def cursor(self) -> Cursor | None:
        """Return the position from which windows are planned; ``None`` for a stream."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return it."""
        ...

    def restore(self, state: Mapping[str, Any], *, allow_new_data: bool = False) -> None:
        """Continue from another one."""
        ...


@final
class Positions:
    """The data positions of all loaders. All ranks make the same loaders, in the same order."""

    def __init__(self) -> None:
        self._own: list[Position] = []
        #: States from a checkpoint or another rank, also of loaders that are not made yet.
        self._known: Sequence[Mapping[str, Any]] = ()
        self._allows_new_data = False

    def hold(self, position: Position) -> None:
        """Add that of a new loader; it continues from the state that is known of it."""
        self._restore([position], self._known[len(self._own) :])
        self._own.append(position)

    def states(self) -> list[Mapping[str, Any]]:
        """Return them, in the order in which the loaders were made."""
        return [position.state_dict() for position in self._own]

    def restore(self, states: Sequence[Mapping[str, Any]], *, allow_new_data: bool = False) -> None:
        """Continue from other positions, also in loaders that are made later.

        Args:
            states: In the order in which the loaders are made.
            allow_new_data: Begin with the first epoch where a state is of other data.

        Raises:
            CheckpointError: A state is of other data.
        """
        self._known, self._allows_new_data = states, allow_new_data
        self._restore(self._own, states)

    def _restore(self, own: Iterable[Position], states: Iterable[Mapping[str, Any]]) -> None:
        for position, state in zip(own, states, strict=False):
            position.restore(state, allow_new_data=self._allows_new_data)

    def state_dict(self, current: Cursor | None) -> dict[str, Any]:
        """Return them, in JSON.

        Args:
            current: Of the loader whose epoch was begun last.
        """
        cursors = [position.cursor for position in self._own]
        return {
            "positions": self.states(),
            "current": cursors.index(current) if current in cursors else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Cursor | None:
        """Continue from the positions of another rank.

        Returns:
            The cursor of the loader whose epoch was begun last, where that has one.

        Raises:
            UsageError: This rank has not made that loader.
        """
        told = state["positions"]  # the other one tells nothing of loaders that it has yet to make
        self.restore([*told, *self._known[len(told) :]], allow_new_data=self._allows_new_data)
        current: int | None = state["current"]
        if current is None:
            return None
        if current >= len(self._own):
            raise UsageError(
                f"this worker has made {len(self._own)} loaders, and the team {len(told)}, "
                f"of which number {current + 1} is iterated over now: a worker that joins needs "
                "it before its first epoch. Make all loaders before the loop over epochs"
            )
        return self._own[current].cursor
