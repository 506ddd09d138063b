"""Which windows of a run are in the final parameters."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from evener.observe.events import Event

VOIDING: Final = ("run_resumed", "reformed")
"""Types of events that make earlier ``window`` events void, from their own ``window`` on."""


def effective(events: Iterable[Event], newest: int | None = None) -> list[Event]:
    """Drop ``window`` events that a later event made void.

    Args:
        events: Those of a run, in the order in which they were written.
        newest: Return no more than so many of the newest ones.
    """
    kept: deque[Event] = deque(maxlen=newest)
    for event in events:
        if event["type"] in VOIDING:
            others = []
            while kept and not _precedes(kept[-1], event):
                last = kept.pop()
                if last["type"] != "window":
                    others.append(last)
            kept.extend(reversed(others))
        kept.append(event)
    return list(kept)


def _precedes(one: Event, event: Event) -> bool:
    return bool(one["type"] == "window" and one["window"] < event["window"])
