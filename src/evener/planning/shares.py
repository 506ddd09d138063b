"""Whole shares of a fixed sum with the earliest finish, and whether a rank is worth its exchange.

Pure functions of predicted costs.
"""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace

from evener.errors import ConfigError
from evener.planning.speed import CostModel

_MOST_HALVINGS = 64
"""Halvings of the deadline after which float64 cannot tell more."""

_WORTHWHILE = 0.05
"""The team is changed only for a window that is shorter by more than this."""


def equal_shares(total: int, world_size: int) -> tuple[int, ...]:
    """``total`` in whole shares that differ by one at most, the larger ones first."""
    share, extra = divmod(total, world_size)
    return tuple(share + (rank < extra) for rank in range(world_size))


def finish_s(
    shares: Sequence[int], costs: Sequence[CostModel], micro_batch_sizes: Sequence[int | None]
) -> float:
    """Predicted seconds until the last rank has finished its share."""
    return max(
        cost.seconds(share, size)
        for share, cost, size in zip(shares, costs, micro_batch_sizes, strict=True)
    )


def fastest_shares(
    total: int,
    costs: Sequence[CostModel],
    micro_batch_sizes: Sequence[int | None],
    min_shares: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Whole shares of ``total`` whose latest finish is earliest.

    Costs grow with the share, so what a rank can do by a deadline does too: the deadline is halved
    down to a few samples too many, which are then taken, one by one, from whoever finishes last.
    Each step keeps the best allocation within reach, so the result is optimal up to rounding in
    float64. At equal micro-batch sizes a rank that is no slower never gets less.

    Args:
        total: Samples to share out.
        costs: Cost by rank; ``per_sample_s`` above 0.
        micro_batch_sizes: Most samples in one micro-batch by rank, ``None`` for all in one.
        min_shares: Samples that each rank gets at least; none unless given.

    Returns:
        Shares by rank; they sum to ``total``.

    Raises:
        ConfigError: ``min_shares`` sum to more than ``total``.
    """
    least = [0] * len(costs) if min_shares is None else list(min_shares)
    if sum(least) > total:
        raise ConfigError(f"shares of at least {least} do not fit into {total} samples")
    ranks = tuple(zip(costs, micro_batch_sizes, least, strict=True))
    # One rank could do it all by then; the margin covers rounding on the way back.
    latest = min(cost.seconds(total, size) for cost, size, _ in ranks) * (1.0 + 1e-9)
    earliest = 0.0
    shares = _by_deadline(ranks, total, latest)
    for _ in range(_MOST_HALVINGS):
        if sum(shares) <= total + len(shares):
            break
        deadline = 0.5 * (earliest + latest)
        tried = _by_deadline(ranks, total, deadline)
        if sum(tried) >= total:
            latest, shares = deadline, tried
        else:
            earliest = deadline
    return _trimmed(shares, total, ranks)


def worth_keeping(
    total: int,
    costs: Sequence[CostModel],
    micro_batch_sizes: Sequence[int | None],
    exchange_s: float,
    kept: Sequence[bool] | None = None,
) -> tuple[bool, ...]:
    """Which ranks make the window shorter than it would be without them.

    Compares the fastest one, two, ... ranks, each time with the best shares. A single rank has
    nothing to exchange.

    Args:
        total: Samples of the global batch.
        costs: Cost by rank, in seconds.
        micro_batch_sizes: Most samples in one micro-batch by rank, ``None`` for all in one.
        exchange_s: Seconds that the exchange of two or more ranks adds to a window.
        kept: Which ranks are in at present, all unless given. They stay unless another choice is
            more than 5 % shorter, so that noise does not park and recall.

    Returns:
        By rank, whether it should be in.
    """
    world_size = len(costs)
    by_speed = sorted(
        range(world_size), key=lambda rank: costs[rank].seconds(total, micro_batch_sizes[rank])
    )

    def window_s(chosen: Sequence[int]) -> float:
        sizes = [micro_batch_sizes[rank] for rank in chosen]
        chosen_costs = [costs[rank] for rank in chosen]
        compute_s = finish_s(fastest_shares(total, chosen_costs, sizes), chosen_costs, sizes)
        return compute_s + (exchange_s if len(chosen) > 1 else 0.0)

    choices = [by_speed[:count] for count in range(world_size, 0, -1)]
    best = min(choices, key=window_s)
    present = [rank for rank in range(world_size) if kept is None or kept[rank]]
    if present and window_s(best) >= (1.0 - _WORTHWHILE) * window_s(present):
        best = present
    return tuple(rank in best for rank in range(world_size))


def without_ones(
    shares: Sequence[int],
    micro_batch_sizes: Sequence[int | None],
    idle: Collection[int] = (),
    min_share: int = 0,
) -> tuple[int, ...]:
    """Moves single samples so that no rank computes a micro-batch of one, where that is possible.

    Layers with batch statistics cannot normalise one sample.

    Args:
        shares: Shares by rank.
        micro_batch_sizes: Most samples in one micro-batch by rank, ``None`` for all in one.
        idle: Ranks that must stay without work.
        min_share: Samples that a rank with work keeps at least.

    Returns:
        Shares of the same sum; the largest ones give and take.
    """
    result = list(shares)
    active = [rank for rank in range(len(result)) if rank not in idle]
    for rank in active:
        if not _has_one(result[rank], micro_batch_sizes[rank]):
            continue
        by_share = sorted((r for r in active if r != rank), key=lambda r: -result[r])
        for other in by_share:
            moved = next(
                (
                    step
                    for step in (1, -1)  # take one, or give one
                    if result[rank] + step >= min_share
                    and result[other] - step >= min(min_share, result[other])
                    and result[other] - step >= 0
                    and not _has_one(result[rank] + step, micro_batch_sizes[rank])
                    and not _has_one(result[other] - step, micro_batch_sizes[other])
                ),
                None,
            )
            if moved is not None:
                result[rank] += moved
                result[other] -= moved
                break
    return tuple(result)


def _has_one(share: int, micro_batch_size: int | None) -> bool:
    """Whether a share leaves a micro-batch of one sample, where larger ones are allowed."""
    if micro_batch_size is None:
        return share == 1
    return micro_batch_size > 1 and share % micro_batch_size == 1


def _by_deadline(
    ranks: Sequence[tuple[CostModel, int | None, int]], total: int, deadline_s: float
) -> list[int]:
    """Samples, up to ``total``, that each rank finishes by the deadline, but its least share."""
    shares = []
    for cost, size, least in ranks:
        fixed_s, per_sample_s = cost.fixed_s, cost.per_sample_s
        if size is None:
            share = int((deadline_s - fixed_s) / per_sample_s)
        else:
            full_s = fixed_s + per_sample_s * size
            full = int(deadline_s / full_s)
            rest = int((deadline_s - full * full_s - fixed_s) / per_sample_s)
            share = full * size + max(rest, 0)
        shares.append(max(least, min(share, total)))
    return shares


def _trimmed(
    shares: list[int], total: int, ranks: Sequence[tuple[CostModel, int | None, int]]
) -> tuple[int, ...]:
    """Take samples from whoever finishes last, the highest rank first, until ``total`` are left."""
    excess = sum(shares) - total
    last = [
        (-cost.seconds(share, size), -rank)
        for rank, (share, (cost, size, least)) in enumerate(zip(shares, ranks, strict=True))
        if share > least
    ]
    heapify(last)
    for _ in range(excess):
        rank = -last[0][1]
        cost, size, least = ranks[rank]
        shares[rank] -= 1
        if shares[rank] > least:
            heapreplace(last, (-cost.seconds(shares[rank], size), -rank))
        else:
            heappop(last)
    return tuple(shares)
