"""Which windows of a run are in the final parameters."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from evener.observe.events import Event

VOIDING: Final = ("run_resumed", "reformed")
"""Types of events that make earlier ``window`` events void, from their own ``window`` on."""


class Voids:
    """Tells which events of a run count, from what is known beforehand of those in ``VOIDING``.

    Args:
        windows: The ``window`` of each event in ``VOIDING``, in the order in which they come.
    """

    def __init__(self, windows: Sequence[int] = ()) -> None:
        #: From which window on events are void, before each of these events.
        self._first_void = list(accumulate(reversed(windows), min))

    def counts(self, event: Event) -> bool:
        """Return whether an event counts; events come in the order in which they were written."""
        if event["type"] in VOIDING and self._first_void:
            self._first_void.pop()
        is_window = event["type"] == "window" and self._first_void
        return not is_window or event["window"] < self._first_void[-1]
