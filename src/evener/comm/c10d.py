"""Private or untyped parts of torch's stores and process groups, in one place.

``torch.distributed`` re-exports these names without saying so to type checkers, and has no public
way to build a process group that is not derived from a default one.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import AllreduceOptions as AllreduceOptions
from torch._C._distributed_c10d import AllToAllOptions as AllToAllOptions
from torch._C._distributed_c10d import BroadcastOptions as BroadcastOptions
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo
from torch._C._distributed_c10d import ReduceScatterOptions as ReduceScatterOptions
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import Work as Work
from torch.distributed import is_nccl_available

#: Operations that Gloo has under way at a time; see "block by block" in docs/experiments.md.
_NUM_GLOO_THREADS = 4
#: Gloo waits for a connection for five times the timeout that it is given.
_GLOO_PATIENCE = 5.0
#: An abort of NCCL that takes longer hangs.
ABORT_S = 10.0
#: Numbers of the sum by which NCCL is checked: 1 MiB.
_CHECKED = 1 << 18


def form_gloo(
    store: Store,
    rank: int,
    world_size: int,
    devices: Sequence[ProcessGroupGloo.Device],
    timeout_s: float,
) -> ProcessGroupGloo:
    """Connect to all peers, who do the same at the same time.

    Args:
        store: Where addresses are exchanged; no other group may have used its prefix.
        rank: This rank.
        world_size: Number of ranks.
        devices: Network devices to listen on.
        timeout_s: Deadline for connecting; peers must come within a fifth of it.

    Raises:
        RuntimeError: A peer did not come in time, or could not be reached.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stub
    # Two ranks connect twice, as operations alternate: two that are under way do not share a
    # connection (see ``GroupTransport._crosses``).
    options._devices = list(devices) * (2 if world_size == 2 else 1)
    options._timeout = timedelta(seconds=timeout_s / _GLOO_PATIENCE)
    options._threads = _NUM_GLOO_THREADS
    return ProcessGroupGloo(store, rank, world_size, options)


def form_nccl(
    store: Store, rank: int, world_size: int, timeout_s: float, form_timeout_s: float
) -> Any:
    """Form an NCCL group on the current CUDA device, and check a sum; all its ranks call it.

    NCCL on new machines may hang or add up wrong numbers. Causes are peer-to-peer copies behind an
    IOMMU, a firewall, or mixed drivers. End the group with ``end_nccl``.

    Args:
        store: As in ``form_gloo``.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline of collectives.
        form_timeout_s: Deadline for connecting and for the sum.

    Raises:
        RuntimeError: As in ``form_gloo``; this build of torch has no NCCL; the sum is wrong.
    """
    if not is_nccl_available():
        raise RuntimeError("backend is 'nccl', which this build of torch does not have: use 'gloo'")
    from torch._C._distributed_c10d import ProcessGroupNCCL

    # With torch's default (3), the watchdog ends the process when NCCL reports a lost peer, before
    # this rank can name the peer or continue without it. With 2 it only aborts the group.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = ProcessGroupNCCL.Options()
    # The caller reports a timeout long before the watchdog notices it.
    options._timeout = timedelta(seconds=timeout_s + 60)
    group = ProcessGroupNCCL(store, rank, world_size, options)
    device = torch.device("cuda", torch.cuda.current_device())

    def connect() -> None:
        # Otherwise NCCL connects in its first collective, without any deadline.
        group.eager_connect_single_device(device)
        _check_sum(group, rank, world_size, device)

    try:
        _run_within(form_timeout_s, connect)
    except BaseException:
        end_nccl(group, store)
        raise
    return group


def _check_sum(group: Any, rank: int, world_size: int, device: torch.device) -> None:
    """Sum numbers whose result is known, and that float32 holds exactly in any order."""
    pattern = (torch.arange(_CHECKED) % 127 + 1).float()
    factors = torch.arange(world_size) % 7 + 1
    values = (pattern * factors[rank]).to(device)
    group.allreduce([values]).wait()
    wrong = int((values.cpu() != pattern * factors.sum()).sum())  # waits for the device
    if wrong:
        raise RuntimeError(f"{wrong} of {_CHECKED} numbers are wrong in an all_reduce")


def end_nccl(group: Any, store: Store) -> None:
    """End a group of NCCL, also one whose peers are lost or that is in an operation.

    The end of the object alone would wait for the peers.

    Args:
        group: From ``form_nccl``.
        store: Its store. The threads of the group ask it until they end, and torch keeps no
            reference to a store that is written in Python.
    """

    def abort() -> None:
        group.abort()
        del kept[:]

    kept = [store]
    with suppress(RuntimeError):  # it hangs in a driver: the process does not need it any more
        _run_within(ABORT_S, abort)


def _run_within(timeout_s: float, function: Callable[[], None]) -> None:
    """Run a call of NCCL that knows no deadline; a thread that is late is left to itself.

    Raises:
        RuntimeError: It failed, or has not ended in time.
    """
    failures: list[str] = []
    ended = threading.Event()

    def run() -> None:
        try:
            function()
        except Exception as error:  # no other rank would notice
            failures.append(str(error))
        finally:
            ended.set()

    threading.Thread(target=run, name="evener-nccl", daemon=True).start()
    if not ended.wait(timeout_s):
        failures.append(f"NCCL has not answered within {timeout_s:g} s")
    if failures:
        raise RuntimeError(failures[0])


def nccl_version() -> str:
    """Return the version of NCCL (or RCCL) that ranks must share; empty where it is absent.

    Only to be asked where there is a GPU.
    """
    if not is_nccl_available():
        return ""
    from torch.cuda import nccl

    numbers = nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return ".".join(str(number) for number in numbers[:2])


@lru_cache  # every step asks for the same ones again, and torch only reads them
def options(kind: type[Any], timeout_s: float, src: int | None = None) -> Any:
    """Return the options of an operation.

    Args:
        kind: Their class.
        timeout_s: When Gloo gives up.
        src: The rank from which a broadcast copies.
    """
    made = kind()
    made.timeout = timedelta(seconds=timeout_s)
    if src is not None:
        made.rootRank = src
    return made
