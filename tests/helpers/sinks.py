"""A sink of a test."""

from typing import Any

from evener import Sink
from evener.observe.events import Event


class Kept(Sink):
    """Keeps events, and how often it was closed."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.closed = 0

    def emit(self, event: Event) -> None:
        self.events.append(dict(event))

    def close(self) -> None:
        self.closed += 1

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]
