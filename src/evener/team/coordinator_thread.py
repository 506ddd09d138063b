"""A coordinator on a thread of an agent or of rank 0.

The thread imports what only a coordinator needs, such as asyncio, after the port has been opened,
so neither an agent nor rank 0 waits for that.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, final

from evener.closing import Closing
from evener.team.coordinator_options import TICK_S, CoordinatorOptions
from evener.team.host import remedy_of_shortage
from evener.team.terminal import say

_END_S: Final = 5.0


@final
class CoordinatorThread(Closing):
    """A coordinator on a thread of this process, until it is closed.

    Args:
        options: Its options; without a ledger.
        listening: See ``Coordinator``.
        tick_s: See ``Coordinator``.

    Attributes:
        port: Its port.
    """

    def __init__(
        self, options: CoordinatorOptions, listening: socket.socket, *, tick_s: float = TICK_S
    ) -> None:
        self._options, self._tick_s, self._socket = options, tick_s, listening
        self.port: int = self._socket.getsockname()[1]
        self._is_ready = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="evener-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; idempotent."""
        self._is_ready.wait(_END_S)
        with suppress(RuntimeError):  # its loop has ended already
            self._stop()
        self._thread.join(_END_S)

    def _run(self) -> None:
        import asyncio

        from evener.team.coordinator import Coordinator

        async def serve() -> None:
            coordinator = Coordinator(self._options, self._socket, tick_s=self._tick_s)
            loop = asyncio.get_running_loop()
            self._stop = partial(loop.call_soon_threadsafe, coordinator.stop)
            self._is_ready.set()
            await coordinator.serve()

        try:
            asyncio.run(serve())
        except OSError as error:  # clients get no answer, and report it
            remedy = remedy_of_shortage(error)
            say(f"evener: the coordinator cannot run in this process ({error.strerror}); {remedy}")
        finally:
            self._is_ready.set()
