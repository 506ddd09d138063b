"""The end of a user's loop over a loader, where the script ends first."""

import weakref
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


def closed_at_exit(
    epoch: Callable[P, Generator[Any, None, None]],
) -> Callable[P, Generator[Any, None, None]]:
    """Close generators that a script still holds when it ends, as after ``it = iter(loader)``.

    Python would end them after it has cleared modules, so their own code would fail.
    """

    @wraps(epoch)
    def open_epoch(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, None, None]:
        batches = epoch(*args, **kwargs)
        weakref.finalize(batches, _close, weakref.ref(batches))
        return batches

    return open_epoch


def _close(held: weakref.ref[Generator[Any, None, None]]) -> None:
    if (batches := held()) is not None:
        batches.close()
