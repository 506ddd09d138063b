"""Data positions of a rank's loaders: what checkpoints hold, and ranks that join receive."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, final

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
        self._own.append(position)
        self._restore(len(self._own) - 1)

    def states(self) -> list[Mapping[str, Any]]:
        """Return them, in the order in which the loaders were made."""
        return [position.state_dict() for position in self._own]

    def restore(self, states: Sequence[Mapping[str, Any]], *, allow_new_data: bool = False) -> None:
        """Continue from other positions, also in loaders that are made later.

        Args:
            states: In the order in which the loaders are made; an empty one tells nothing.
            allow_new_data: Begin with the first epoch where a state is of other data.

        Raises:
            CheckpointError: A state is of other data.
        """
        self._known, self._allows_new_data = states, allow_new_data
        for number in range(len(self._own)):
            self._restore(number)

    def _restore(self, number: int) -> None:
        if number < len(self._known) and (state := self._known[number]):
            self._own[number].restore(state, allow_new_data=self._allows_new_data)

    def state_dict(self, current: Cursor | None) -> dict[str, Any]:
        """Return them, in JSON.

        Args:
            current: Of the loader whose epoch was begun last.
        """
        cursors = [position.cursor for position in self._own]
        found = (number for number, cursor in enumerate(cursors) if cursor is current)
        return {
            "positions": self.states(),
            "current": None if current is None else next(found, None),
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
        current = cast("int | None", state["current"])
        if current is None:
            return None
        if current >= len(self._own):
            raise UsageError(
                f"this worker has made {len(self._own)} loaders, and the team {len(told)}, "
                f"of which number {current + 1} is iterated over now: a worker that joins needs "
                "it before its first epoch. Make all loaders before the loop over epochs"
            )
        return self._own[current].cursor
