"""The ranks as one of them sees them: who is present, and what joins them."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from evener.comm.base import Communicator
from evener.errors import CollectiveError, CollectiveTimeoutError
from evener.places import here
from evener.protocol.row import Row, decode, encode

#: Longest wait of a parked rank for a call: others may evaluate or save for hours in between.
PARKED_TIMEOUT_S = 7 * 24 * 3600.0
#: Parked ranks are called at the end of the first window after so many seconds.
CALL_S = 0.5

_CALL = "the call to parked ranks"


class Team:
    """Exchanges rows between ranks.

    A *parked* rank costs more than it brings. It leaves every exchange and waits to be called; the
    others go on over a communicator of their own. They call twice a second: so a parked rank that
    was told to stop can say so, and either side notices when the other is gone. Ranks keep their
    numbers.

    Attributes:
        rank: Number of this rank.
        world_size: Ranks of the team, those that are parked included.
        members: Ranks that are present, in order.
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.members = tuple(range(comm.world_size))
        self._whole = comm
        self._small: Communicator | None = None
        self._called_s = 0.0  # on the monotonic clock

    @property
    def comm(self) -> Communicator:
        """Joins the ranks that are present."""
        return self._small or self._whole

    @property
    def parked(self) -> frozenset[int]:
        """Ranks that are not present."""
        return frozenset(range(self.world_size)) - frozenset(self.members)

    @property
    def has_ended(self) -> bool:
        """Whether a connection was closed or lost."""
        return self.comm.has_ended or self._whole.has_ended

    def exchange(self, row: Row) -> dict[int, Row]:
        """Gives every rank that is present each one's row, in rank order; all call it together."""
        return self._exchange(row, self.comm, self.members)

    def introduce(
        self, greeting: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Gives every rank that is present each one's JSON, in rank order; all call it together."""
        payload = json.dumps(greeting).encode()
        answers = self.comm.all_gather_bytes(payload, what="greetings", timeout_s=timeout_s)
        return [json.loads(answer) for answer in answers]

    def places(self) -> dict[int, str]:
        """Where each rank is in the user's code, as far as ranks can say it."""
        try:
            told = self.comm.all_gather_bytes(
                here().encode(), what="places of ranks", timeout_s=min(10.0, self.comm.timeout_s)
            )
        except CollectiveError:
            return {}
        return {rank: place.decode() for rank, place in zip(self.members, told, strict=True)}

    # ── the door ─────────────────────────────────────────────────────────────────────────────────

    def park(self, rank: int) -> None:
        """Lets a rank leave the exchanges; all ranks that are present call it together."""
        members = tuple(member for member in self.members if member != rank)
        old = self._small
        self._small = self.comm.split([self.members.index(m) for m in members], name="active")
        self.members = members
        if old is not None:
            old.close()

    @property
    def call_is_due(self) -> bool:
        """Whether parked ranks should be called."""
        return bool(self.parked) and time.monotonic() - self._called_s >= CALL_S

    def call(self, row: Row, *, is_parked: bool) -> dict[int, Row]:
        """Meets all ranks at the door: those that work call, those that are parked wait for it."""
        # A rank says what it wants when an exchange begins. This wait comes first, so that what a
        # parked rank says then is not as old as the call before.
        self._whole.barrier(what=_CALL, timeout_s=PARKED_TIMEOUT_S if is_parked else None)
        self._called_s = time.monotonic()
        return self._exchange(row, self._whole, range(self.world_size))

    def rejoin(self) -> None:
        """All ranks are present again."""
        if self._small is not None:
            self._small.close()
        self._small = None
        self.members = tuple(range(self.world_size))

    def hurry(self, timeout_s: float) -> None:
        """Shortens the deadlines of exchanges, also of one that is under way."""
        self.comm.hurry(timeout_s)
        self._whole.hurry(timeout_s)

    def close(self) -> None:
        """Lets the connections go, without waiting for any rank; idempotent."""
        self.comm.close()

    def _exchange(self, row: Row, comm: Communicator, ranks: Iterable[int]) -> dict[int, Row]:
        # The same words on every rank: what a rank wants is in its row, so that ranks which want
        # different things meet all the same, and each can say who wanted what.
        numbers = encode(row, self.world_size) if comm.world_size > 1 else []
        try:
            rows = comm.all_gather_rows(numbers, what="a meeting of the team")
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{error} (rank {comm.number} was {row.purpose.deed} in window {row.window})",
                missing=error.missing,
            ) from None
        return {
            rank: row if rank == self.rank else decode(received)
            for rank, received in zip(ranks, rows, strict=True)
        }
