"""Cut an evaluation into slices, on which all ranks work at the same time."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from evener.planning.shares import apportion

#: The samples of each rank in a slice of an evaluation, by rank.
Parts = dict[int, Sequence[int]]


def evaluation_slices(
    samples: Sequence[int], batch_sizes: Mapping[int, int], speeds: Mapping[int, float]
) -> Iterator[Parts]:
    """Cut samples into consecutive slices, whose parts follow in rank order.

    Every rank has a sample in each slice. The fastest rank has a whole batch, the others as many
    samples as they process in the same time. The last slices are smaller; with tiny batches, a part
    of the last one may be larger than a batch. If there are fewer samples than ranks, the first
    rank has all of them. The arithmetic is exact, so all machines get the same slices.

    Args:
        samples: Their positions, in order.
        batch_sizes: Samples of a batch of each rank, in rank order.
        speeds: Samples per second of each rank, above 0.

    Yields:
        The slices, in order; none without samples.
    """
    num_ranks = len(batch_sizes)
    if len(samples) < num_ranks:
        if samples:
            yield {min(batch_sizes): samples}
        return
    seconds = min(size / Fraction(speeds[rank]) for rank, size in batch_sizes.items())
    whole = [max(1, int(Fraction(speeds[rank]) * seconds)) for rank in batch_sizes]
    sizes = _sizes(len(samples), sum(whole), num_ranks)
    # Each rank has one sample, and the rest is divided like a whole slice.
    ratios = [part - 1 for part in whole] if sum(whole) > num_ranks else whole
    divided = {size: apportion(size - num_ranks, ratios) for size in {*sizes}}
    start = 0
    for size in sizes:
        parts: Parts = {}
        for rank, further in zip(batch_sizes, divided[size], strict=True):
            parts[rank] = samples[start : start + 1 + further]
            start += 1 + further
        yield parts


def _sizes(num_samples: int, whole: int, num_ranks: int) -> list[int]:
    """Return the sizes of the slices, each of at least ``num_ranks`` samples."""
    count, rest = divmod(num_samples, whole)
    sizes = [whole] * count
    if rest >= num_ranks:
        sizes.append(rest)
    elif rest:
        last = sizes.pop() + rest
        sizes += apportion(last, [1, 1]) if last >= 2 * num_ranks else [last]
    return sizes
