"""Who takes part in the exchange of a window: the whole team, or those who are not parked."""

import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from evener.comm.base import Communicator
from evener.engine.team import Meeting, Team

#: Longest wait of a parked rank for a call: others may evaluate or save for hours in between.
PARKED_TIMEOUT_S = 7 * 24 * 3600.0
#: Parked ranks are called at the end of the first window after so many seconds.
CALL_S = 0.5

_CALL = "the call to parked ranks"


class Call(IntEnum):
    """What ranks that work tell those that are parked."""

    STAY = 0
    GO_ON = 1
    """Come back: the epoch goes on."""
    END = 2
    """Come back: the epoch is over, or the team stops."""
    LEFT = 3
    """Come back: the others have left the loop by ``break``."""


class ActiveTeam:
    """The team as a window sees it.

    A *parked* rank costs more than it brings. It leaves every exchange and waits to be called; the
    others go on over a communicator of their own. They call twice a second: so a parked rank that
    was told to stop can say so, and either side notices when the other is gone. Ranks keep their
    numbers: rows of parked ranks are zeros.
    """

    def __init__(self, whole: Team) -> None:
        self.whole = whole
        self.rank = whole.rank
        self.world_size = whole.world_size
        self.parked: frozenset[int] = frozenset()
        self._small: Team | None = None
        self._members: tuple[int, ...] = tuple(range(whole.world_size))
        self._called_s = 0.0  # on the monotonic clock

    @property
    def comm(self) -> Communicator:
        """What gradients and buffers are exchanged over."""
        return self.whole.comm if self._small is None else self._small.comm

    @property
    def is_parked(self) -> bool:
        """Whether this rank is parked."""
        return self.rank in self.parked

    def meet(
        self, kind: Meeting, *, window: int, leaving: int = 0, payload: Sequence[float] = ()
    ) -> tuple[list[list[float]], int]:
        """Meets those who are not parked; see ``Team.meet``. Rows are by rank of the whole team."""
        if self._small is None:
            return self.whole.meet(kind, window=window, leaving=leaving, payload=payload)
        rows, anyone = self._small.meet(kind, window=window, leaving=leaving, payload=payload)
        spread = [[0.0] * len(rows[0]) for _ in range(self.world_size)]
        for rank, row in zip(self._members, rows, strict=True):
            spread[rank] = row
        return spread, anyone

    def park(self, rank: int) -> None:
        """Lets a rank leave the exchanges; all ranks that are not parked call it together."""
        members = [r for r in self._members if r != rank]
        places = [self._members.index(r) for r in members]
        old = self._small
        comm = self.comm.split(places, name="active")
        self.parked |= {rank}
        self._members = tuple(members)
        self._small = None if comm is None else Team(comm, payload_length=self.whole.payload_length)
        if old is not None:
            old.comm.close()

    @property
    def call_is_due(self) -> bool:
        """Whether parked ranks should be called; rank 0's word counts."""
        return bool(self.parked) and time.monotonic() - self._called_s >= CALL_S

    def call(self, said: Call, *, window: int, leaving: int) -> int:
        """Calls the parked ranks; all ranks that are not parked call it together.

        Args:
            said: What they shall do.
            window: As in ``meet``.
            leaving: As in ``meet``.

        Returns:
            Whether a rank leaves, a parked one perhaps.
        """
        self.whole.comm.barrier(what=_CALL)
        _, anyone = self.whole.meet(
            Meeting.CALL, window=window, leaving=leaving, payload=[float(said)]
        )
        self._called_s = time.monotonic()
        if said is not Call.STAY:
            self._rejoin()
        return anyone

    def wait_for_call(self, window: int, wants_stop: Callable[[], bool]) -> tuple[Call, int]:
        """Waits, parked, to be called back.

        Args:
            window: As in ``meet``.
            wants_stop: Whether this rank was told to stop; asked at each call.

        Returns:
            What the others say, and whether a rank leaves.
        """
        said = Call.STAY
        while said is Call.STAY:
            # A rank says what it wants when an exchange begins. This wait comes first, so that
            # what it says then is not as old as the call before.
            self.whole.comm.barrier(what=_CALL, timeout_s=PARKED_TIMEOUT_S)
            rows, anyone = self.whole.meet(Meeting.PARKED, window=window, leaving=int(wants_stop()))
            said = Call(int(rows[0][0]))
        self._rejoin()
        return said, anyone

    def introduce(self, greeting: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchanges JSON between those who are not parked; see ``Team.introduce``."""
        return (self._small or self.whole).introduce(greeting)

    def _rejoin(self) -> None:
        if self._small is not None:
            self._small.comm.close()
        self._small = None
        self.parked = frozenset()
        self._members = tuple(range(self.world_size))
