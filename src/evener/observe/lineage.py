"""Which windows of a run are in the final parameters."""

from collections.abc import Sequence
from typing import Any, Final

from evener.observe.events import Event

VOIDING: Final = ("run_resumed", "reformed")
"""Types of events that make earlier ``window`` events void, from their own ``window`` on."""


class Voids:
    """Decides which events of a run count, from its ``VOIDING`` events.

    Args:
        events: Those events, in the order in which they were written.
    """

    def __init__(self, events: Sequence[Event] = ()) -> None:
        #: The window from which earlier events are void, for each of these events.
        self._first_void: list[int] = []
        #: How many of these events come after one.
        self._num_after: dict[Any, int] = {}
        for event in reversed(events):
            self._num_after.setdefault(_key(event), len(self._first_void))
            self._first_void.append(min([event["window"], *self._first_void[-1:]]))

    def counts(self, event: Event) -> bool:
        """Return whether an event counts; events come in the order in which they were written.

        Of the events in ``VOIDING``, there may be more than were known.
        """
        if event["type"] in VOIDING:
            num_before = len(self._first_void)
            del self._first_void[self._num_after.get(_key(event), num_before) :]
        is_window = event["type"] == "window" and self._first_void
        return not is_window or event["window"] < self._first_void[-1]

    @property
    def are_left(self) -> bool:
        """Return whether some of these events have not come, because their file was removed."""
        return bool(self._first_void)


def _key(event: Event) -> Any:
    return event["type"], event["t"], event["window"]
