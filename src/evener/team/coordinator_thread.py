"""How a coordinator is started; and one on a thread of an agent or of rank 0.

The thread loads what only a coordinator needs, such as asyncio, while the port listens already:
neither an agent nor rank 0 waits for that.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import LOOPBACK, open_port
from evener.protocol.formation import Deadlines
from evener.team.host import remedy_of_shortage
from evener.team.terminal import say

#: How often a coordinator looks what is due, in seconds.
TICK_S: Final = 0.05
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """How a coordinator is started.

    Attributes:
        host: Where it listens.
        port: Its port; 0 takes a free one.
        least: Fewest members of the team.
        most: Most members.
        token: What workers must know; ``None`` admits every process of this host.
        deadlines: Those of the team.
        nnodes: Hosts of a fixed team; 0 for an elastic team.
        ledger: The file from which a coordinator that is started again continues; ``None`` for
            none: it then hears from workers and launchers what the newest generation is.
    """

    host: str = LOOPBACK
    port: int = 0
    least: int = 1
    most: int
    token: bytes | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    nnodes: int = 0
    ledger: Path | None = None


def listen(options: CoordinatorOptions) -> socket.socket:
    """Return a socket that listens where the coordinator is to be.

    Raises:
        ConfigError: It would listen on other than loopback without a token.
        LaunchError: The port is in use, or not allowed; its cause is the OSError.
    """
    is_guarded = options.token is not None
    return open_port(options.host, options.port, program="the coordinator", is_guarded=is_guarded)


@final
class CoordinatorThread(Closing):
    """A coordinator on a thread of this process, until it is closed.

    Args:
        options: How it is started; without a ledger.
        listening: See ``Coordinator``.
        tick_s: See ``Coordinator``.

    Attributes:
        port: Where it listens.
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
        except OSError as error:  # nobody will be answered; those who ask say so
            remedy = remedy_of_shortage(error)
            say(f"evener: the coordinator cannot run in this process ({error.strerror}); {remedy}")
        finally:
            self._is_ready.set()
