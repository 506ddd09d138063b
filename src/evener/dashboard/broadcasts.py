"""Each run is read once, however many look at it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from evener.dashboard.watching import RunWatch

#: The most that may look at the same time.
MOST_READERS: Final = 200
#: The most runs that are read at the same time.
MOST_RUNS_READ: Final = 16

#: Seconds between two looks at a run of which nothing is left to be read.
INTERVAL_S: Final = 1.0
#: Looks take so much of a core on the long run, all runs together. Sending comes on top.
PART_OF_CORE: Final = 0.025
#: Seconds of processor time that the looks at a run may take at once: those at 3 MB.
AT_ONCE_S: Final = 0.3

_ALIVE_S: Final = 15.0  # who hears nothing for longer takes the server for gone
_LINGER_S: Final = 30.0  # a page that is loaded again need not have the run read again
_RETRY: Final = b"retry: 1000\n\n"


class Broadcasts:
    """The runs that somebody looks at. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._runs: dict[Path, _Broadcast] = {}

    def has_room(self, folder: Path) -> bool:
        """Return whether one more may look at a run."""
        readers = sum(run.num_readers for run in self._runs.values())
        if folder not in self._runs and len(self._runs) >= MOST_RUNS_READ:
            for idle in [path for path, run in self._runs.items() if not run.num_readers]:
                self._end(idle)
        has_room = folder in self._runs or len(self._runs) < MOST_RUNS_READ
        return has_room and readers < MOST_READERS

    async def messages(self, folder: Path) -> AsyncIterator[bytes]:
        """Yield server-sent events about a run for one reader, until it leaves."""
        async with self._joined(folder) as run:
            yield _RETRY
            async for message in run.messages():
                yield message

    @asynccontextmanager
    async def _joined(self, folder: Path) -> "AsyncIterator[_Broadcast]":
        run = self._runs.get(folder)
        if run is None:
            run = self._runs[folder] = _Broadcast(folder, self._runs)
        run.num_readers += 1
        try:
            yield run
        finally:
            run.num_readers -= 1
            asyncio.get_running_loop().call_later(_LINGER_S, self._end_if_idle, folder)

    def _end_if_idle(self, folder: Path) -> None:
        if folder in self._runs and not self._runs[folder].num_readers:
            self._end(folder)

    def _end(self, folder: Path) -> None:
        self._runs.pop(folder).end()


class LookPace:
    """Keeps the looks at a run within a part of a core; processor time is saved up and spent.

    Args:
        now_s: The time.
    """

    def __init__(self, now_s: float) -> None:
        self._saved_s, self._then_s = AT_ONCE_S, now_s

    def spend(self, cost_s: float, now_s: float, num_runs: int = 1) -> float:
        """Take note of what a look has cost; return for how many seconds there should be none.

        ``PART_OF_CORE`` is divided evenly between so many runs: so the looks at one that trains
        are not delayed by the long file of another.
        """
        part = PART_OF_CORE / num_runs
        earned_s = part * (now_s - self._then_s)
        self._saved_s, self._then_s = min(AT_ONCE_S, self._saved_s + earned_s) - cost_s, now_s
        return max(0.0, -self._saved_s / part)


class _Broadcast:
    """One of the ``runs`` that are read; ``num_readers`` look at it."""

    def __init__(self, folder: Path, runs: Sized) -> None:
        self.num_readers = 0
        self._runs = runs
        self._pace = LookPace(time.monotonic())
        self._name = folder.name
        self._watch = RunWatch(folder)
        self._changed = asyncio.Condition()
        self._newest = b""
        self._version = 0
        self._reading = asyncio.create_task(self._read())

    async def messages(self) -> AsyncIterator[bytes]:
        seen = 0
        while True:
            try:
                async with asyncio.timeout(_ALIVE_S), self._changed:
                    while self._version == seen:
                        await self._changed.wait()
                    seen, newest = self._version, self._newest
            except TimeoutError:
                yield b": nothing new\n\n"
            else:
                yield b"data: " + newest + b"\n\n"

    def end(self) -> None:
        self._reading.cancel()

    def _look(self) -> tuple[bytes | None, float]:
        """Return the document, and the seconds of processor time that it took."""
        begun_s = time.thread_time()
        try:
            document = self._watch.look()
        except Exception as error:  # whatever a damaged file leads to: who looks has to be told
            problem = f"{self._name} cannot be shown: {type(error).__name__}: {error}"
            document = json.dumps({"name": self._name, "problem": problem}).encode()
        return document, time.thread_time() - begun_s

    async def _read(self) -> None:
        try:
            while True:
                document, cost_s = await asyncio.to_thread(self._look)
                if document is not None and document != self._newest:
                    async with self._changed:
                        self._newest, self._version = document, self._version + 1
                        self._changed.notify_all()
                pause_s = self._pace.spend(cost_s, time.monotonic(), len(self._runs))
                await asyncio.sleep(max(pause_s, 0.0 if self._watch.has_more else INTERVAL_S))
        finally:
            self._watch.close()
