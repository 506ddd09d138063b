"""A coordinator of an elastic team, on a thread of the test."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evener.comm.addresses import LOOPBACK
from evener.protocol.formation import Deadlines
from evener.team.coordinator import Coordinator
from evener.team.coordinator_options import CoordinatorOptions, listen
from helpers.limits import PATIENCE_S


def opened(**options: Any) -> Coordinator:
    """A coordinator whose port is open."""
    chosen = CoordinatorOptions(**options)
    return Coordinator(chosen, listen(chosen))


@contextmanager
def serving(
    least: int,
    most: int,
    deadlines: Deadlines,
    *,
    token: bytes | None = None,
    port: int = 0,
    host: str = LOOPBACK,
    ledger: Path | None = None,
    nnodes: int = 0,
) -> Iterator[str]:
    """Serves until the block ends; gives the coordinator's address."""
    options = CoordinatorOptions(
        host=host,
        port=port,
        least=least,
        most=most,
        token=token,
        deadlines=deadlines,
        ledger=ledger,
        nnodes=nnodes,
    )
    started: list[tuple[Coordinator, asyncio.AbstractEventLoop]] = []
    ready = threading.Event()
    bugs: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        coordinator = Coordinator(options, listen(options))
        started.append((coordinator, asyncio.get_running_loop()))
        ready.set()
        await coordinator.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    coordinator, loop = started[0]
    try:
        yield f"[{host}]:{coordinator.port}" if ":" in host else f"{host}:{coordinator.port}"
    finally:
        loop.call_soon_threadsafe(coordinator.stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not bugs
