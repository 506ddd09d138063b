"""Cut an evaluation into slices, on which all ranks work at the same time."""

from collections.abc import Sequence
from fractions import Fraction

from evener.planning.shares import apportion

#: Samples of each rank in a slice of an evaluation.
Parts = tuple[int, ...]


def evaluation_slices(
    num_samples: int, batch_sizes: Sequence[int], speeds: Sequence[float]
) -> list[Parts]:
    """Divide a data set into consecutive slices, whose parts follow in rank order.

    The fastest rank has a whole batch in each slice, the others as much of theirs as they do in
    the same time, at least one sample. Exact arithmetic, hence the same on every machine.

    Only where whole slices have not two samples a rank, one slice may be left with fewer samples
    than ranks. It is the last but one: in the last slice every rank has a sample, so that it
    can be told then what it has missed; unless there are fewer samples than ranks in all.

    Args:
        num_samples: Samples of the data set, 0 or more.
        batch_sizes: Most samples of a rank in a slice, at least 1.
        speeds: Samples per second of each rank; 0 for one that takes no part, not for all.

    Returns:
        The slices, in order; none where there is no sample.
    """
    working = [rank for rank, speed in enumerate(speeds) if speed > 0]
    seconds = min(batch_sizes[rank] / Fraction(speeds[rank]) for rank in working)
    whole = tuple(max(int(Fraction(s) * seconds), int(s > 0)) for s in speeds)
    return [_divide(size, whole) for size in _sizes(num_samples, sum(whole), len(working))]


def _sizes(num_samples: int, whole: int, num_ranks: int) -> list[int]:
    """Return the sizes of the slices; every rank has a sample in the last one."""
    count, rest = divmod(num_samples, whole)
    if rest >= num_ranks or rest == 0 or count == 0:
        return [whole] * count + [rest] * (rest > 0)
    if whole + rest >= 2 * num_ranks:
        half = (whole + rest) // 2
        return [whole] * (count - 1) + [half, whole + rest - half]
    # As late as possible, so that ranks have been in the same number of slices if a loop is left
    # early.
    return [whole] * (count - 1) + [rest, whole]


def _divide(size: int, whole: Parts) -> Parts:
    """Divide a slice in proportion to the parts of a whole one, with a sample each if possible."""
    present = [rank for rank, part in enumerate(whole) if part]
    if size <= len(present):
        return tuple(int(rank in present[:size]) for rank in range(len(whole)))
    if size == sum(whole):
        return whole
    beyond = apportion(size - len(present), [max(0, part - 1) for part in whole])
    return tuple(more + (part > 0) for part, more in zip(whole, beyond, strict=True))
