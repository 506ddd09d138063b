"""Each run is read once, however many look at it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from evener.dashboard.watching import RunWatch

#: The most that may look at the same time.
MOST_READERS: Final = 200
#: The most runs that are read at the same time.
MOST_RUNS_READ: Final = 16

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
            run = self._runs[folder] = _Broadcast(folder)
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


class _Broadcast:
    """One run that is read; ``num_readers`` look at it."""

    def __init__(self, folder: Path) -> None:
        self.num_readers = 0
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

    async def _look(self) -> bytes | None:
        try:
            return await asyncio.to_thread(self._watch.look)
        except Exception as error:  # whatever a damaged file leads to: who looks has to be told
            problem = f"{self._name} cannot be shown: {type(error).__name__}: {error}"
            return json.dumps({"name": self._name, "problem": problem}).encode()

    async def _read(self) -> None:
        try:
            while True:
                document = await self._look()
                if document is not None and document != self._newest:
                    async with self._changed:
                        self._newest, self._version = document, self._version + 1
                        self._changed.notify_all()
                await asyncio.sleep(self._watch.pause_s)
        finally:
            self._watch.close()
