"""A device that works through a queue, to test with where there is none."""

import time

import pytest

from evener.devices import DeviceKind, Milestone


class Queue:
    """What was marked in the queue of a device, and what the host has waited for.

    Attributes:
        marked: Milestones so far.
        waited: The latest milestone that the host waited for.
    """

    def __init__(self) -> None:
        self.marked = self.waited = 0


class Event:
    """The part of ``torch.cuda.Event`` that milestones use."""

    def __init__(self, queue: Queue) -> None:
        queue.marked += 1
        self._queue, self._number, self._at_s = queue, queue.marked, time.perf_counter()

    def wait(self) -> None:
        """Lets a stream wait, and not the host."""

    def synchronize(self) -> None:
        self._queue.waited = max(self._queue.waited, self._number)

    def elapsed_time(self, later: "Event") -> float:
        assert later._number <= self._queue.waited, "torch.cuda.Event raises before it has passed"
        return (later._at_s - self._at_s) * 1000


def give_milestones(monkeypatch: pytest.MonkeyPatch, kind: type[DeviceKind]) -> Queue:
    """Let a kind of device tell how far it has come, as CUDA does."""
    queue = Queue()
    monkeypatch.setattr(kind, "has_queue", True)
    monkeypatch.setattr(kind, "has_milestones", True)
    monkeypatch.setattr(kind, "mark", lambda *_: Milestone(Event(queue)))
    return queue
