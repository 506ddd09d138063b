"""What an exchange between the ranks costs, timed before the first window."""

import time
from typing import Final

import torch
from torch import Tensor

from evener.averaging.feedback import ErrorFeedback
from evener.comm.base import Communicator
from evener.engine.team import Team
from evener.planning.pieces import ExchangeCost
from evener.team.host import available_cores

_SHORT, _LONG = 2**10, 2**17
_TIMES: Final = 3
"""Exchanges of each length, of which the best counts, after one that sets everything up."""

#: Seconds that a long exchange must take, or a longer one is timed: it hardly shows its bytes.
_LEAST_S: Final = 0.015
_MOST: Final = 2**21


def time_link(
    comm: Communicator, team: Team, device: torch.device, feedback: ErrorFeedback
) -> tuple[ExchangeCost, float]:
    """Time sums over the ranks of ``comm``, which call it together.

    It takes 0.2 to 0.3 s over 100 Mbit/s to 1 Gbit/s.

    Args:
        comm: What is timed.
        team: Knows which of its ranks are on this host.
        device: Where this rank's gradients lie.
        feedback: Of gradients, which may be rounded on their way.

    Returns:
        The cost of an exchange, the same on all ranks; how many cores it leaves to this rank.
    """
    short_s, short_processor_s = _time(comm, torch.zeros(_SHORT, device=device), feedback)
    numel = _LONG
    while True:
        long_s, processor_s = _time(comm, torch.zeros(numel, device=device), feedback)
        if long_s >= _LEAST_S or numel >= _MOST:
            break
        numel *= 4
    # Of the bytes alone: what a call costs is a large part of these exchanges, and of no others.
    bytes_s = max(long_s - short_s, 1e-9)
    byte_s = bytes_s / (4 * (numel - _SHORT))
    busy = max(processor_s - short_processor_s, 0.0) / bytes_s
    members = [team.member_by_rank[rank] for rank in comm.numbers]
    own = team.member_by_rank[team.rank]
    on_host = sum(one.host == own.host for one in members)
    # Ranks of a host share its cores, unless each is kept to cores of its own.
    cores = max(own.threads, available_cores() / on_host)
    return ExchangeCost(byte_s, short_s), cores - busy


def _time(comm: Communicator, tensor: Tensor, feedback: ErrorFeedback) -> tuple[float, float]:
    """Return the seconds of a sum on the slowest rank, and the processor's on this rank."""
    lost = feedback.of(tensor)
    taken_s, processor_s = [], []
    for _ in range(1 + _TIMES):
        started = time.perf_counter(), time.process_time()
        comm.all_reduce(tensor, what="timing the link", lost=lost)
        taken_s.append(time.perf_counter() - started[0])
        processor_s.append(time.process_time() - started[1])
    rows = comm.all_gather_rows([min(taken_s[1:])], what="seconds of exchanges")
    return max(seconds for (seconds,) in rows), min(processor_s[1:])
