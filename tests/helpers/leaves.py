"""Ways to connect that misbehave, for the child processes of a preflight; Gloo carries them.

Each is a function like ``evener.team.fixed.connect_children``, named ``helpers.leaves:FUNCTION``.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from evener.comm.base import Communicator
from evener.team.fixed import connect_children

#: The rank that misbehaves.
CULPRIT = 1
#: How long the others wait for one that hangs.
SOON_S = 1.0


class _Leaf:
    """A communicator that does something before an exchange, or gives wrong numbers after it."""

    def __init__(
        self, comm: Communicator, deeds: Mapping[str, Callable[[], None]], wrong: str = ""
    ) -> None:
        self._comm = comm
        self._deeds = deeds
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, tensor: Tensor, *, what: str, timeout_s: float) -> None:
        self._before(what)
        if what in self._deeds:  # whoever waits for the culprit need not wait for long
            timeout_s = SOON_S
        self._comm.all_reduce(tensor, what=what, timeout_s=timeout_s)

    def broadcast(self, tensor: Tensor, src: int, *, what: str, timeout_s: float) -> None:
        self._before(what)
        self._comm.broadcast(tensor, src, what=what, timeout_s=timeout_s)

    def all_gather_parts(self, flat: Tensor, *, what: str, timeout_s: float) -> None:
        self._before(what)
        self._comm.all_gather_parts(flat, what=what, timeout_s=timeout_s)
        if self._comm.rank == CULPRIT and what == self._wrong:
            flat[-1] += 1

    def _before(self, what: str) -> None:
        if self._comm.rank == CULPRIT and what in self._deeds:
            self._deeds[what]()


def _over_gloo(*place: Any, backend: str, **options: Any) -> Communicator:
    assert backend == "nccl"
    return connect_children(*place, backend="gloo", **options)


def _hang() -> None:
    while True:
        time.sleep(60)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def honest(*place: Any, **options: Any) -> Any:
    return _over_gloo(*place, **options)


def lies(*place: Any, **options: Any) -> Any:
    return _Leaf(_over_gloo(*place, **options), {}, wrong="all_gather of 1 KiB")


def dies(*place: Any, **options: Any) -> Any:
    return _Leaf(_over_gloo(*place, **options), {"broadcast of 1 MiB": _die})


def hangs(*place: Any, **options: Any) -> Any:
    return _Leaf(_over_gloo(*place, **options), {"all_reduce of 1 MiB": _hang})


def waits_for_its_end(rank: int, *place: Any, **options: Any) -> Any:
    """Says on which process it is, and hangs."""
    with Path(os.environ["TEST_MAILBOX"]).open("w") as mailbox:
        mailbox.write(f"{rank} {os.getpid()}\n")
    _hang()
