"""Rounds: the ranks exchange rows, and each of them finds out what follows."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from torch import Tensor

from evener.comm.base import Communicator
from evener.engine.team import Team
from evener.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError
from evener.places import here
from evener.planning.policies import ApplyPolicy
from evener.planning.report import LATE_FIELDS, NOTHING, RankRecord, Report
from evener.protocol import wording
from evener.protocol.machine import Decision, Phase, State, judge
from evener.protocol.row import Purpose, Row, decode, encode

#: Longest wait of a parked rank for a row: others may evaluate or save for hours in between.
PARKED_TIMEOUT_S: Final = 7 * 24 * 3600.0

_LATER: Final = {name: getattr(NOTHING, name) for name in LATE_FIELDS}

#: Longest wait for where each rank is, once they have met in different calls.
_TELLING_S: Final = 10.0


class Round(NamedTuple):
    """A round: rows of the ranks that are not parked, what follows, and how long this rank waited.

    Attributes:
        rows: By rank, in rank order.
        decision: What follows from the rows of all ranks.
        wait_s: Seconds that the exchange took.
    """

    rows: dict[int, Row]
    decision: Decision
    wait_s: float

    def reports(self, world_size: int) -> list[Report]:
        """Return the reports by rank; blank ones for ranks that are parked or absent."""
        rows = self.rows
        return [rows[rank].report if rank in rows else NOTHING for rank in range(world_size)]

    def records(self, world_size: int) -> tuple[RankRecord, ...]:
        """Return what each rank did, without what ranks report of it a round later."""
        return tuple(report._replace(**_LATER) for report in self.reports(world_size))


class CollectiveResult(NamedTuple):
    """The newest exchange outside of windows.

    If a rank is lost in one, some of the others may have its result and others not. These take the
    result.

    Attributes:
        number: The number of exchanges so far.
        answers: The answer of each rank, by rank, in JSON.
        rows: The rows of tensors that were gathered, if any.
    """

    number: int = 0
    answers: dict[int, Any] = {}  # noqa: RUF012  # never written to
    rows: Tensor | None = None


class Rounds:
    """A rank's part in every round.

    Args:
        team: The ranks.
        policy: What a window is.
        stop_requested: Whether a signal, or another source, wants this rank to stop.

    Attributes:
        team: As given.
        state: The state of the team, as this rank knows it. It alone records which ranks have left,
            rest or stop, and who is parked from the next exchange on.
        latest: The newest exchange outside of windows.
        is_asking: Whether this rank is in one.
        committing: Whether the functions of ``on_commit`` are being called. Parked ranks take
            no part in commits, so they are not in the rounds meanwhile.
    """

    def __init__(
        self, team: Team, policy: ApplyPolicy, stop_requested: Callable[[], bool] | None
    ) -> None:
        self.team = team
        membership = team.membership
        self.state = State(team.rank, team.world_size, policy, team.members)._replace(
            is_elastic=team.is_elastic,
            absent=team.absent,
            generation=membership.generation,
            # A rank that has not joined yet neither plans nor prints.
            planner=-1 if membership.is_joining else team.members[0],
        )
        self.latest = CollectiveResult()
        self.is_asking = self.committing = self._wants_stop = False
        self._stop_requested = stop_requested

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return self.team.rank

    @property
    def comm(self) -> Communicator:
        """Return the communicator of the ranks that are present."""
        return self.team.comm

    @property
    def is_main(self) -> bool:
        """Return whether this rank plans, writes and prints for the team; it is not parked then."""
        return self.rank == self.state.planner

    @property
    def stopping(self) -> bool:
        """Return whether the team has agreed to stop."""
        return self.state.stopping

    @property
    def is_lost(self) -> bool:
        """Return whether waiting for others is useless: a connection or the agreement was lost."""
        return self.team.has_ended or self.state.phase is Phase.ENDED

    @property
    def has_left(self) -> bool:
        """Return whether the user has left a loader's loop by ``break`` and others may not know."""
        return self.state.phase is Phase.REST

    def stop(self) -> None:
        """Ask the team to stop after the window that is being computed."""
        self._wants_stop = True

    def wants_stop(self) -> bool:
        """Return whether this rank was asked to stop, by ``stop`` or by a signal."""
        return self._wants_stop or self.is_interrupted()

    def is_interrupted(self) -> bool:
        """Return whether a signal, or another source, wants this rank to stop without delay."""
        return bool(self._stop_requested and self._stop_requested())

    def make_row(self, purpose: Purpose, **fields: Any) -> State:
        """Return the state with this rank's row in it.

        Args:
            purpose: What this rank wants.
            **fields: Further fields of its ``Row``.
        """
        return self.state.make_row(
            purpose,
            leaving=self.state.is_elastic and self.team.membership.is_leaving,
            stop=self.wants_stop() or self.stopping,
            **fields,
        )

    def meet(
        self, purpose: Purpose, *, what: str = "", timeout_s: float | None = None, **fields: Any
    ) -> Round:
        """Exchange rows with all ranks; what follows is not carried out yet.

        All ranks call it together.

        Args:
            purpose: What this rank wants.
            what: What this rank does, if its purpose does not say so.
            timeout_s: Deadline; ``None`` for the communicator's.
            **fields: Further fields of its ``Row``.
        """
        self.state, team = self.make_row(purpose, **fields), self.team
        if self.state.is_parked:
            timeout_s = PARKED_TIMEOUT_S
        comm, ranks = team.whole, team.everyone
        if self.committing:
            comm, ranks = team.comm, team.members
        return self.exchange(self.state, comm, ranks, what=what, timeout_s=timeout_s)

    def exchange(
        self,
        state: State,
        comm: Communicator,
        ranks: Iterable[int],
        *,
        what: str = "",
        timeout_s: float | None = None,
    ) -> Round:
        """Exchange the row of ``state`` with the ranks of ``comm``; all of them call it together.

        Args:
            state: Holds this rank's row.
            comm: The ranks.
            ranks: Their numbers.
            what: What this rank does, if its purpose does not say so.
            timeout_s: Deadline; ``None`` for the communicator's.
        """
        row, started_s = state.own, time.perf_counter()
        assert row is not None
        what = what or row.purpose.description
        # The label is the same for all purposes. A rank's purpose is in its row, so ranks with
        # different purposes meet, and each can name the purpose of every rank.
        numbers = encode(row, state.world_size) if comm.world_size > 1 else []
        try:
            received = comm.all_gather_rows(numbers, what="a round of rows", timeout_s=timeout_s)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{error} (rank {comm.number} was {what} in window {row.window})",
                missing=error.missing,
            ) from None
        rows = {
            rank: row if rank == self.rank else decode(one)
            for rank, one in zip(ranks, received, strict=True)
        }
        decision = judge(state, rows)
        present = {rank: one for rank, one in rows.items() if rank not in state.parked}
        if isinstance(decision.error, CollectiveMismatchError):
            gathered = _gather_places(comm, rows, what)
            mismatch = CollectiveMismatchError(wording.mismatch(present, gathered))
            decision = decision._replace(error=mismatch)
        return Round(present, decision, time.perf_counter() - started_s)


def _gather_places(comm: Communicator, ranks: Iterable[int], what: str) -> dict[int, str]:
    """Return what each rank does at which line of the user's code, if ranks know it."""
    place = here()
    own = f"{what} at {place}" if place else what
    timeout_s = min(_TELLING_S, comm.timeout_s)
    try:
        gathered = comm.all_gather_json(own, what="places of ranks", timeout_s=timeout_s)
    except CollectiveError:
        return {}
    return dict(zip(ranks, gathered, strict=True))
