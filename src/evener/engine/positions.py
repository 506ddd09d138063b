"""Data positions of a rank's loaders, which ranks that join receive."""

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

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from another one."""
        ...


@final
class Positions:
    """The data positions of all loaders. All ranks make the same loaders, in the same order."""

    def __init__(self) -> None:
        self._own: list[Position] = []
        #: States received from another rank, also of loaders that are not made yet.
        self._known: Sequence[Any] = ()

    def hold(self, position: Position) -> None:
        """Add that of a new loader; it continues from the state that is known of it."""
        self._own.append(position)
        if len(self._own) <= len(self._known):
            position.restore(self._known[len(self._own) - 1])

    def state_dict(self, current: Cursor | None) -> dict[str, Any]:
        """Return them, in JSON.

        Args:
            current: Of the loader whose epoch was begun last.
        """
        cursors = [position.cursor for position in self._own]
        found = (number for number, cursor in enumerate(cursors) if cursor is current)
        return {
            "positions": [position.state_dict() for position in self._own],
            "current": None if current is None else next(found, None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Cursor | None:
        """Continue from the positions of another rank.

        Returns:
            The cursor of the loader whose epoch was begun last, where that has one.

        Raises:
            UsageError: This rank has not made that loader.
        """
        self._known, current = state["positions"], cast("int | None", state["current"])
        for position, told in zip(self._own, self._known, strict=False):
            position.restore(told)
        if current is None:
            return None
        if current >= len(self._own):
            raise UsageError(
                f"this worker has made {len(self._own)} loaders, and the team {len(self._known)}, "
                f"of which number {current + 1} is iterated over now: a worker that joins needs "
                "it before its first epoch. Make all loaders before the loop over epochs"
            )
        return self._own[current].cursor
