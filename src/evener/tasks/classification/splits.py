"""Which samples are held out: class by class, and by whole groups where there are any."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

from evener.errors import DataError
from evener.tasks.classification.samples import Record


def split_records(
    records: Sequence[Record], fraction: float, seed: int
) -> tuple[list[Record], list[Record]]:
    """Split samples into training and held-out ones.

    Each class gives about ``fraction`` of its samples, at least one and never all. Samples of one
    group stay together: a text is never held out while one of its group is trained on. Which ones
    depends on ``seed`` and on what they are, not on their order.

    Args:
        records: The samples.
        fraction: Part to hold out, between 0 and 1.
        seed: Seed of the choice.

    Raises:
        DataError: A class has too few samples or groups to be on both sides.
    """
    sizes: dict[str | int, Counter[str]] = defaultdict(Counter)
    for record in records:
        sizes[record.label][record.group] += 1
    held: set[str] = set()
    for label in sorted(sizes, key=str):
        held.update(_choose(sizes[label], fraction, seed, held))
    training = [record for record in records if record.group not in held]
    heldout = [record for record in records if record.group in held]
    for label, groups in sizes.items():
        if all(group in held for group in groups) or not any(group in held for group in groups):
            noun = "different text(s)" if records[0].group == records[0].text else "group(s)"
            where = next(record.where for record in records if record.label == label)
            raise DataError(
                f"{where}: class {label!r} has {len(groups)} {noun}, too few to be both in "
                "training and in the held-out part; add samples of it, or give the held-out part "
                "as data.heldout_path"
            )
    return training, heldout


def _choose(groups: Counter[str], fraction: float, seed: int, held: set[str]) -> list[str]:
    """Return groups of about ``fraction`` of a class, in an order that the seed decides."""
    order = sorted(
        groups, key=lambda g: hashlib.blake2b(f"{seed} {g}".encode(), digest_size=8).digest()
    )
    wanted = fraction * sum(groups.values())
    num_held = sum(groups[g] for g in groups.keys() & held)
    chosen: list[str] = []
    for group in order:
        # A group that overshoots by half of what is wanted waits for one that fits better.
        if group not in held and num_held + groups[group] <= 1.5 * wanted:
            if num_held >= wanted:
                break
            chosen.append(group)
            num_held += groups[group]
    if len(chosen) > 1 and groups.keys() <= held.union(chosen):
        chosen.pop()  # something has to be left to train on
    if not num_held:
        chosen.append(min(order, key=lambda g: groups[g]))
    return chosen
