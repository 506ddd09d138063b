"""Whole shares of a fixed sum with the earliest finish.

Pure functions of predicted costs.
"""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from evener.errors import ConfigError
from evener.planning.apportion import apportion
from evener.planning.speed import CostModel

_MOST_DEADLINES = 64
"""Deadlines tried at most; after that there is more to take back, but nothing else is lost."""

_Ranks = tuple[Sequence[CostModel], Sequence[int], Sequence[int]]
"""Costs, most samples in a micro-batch, and least shares, each by rank."""


def finish_s(
    shares: Sequence[int], costs: Sequence[CostModel], micro_batch_sizes: Sequence[int | None]
) -> float:
    """Return the predicted seconds until the last rank with a share has finished it."""
    seconds = _seconds(shares, costs, micro_batch_sizes)
    return max((s for s, share in zip(seconds, shares, strict=True) if share), default=0.0)


def fastest_shares(
    total: int,
    costs: Sequence[CostModel],
    micro_batch_sizes: Sequence[int | None],
    min_shares: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the whole shares of ``total`` whose latest finish is earliest.

    Costs grow with the share, so what a rank can do by a deadline does too: a deadline is sought by
    which ranks can do a few samples too many, which are then taken, one by one, from whoever
    finishes last. So the result is optimal up to rounding in float64. At equal micro-batch sizes a
    rank that is no slower never gets less.

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
    if total == 0:
        return tuple(least)
    ranks = costs, [size or total for size in micro_batch_sizes], least
    fewer, more = _nearly(total, ranks)
    return _between(fewer, more, total, ranks)


def without_ones(
    shares: Sequence[int],
    micro_batch_sizes: Sequence[int | None],
    idle: Collection[int] = (),
    min_share: int = 0,
) -> tuple[int, ...]:
    """Move single samples so that no rank computes a micro-batch of one, where that is possible.

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
    active = sorted(set(range(len(result))).difference(idle))
    partners = [(-result[rank], rank) for rank in active]
    heapify(partners)

    def step_with(rank: int, other: int) -> int:
        """Return 1 if ``rank`` can take a sample from ``other``, -1 if it can give one, else 0."""
        for step in (1, -1):
            mine, theirs = result[rank] + step, result[other] - step
            if (
                mine >= min_share
                and theirs >= max(0, min(min_share, result[other]))
                and not _has_one(mine, micro_batch_sizes[rank])
                and not _has_one(theirs, micro_batch_sizes[other])
            ):
                return step
        return 0

    for rank in active:
        if not _has_one(result[rank], micro_batch_sizes[rank]):
            continue
        step = 0
        while partners and not step:
            share, other = heappop(partners)
            # A rank that can help no other now is asked again when its share has changed.
            if other != rank and share == -result[other]:
                step = step_with(rank, other)
        if step:
            result[rank] += step
            result[other] -= step
            heappush(partners, (-result[other], other))
        heappush(partners, (-result[rank], rank))
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


def _seconds(
    shares: Sequence[int], costs: Sequence[CostModel], sizes: Sequence[int | None]
) -> list[float]:
    """Return ``CostModel.seconds`` of each rank, without a call for each: teams may be large."""
    return [
        window_s + fixed_s * -(-share // (size or share or 1)) + per_sample_s * share
        for share, (fixed_s, per_sample_s, window_s), size in zip(shares, costs, sizes, strict=True)
    ]


def _nearly(total: int, ranks: _Ranks) -> tuple[Sequence[int], Sequence[int]]:
    """Return shares by two deadlines: one too early for ``total``, and one late enough.

    By the later one ranks do at most a sample each too many. It lies between 0 and when one rank
    could do it all, and is guessed from how many samples ranks can do by the two: nearly always the
    second or third guess will do. If two guesses in a row leave one end where it is, that end loses
    half of its weight. Otherwise steps of many ranks at once, which guesses do not see, could keep
    guesses on one side.
    """
    costs, sizes, fewer = ranks
    wanted = total + 0.25 * len(costs)
    alone_s = _seconds([total] * len(costs), costs, sizes)
    early_s, late_s = 0.0, min(alone_s) * (1.0 + 1e-9)  # a margin for rounding
    missing, surplus = wanted, late_s * sum(total / seconds for seconds in alone_s) - wanted
    more = was_early = None
    for _ in range(_MOST_DEADLINES):
        part = missing / (missing + surplus) if surplus > 0 else 1.0
        deadline_s = early_s + part * (late_s - early_s)
        shares = _by_deadline(deadline_s, ranks)
        reached = sum(shares)
        is_early = reached < total
        weight = 0.5 if is_early == was_early else 1.0
        was_early = is_early
        if is_early:
            early_s, fewer = deadline_s, shares
            missing, surplus = wanted - reached, weight * surplus
        else:
            late_s, more = deadline_s, shares
            missing, surplus = weight * missing, reached - wanted
            if reached <= total + len(costs):
                break
    return fewer, more or _by_deadline(late_s, ranks)


def _by_deadline(deadline_s: float, ranks: _Ranks) -> list[int]:
    """Return samples that each rank finishes by the deadline, but its least share."""
    return [
        max(
            least,
            int((left_s := deadline_s - window_s) // (full_s := fixed_s + per_sample_s * size))
            * size
            + max(int((left_s % full_s - fixed_s) / per_sample_s), 0),
        )
        for (fixed_s, per_sample_s, window_s), size, least in zip(*ranks, strict=True)
    ]


def _between(
    fewer: Sequence[int], more: Sequence[int], total: int, ranks: _Ranks
) -> tuple[int, ...]:
    """Take samples from the last to finish, the highest rank first, until ``total`` are left."""
    costs, sizes, _ = ranks
    shares = list(more)
    last = [
        (-seconds, -rank)
        for rank, seconds in enumerate(_seconds(shares, costs, sizes))
        if more[rank] > fewer[rank]
    ]
    heapify(last)
    for _ in range(sum(more) - total):
        rank = -last[0][1]
        shares[rank] -= 1
        if shares[rank] > fewer[rank]:
            heapreplace(last, (-costs[rank].seconds(shares[rank], sizes[rank]), -rank))
        else:
            heappop(last)
    return tuple(shares)
