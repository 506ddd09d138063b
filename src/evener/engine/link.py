"""What an exchange between the ranks costs, timed before the first window."""

import os
import time
from typing import Final

import torch
from torch import Tensor

from evener.averaging.feedback import ErrorFeedback
from evener.comm.base import Communicator
from evener.engine.team import Team
from evener.planning.pieces import ExchangeCost

_SHORT, _LONG = 2**10, 2**17
_TIMES: Final = 3
"""Exchanges of each length, of which the best counts, after one that sets everything up."""

#: A long exchange must take so many seconds, or a longer one is timed: it hardly shows its bytes.
_LEAST_S: Final = 0.004
_MOST: Final = 2**21


def time_link(
    comm: Communicator, team: Team, device: torch.device, feedback: ErrorFeedback
) -> tuple[ExchangeCost, float]:
    """Time sums over the ranks of ``comm``, which call it together.

    It takes 0.2 s over 100 Mbit/s.

    Args:
        comm: What is timed.
        team: Knows which of its ranks are on this host.
        device: Where this rank's gradients lie.
        feedback: Of gradients, which may be rounded on their way.

    Returns:
        The cost of an exchange, the same on all ranks; how many cores it leaves to this rank.
    """
    short_s, _ = _time(comm, torch.zeros(_SHORT, device=device), feedback)
    numel = _LONG
    while True:
        long_s, processor_s = _time(comm, torch.zeros(numel, device=device), feedback)
        if long_s >= _LEAST_S or numel >= _MOST:
            break
        numel *= 4
    byte_s = max(long_s - short_s, 0.0) / (4 * (numel - _SHORT))
    present, own = (
        [team.member_by_rank[rank] for rank in comm.numbers],
        team.member_by_rank[team.rank],
    )
    on_host = sum(one.host == own.host for one in present)
    # Ranks of a host share its cores, unless each is kept to cores of its own.
    cores = max(own.threads, _count_cores() / on_host)
    return ExchangeCost(byte_s, short_s), cores - processor_s / long_s


def _time(comm: Communicator, tensor: Tensor, feedback: ErrorFeedback) -> tuple[float, float]:
    """Return the seconds of a sum on the slowest rank, and the processor's on this rank."""
    lost = feedback.of(tensor)
    best = (0.0, 0.0)
    for attempt in range(1 + _TIMES):
        started = time.perf_counter(), time.process_time()
        comm.all_reduce(tensor, what="timing the link", lost=lost)
        found = time.perf_counter() - started[0], time.process_time() - started[1]
        best = min(best, found) if attempt > 1 else found
    rows = comm.all_gather_rows([best[0]], what="seconds of exchanges")
    return max(seconds for (seconds,) in rows), best[1]


def _count_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
