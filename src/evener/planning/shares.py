"""Whole shares of a fixed sum with the earliest finish.

Pure functions of predicted costs.
"""

import math
from collections.abc import Collection, Sequence
from heapq import heapify, heapreplace
from itertools import chain
from typing import Final

from evener.planning.speed import CostModel

_MOST_DEADLINES: Final = 64
"""Deadlines tried at most; after that more samples are handed out one by one."""


def apportion(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Return shares of ``total`` as near to ``ratios`` as whole numbers can be.

    The method of largest remainders; ties go to the lower rank.

    Args:
        total: What to divide, 0 or more.
        ratios: Non-negative proportions, not all 0.

    Returns:
        Whole shares that sum to ``total``; 0 if the ratio is 0.
    """
    whole = math.fsum(ratios)
    exact = [total * ratio / whole for ratio in ratios]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def finish_s(
    shares: Sequence[int], costs: Sequence[CostModel], micro_batch_sizes: Sequence[int | None]
) -> float:
    """Return the predicted seconds until the last rank with a share has finished it."""
    seconds = all_seconds(shares, costs, micro_batch_sizes)
    return max((s for s, share in zip(seconds, shares, strict=True) if share), default=0.0)


def all_seconds(
    shares: Sequence[int], costs: Sequence[CostModel], sizes: Sequence[int | None]
) -> list[float]:
    """Return ``CostModel.seconds`` of each rank, without a call for each: teams may be large."""
    return [
        window_s + fixed_s * -(-share // (size or share or 1)) + per_sample_s * share
        for share, (fixed_s, per_sample_s, window_s), size in zip(shares, costs, sizes, strict=True)
    ]


def fastest_shares(
    total: int,
    costs: Sequence[CostModel],
    micro_batch_sizes: Sequence[int | None],
    *,
    least: int,
    idle: Collection[int],
) -> tuple[int, ...]:
    """Return the whole shares of ``total`` whose latest finish is earliest.

    Each rank gets what it finishes by a deadline at which less than a sample a rank is left. Each
    sample of the rest goes where it is done first; of equals, to the lower rank. So the result is
    optimal up to rounding in float64. At equal micro-batch sizes a rank that is no slower never
    gets less.

    Args:
        total: Samples to share out.
        costs: Cost by rank; ``per_sample_s`` above 0.
        micro_batch_sizes: Most samples in one micro-batch by rank, ``None`` for all in one.
        least: Samples that each rank that is not idle gets at least, ``total`` or less in all.
        idle: Ranks that get nothing.

    Returns:
        Shares by rank; they sum to ``total``.
    """
    if total == 0:
        return (0,) * len(costs)
    present = [rank for rank in range(len(costs)) if rank not in idle]
    ranks = (
        [costs[rank] for rank in present],
        [micro_batch_sizes[rank] or total for rank in present],
    )
    shares = _nearly(total, least, *ranks)
    ends = all_seconds([share + 1 for share in shares], *ranks)
    first = [(end, place) for place, end in enumerate(ends)]
    heapify(first)
    for _ in range(total - sum(shares)):
        place = first[0][1]
        shares[place] += 1
        end_s = ranks[0][place].seconds(shares[place] + 1, ranks[1][place])
        heapreplace(first, (end_s, place))
    result = [0] * len(costs)
    for rank, share in zip(present, shares, strict=True):
        result[rank] = share
    return tuple(result)


def _nearly(total: int, least: int, costs: Sequence[CostModel], sizes: Sequence[int]) -> list[int]:
    """Return shares by a deadline at which no more than a sample a rank of ``total`` is left.

    The deadline lies between 0 and when one rank could do it all. It is guessed from what ranks do
    by these two, which nearly always takes one or two guesses. Every third one halves the interval,
    because guesses alone do not see steps of many ranks at once.
    """
    shares = [least] * len(costs)
    alone_s = all_seconds([total] * len(costs), costs, sizes)
    early_s, late_s = 0.0, min(alone_s)
    early, late = float(sum(shares)), sum(total * late_s / seconds for seconds in alone_s)
    for attempt in range(1, _MOST_DEADLINES):
        if total - early <= len(costs):
            break
        part = 0.5 if attempt % 3 == 0 else (total - 0.3 * len(costs) - early) / (late - early)
        deadline_s = early_s + part * (late_s - early_s)
        reached = _by_deadline(deadline_s, least, costs, sizes)
        if sum(reached) > total:
            late_s, late = deadline_s, sum(reached)
        else:
            early_s, early, shares = deadline_s, sum(reached), reached
    return shares


def _by_deadline(
    deadline_s: float, least: int, costs: Sequence[CostModel], sizes: Sequence[int]
) -> list[int]:
    """Return samples that each rank finishes by the deadline, but ``least``."""
    return [
        max(
            least,
            int((left_s := deadline_s - window_s) // (full_s := fixed_s + per_sample_s * size))
            * size
            + max(int((left_s % full_s - fixed_s) / per_sample_s), 0),
        )
        for (fixed_s, per_sample_s, window_s), size in zip(costs, sizes, strict=True)
    ]


def without_ones(
    shares: Sequence[int], micro_batch_sizes: Sequence[int | None], idle: Collection[int] = ()
) -> tuple[int, ...]:
    """Move single samples so that no rank computes a micro-batch of one, if that is possible.

    Layers with batch statistics cannot normalise one sample. Of two ranks with such a micro-batch,
    one gives a sample to the other. If one is left over, the largest share that can helps it.

    Args:
        shares: Shares by rank.
        micro_batch_sizes: Most samples in one micro-batch by rank, ``None`` for all in one.
        idle: Ranks that must stay without work.

    Returns:
        Shares of the same sum.
    """
    result = list(shares)

    def has_one(rank: int, step: int = 0) -> bool:
        return _has_one(result[rank] + step, micro_batch_sizes[rank])

    by_size = sorted((r for r in range(len(result)) if r not in idle), key=lambda r: -result[r])
    ones = [rank for rank in reversed(by_size) if has_one(rank)]
    while ones:
        rank = ones.pop()
        if not has_one(rank):
            continue  # another one has helped it
        for other, step in ((r, step) for r in chain(ones[-1:], by_size) for step in (1, -1)):
            is_possible = other != rank and result[other] >= step
            if is_possible and not (has_one(rank, step) or has_one(other, -step)):
                result[rank] += step
                result[other] -= step
                break
    return tuple(result)


def in_whole_micro_batches(shares: Sequence[int], size: int) -> tuple[int, ...]:
    """Return shares of the same sum that are whole micro-batches of ``size`` samples.

    The micro-batches of all ranks are then those of one process, whatever the shares. What remains
    of the sum is the last one, on the last rank that has a share.
    """
    count, rest = divmod(sum(shares), size)
    result = [size * part for part in apportion(count, shares)]
    ranks = [rank for rank, share in enumerate(result) if share]
    result[ranks[-1] if ranks else shares.index(max(shares))] += rest
    return tuple(result)


def _has_one(share: int, micro_batch_size: int | None) -> bool:
    """Return whether a share leaves a micro-batch of one sample, where larger ones are allowed."""
    if micro_batch_size is None:
        return share == 1
    return micro_batch_size > 1 and share % micro_batch_size == 1
