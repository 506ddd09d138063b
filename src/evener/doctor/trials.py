"""Tries ways to exchange on this host alone, before anything relies on them.

Ranks are threads of this process here; for NCCL, each is a process: ``python -m`` this module.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch

from evener.comm.addresses import bind
from evener.comm.c10d import HashStore, Store, form_gloo
from evener.comm.messages import first_line
from evener.comm.network import devices_at
from evener.comm.shared_links import Door
from evener.comm.shared_memory import create_file, map_file, reserve
from evener.devices import kind_of
from evener.errors import EvenerError
from evener.team.environment import DistributedTrainConfig
from evener.team.fixed import join

_HOST: Final = "127.0.0.1"
_ANY_PORT: Final = 1  # nothing is sent there
_PAGE_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 10.0


def try_gloo() -> str:
    """Exchange over Gloo between two ranks; return why that failed, or an empty text."""
    store = HashStore()
    return _run(2, partial(_exchange_by_gloo, store))


def try_nccl(devices: Sequence[torch.device], *, timeout_s: float) -> str:
    """Add up over NCCL on devices of this host; return why that failed, or an empty text.

    Each rank is a process, which can be ended whatever NCCL or a driver does.

    Args:
        devices: Two or more.
        timeout_s: Longest that it may take.
    """
    ranks: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + timeout_s
    with bind(_HOST, 0) as reserved:
        place = [str(len(devices)), str(reserved.getsockname()[1])]
        for rank, device in enumerate(devices):
            command = [sys.executable, "-P", "-m", __name__, str(rank), *place, str(device)]
            # Output of libraries (NCCL_DEBUG) goes to standard error.
            ranks.append(
                subprocess.Popen(
                    [*command, str(timeout_s / 2)],  # one that waits can say for whom
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
    failures = []
    try:
        for rank, process in enumerate(ranks):
            told, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            ended = f"the process of rank {rank} ended with exit code {process.returncode}"
            failures.append(told.strip() or (ended if process.returncode else ""))
    except subprocess.TimeoutExpired:
        failures.append(f"NCCL has not answered within {timeout_s:g} s")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return next(filter(None, failures), "")


def _add_up(rank: int, world_size: int, port: int, *, device: str, timeout_s: float) -> None:
    """Be a rank of ``try_nccl``; say on standard output what has failed."""
    try:
        kind_of(torch.device(device)).select(torch.device(device))
        place = DistributedTrainConfig.of_rank(
            rank, world_size, coordinator_addr=_HOST, coordinator_port=port
        )
        with join(place, timeout_s) as comm:
            failure = comm.add_nccl()
    except Exception as error:  # whatever a driver's library raises is an outcome
        failure = _describe(error)
    os.write(1, failure.encode())
    os._exit(0)  # ending an NCCL group may hang


def try_shared_memory() -> str:
    """Share memory between two ranks; return why that failed, or an empty text."""
    with ExitStack() as doors:
        try:
            pair = [doors.enter_context(closing(Door())) for _ in range(2)]
        except (OSError, AttributeError) as error:  # an old C library has no memfd_create
            return _describe(error)
        return _run(2, partial(_share, pair))


def try_loopback() -> str:
    """Connect to this host by way of its loopback; return why that failed, or an empty text."""
    try:
        with (
            socket.create_server((_HOST, 0)) as server,
            socket.create_connection(server.getsockname(), _PATIENCE_S),
        ):
            return ""
    except OSError as error:
        return _describe(error)


def try_port(port: int) -> str:
    """Listen on a port of every address; return why that failed, or an empty text."""
    try:
        bind("", port, 1).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _run(size: int, one: Callable[[int], str]) -> str:
    """Run ranks at the same time; return the first failure of one of them."""
    with ThreadPoolExecutor(size) as ranks:
        futures = [ranks.submit(one, rank) for rank in range(size)]
    failures = []
    for future in futures:
        error = future.exception()
        if error is None:
            failures.append(future.result())
        elif isinstance(error, EvenerError | OSError | RuntimeError | AttributeError):
            failures.append(_describe(error))
        else:
            raise error
    return next(filter(None, failures), "")


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, EvenerError) else first_line(error)


def _exchange_by_gloo(store: Store, rank: int) -> str:
    group: Any = form_gloo(store, rank, 2, devices_at(_HOST), _PATIENCE_S)
    values = torch.arange(8.0) + rank
    group.allreduce([values]).wait(timedelta(seconds=_PATIENCE_S))
    wrong = int((values != 2 * torch.arange(8.0) + 1).sum())
    return f"{wrong} of 8 numbers are wrong after an all_reduce" if wrong else ""


def _share(pair: Sequence[Door], rank: int) -> str:
    mark = secrets.token_bytes(16)
    with ExitStack() as opened:
        own = create_file("evener-trial")
        opened.callback(os.close, own)
        reserve(own, 0, _PAGE_BYTES)
        map_file(own, _PAGE_BYTES)[: len(mark)] = mark
        doors = [(door.name, door.token) for door in pair]
        arrival = pair[rank].meet(rank, doors, [own], _PATIENCE_S)[1 - rank]
        opened.callback(arrival.drop)
        # What the other has written; its mark is as long as this one's, and not all zeros.
        theirs = map_file(arrival.descriptors[0], _PAGE_BYTES)
        return "" if any(theirs[: len(mark)]) else "what one rank wrote the other did not read"


if __name__ == "__main__":
    numbers = (int(text) for text in sys.argv[1:4])
    _add_up(*numbers, device=sys.argv[4], timeout_s=float(sys.argv[5]))
