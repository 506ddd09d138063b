"""The signature of a data set: workers of one team must have the same."""

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from evener.data.cursor import derive_seed
from evener.data.fetching import DEFAULT_TIMEOUT_S, Fetcher
from evener.data.randomness import generators_lock, preserved_generators
from evener.errors import DataError

#: Items that are read at most, beside the first and the last one.
_NUM_DRAWN: Final = 6
#: Seconds after which no further item is read.
_READING_S: Final = 0.5


def sign(fetcher: Fetcher, num_samples: int) -> dict[str, Any]:
    """Return facts about a data set, by name, that are equal for the same data in the same order.

    They are its length, the types of its first item, and a digest of each of a few items. Items are
    read as in epoch 0, with their randomness derived from the seed. Each is read twice: one that
    then differs has no digest. Reading ends after half a second, so a slow worker gives fewer
    facts; those that two workers both give are compared.

    Args:
        fetcher: Reads the items. One that cannot be read is left out: training will report it.
        num_samples: Items of the data set.
    """
    facts: dict[str, Any] = {"data length": num_samples}
    drawn = [derive_seed("signature", k) % num_samples for k in range(_NUM_DRAWN)]
    end_s = time.monotonic() + _READING_S
    with generators_lock, preserved_generators():
        for index in dict.fromkeys([0, num_samples - 1, *drawn]):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not (first := _read(fetcher, index)):
                break
            if index == 0:
                facts["data types"] = ", ".join(kind for kind, _ in first)
            # Reading it again takes as long as reading it did.
            if end_s - time.monotonic() > left_s / 2 and _read(fetcher, index) == first:
                digest = hashlib.blake2b(repr(first).encode(), digest_size=8)
                facts[f"data of item {index}"] = digest.hexdigest()
    return facts


def _read(fetcher: Fetcher, index: int) -> list[tuple[str, str]]:
    """Return type and content of each value of an item; nothing if it cannot be read."""
    try:
        return show_contents(fetcher.submit(0, [index]).result(DEFAULT_TIMEOUT_S))
    except DataError:
        return []


def show_contents(item: Any) -> list[tuple[str, str]]:
    """Return type and content of each value of an item, or of a batch; contents as digests."""
    if isinstance(item, Mapping):  # also those that torch's pytree does not know
        item = dict(sorted(item.items(), key=lambda entry: str(entry[0])))
    return [_show(value) for value in tree_leaves(item)]


def _show(value: Any) -> tuple[str, str]:
    kind = type(value).__name__
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return kind, repr(value)
    # Of an object of the user's own, an array of objects or a sparse tensor, the type has to do.
    with suppress(TypeError, ValueError, RuntimeError):
        tensor = torch.as_tensor(value).detach()
        kind = f"{kind} {tensor.dtype}"
        # As bytes, since NumPy does not know bfloat16.
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(content.tobytes(), digest_size=16)
        return kind, f"{[*tensor.shape]} {digest.hexdigest()}"
    return kind, ""
