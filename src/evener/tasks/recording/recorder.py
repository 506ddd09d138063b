"""Keeps a run's events in its folder, and shows them to people; on rank 0."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evener.config.folders import EVENTS
from evener.ddp import Ddp
from evener.loop.reporting import EventStream, SinkMaker, open_sinks
from evener.observe.events import make_event
from evener.observe.jsonl import JsonlSink, read_events
from evener.observe.progress import ProgressSink
from evener.observe.tally import EventTally
from evener.observe.tensorboard import TensorBoardSink
from evener.team.terminal import warn


class RunRecorder(EventStream):
    """Writes a run's events to ``events.jsonl`` and to further sinks; other ranks keep silent.

    Args:
        ddp: The team.
        folder: The run folder.

    Attributes:
        tally: The events, added up.
    """

    def __init__(self, ddp: Ddp, folder: Path) -> None:
        super().__init__(ddp.assembly)
        self._ddp = ddp
        self._path = folder / EVENTS
        self.tally = EventTally()
        if self._active:
            self.add_sink(JsonlSink(self._path, on_warning=warn))

    def show(
        self, *, terminal: bool, tensorboard: Path | None, sinks: Sequence[SinkMaker] = ()
    ) -> None:
        """Tells people too: on standard error, in a folder of TensorBoard files, by own sinks."""
        if self._active and sinks:
            self.add_sink(open_sinks(sinks))
        if self._active and terminal:
            self.add_sink(ProgressSink(sys.stderr))
        if self._active and tensorboard is not None:
            self.add_sink(TensorBoardSink(tensorboard))

    def emit(self, event: Mapping[str, Any]) -> None:
        """Hands an event to every sink, and adds it up.

        What earlier sessions of a resumed run have done counts in the tally.
        """
        if self._active:
            if event["type"] == "run_resumed":
                earlier = read_events(self._path, self._skip)
                self.tally = EventTally.of([*earlier, event])
            else:
                self.tally.add(event)
        super().emit(event)

    def evaluation(self, window: int, loss: float, weight: float, elapsed_s: float) -> None:
        """Records a held-out loss."""
        event = {"window": window, "name": "heldout", "loss": loss, "weight": weight}
        self.emit(make_event("eval", t=time.time(), elapsed_s=elapsed_s, **event))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Records an error as the end of the run, and closes."""
        try:
            if isinstance(error, Exception):
                self.finish(self._ddp.window, "failed", f"{type(error).__name__}: {error}")
        finally:
            self.close()

    def _skip(self, line: int, why: str) -> None:
        warn(f"{self._path}:{line} is not an event and is left out of the run's totals: {why}")
