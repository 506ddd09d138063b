"""Who takes part in the exchange of a window: the whole team, or those who are not parked."""

from collections.abc import Mapping, Sequence
from typing import Any

from evener.comm.base import Communicator
from evener.run.team.team import Meeting, Team

#: A parked rank waits for its recall this long: to the end of an epoch, or to the next trial.
PARKED_TIMEOUT_S = 7 * 24 * 3600.0


class ActiveTeam:
    """The team as a window sees it.

    A *parked* rank costs more than it brings. It leaves every exchange and waits for a recall; the
    others go on over a communicator of their own. Ranks keep their numbers: rows of parked ranks
    are zeros.
    """

    def __init__(self, whole: Team) -> None:
        self.whole = whole
        self.rank = whole.rank
        self.world_size = whole.world_size
        self.parked: frozenset[int] = frozenset()
        self._small: Team | None = None
        self._members: tuple[int, ...] = tuple(range(whole.world_size))

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

    def wait_for_recall(self, window: int, leaving: int) -> tuple[list[float], int]:
        """Waits, parked, until the others call back; returns what rank 0 said and who leaves."""
        rows, anyone = self.whole.meet(
            Meeting.PARKED, window=window, leaving=leaving, timeout_s=PARKED_TIMEOUT_S
        )
        self._rejoin()
        return rows[0], anyone

    def recall(self, window: int, leaving: int, payload: Sequence[float]) -> int:
        """Calls parked ranks back; all ranks that are not parked call it together.

        Returns:
            Whether somebody leaves, a parked rank perhaps.
        """
        _, anyone = self.whole.meet(Meeting.RECALL, window=window, leaving=leaving, payload=payload)
        self._rejoin()
        return anyone

    def introduce(self, greeting: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchanges JSON between those who are not parked; see ``Team.introduce``."""
        return (self._small or self.whole).introduce(greeting)

    def _rejoin(self) -> None:
        if self._small is not None:
            self._small.comm.close()
        self._small = None
        self.parked = frozenset()
        self._members = tuple(range(self.world_size))
