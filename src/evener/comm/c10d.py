"""What torch keeps private or untyped of its stores and process groups, in one place.

``torch.distributed`` re-exports these names without saying so to type checkers, and has no public
way to build a process group that is not derived from a default one.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import AllreduceOptions as AllreduceOptions
from torch._C._distributed_c10d import BroadcastOptions as BroadcastOptions
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo
from torch._C._distributed_c10d import ReduceScatterOptions as ReduceScatterOptions
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import Work as Work
from torch.distributed import is_nccl_available

from evener.errors import LaunchError

#: Operations that Gloo has under way at a time; see "block by block" in docs/experiments.md.
_NUM_GLOO_THREADS = 4


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
        timeout_s: Deadline for connecting.

    Raises:
        RuntimeError: A peer did not come in time, or could not be reached.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stub
    options._devices = list(devices)
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = _NUM_GLOO_THREADS
    return ProcessGroupGloo(store, rank, world_size, options)


def form_nccl(store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """The same for NCCL on the current CUDA device; it connects at its first collective.

    Args:
        store: As in ``form_gloo``.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline of collectives.

    Raises:
        LaunchError: This build of torch has no NCCL.
    """
    if not is_nccl_available():
        raise LaunchError("backend is 'nccl', which this build of torch does not have: use 'gloo'")
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # At its own timeout NCCL's watchdog ends the process; the caller has reported long before.
    options._timeout = timedelta(seconds=2 * timeout_s + 60)
    return ProcessGroupNCCL(store, rank, world_size, options)


def nccl_version() -> str:
    """Major and minor version of NCCL (or RCCL), which ranks must share; empty where it is absent.

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
