"""Generations: which ranks take part in windows, and how that changes. Pure.

A generation is a period in which membership does not change. Parking a rank, or calling it back,
changes the generation by agreement. The planner asks for the change in the last window of a
generation. A round of ``CHANGE`` rows shows that all ranks have applied that window. Then each rank
forms the next generation from the same rows. Any rank may be parked, rank 0 too. If the planner is
parked, the lowest rank that stays plans from then on. It continues to plan when others come back,
because they have missed the reports of many windows.

Parked ranks wait at the *door*: a round that working ranks run from time to time. Working ranks
send ``CALL`` rows there, parked ranks ``AWAY`` rows. At the end of an epoch all ranks come back.
Those that were parked are parked again when the next epoch begins, unless the planner tries them
again.

In an elastic team the coordinator numbers and forms generations, and ``renewed`` gives the state in
which one begins. A rank that joins or leaves changes the generation in the same agreed way. A rank
that is lost forces the change: the remaining ranks drop the window under way and do it again. The
coordinator does not distinguish parked ranks: they remain members of the generation, which keeps
its number. Before a rank joins or leaves, parked ranks are called back. After a loss they come back
as ranks that join.
"""

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import NamedTuple

from evener.errors import CollectiveMismatchError
from evener.protocol import wording
from evener.protocol.formation import Formation
from evener.protocol.machine import Phase, State
from evener.protocol.row import Purpose, Row


class Said(IntEnum):
    """The message of working ranks to parked ranks at the door."""

    STAY = 0
    GO_ON = 1
    """Come back: the epoch continues."""
    END = 2
    """Come back: the epoch is over, or the team stops."""
    LEFT = 3
    """Come back: the others have left the loop by ``break``."""


class Answer(NamedTuple):
    """The outcome of a round at the door.

    Attributes:
        state: The state after it.
        said: The message of the working ranks.
        source: Position of the lowest working rank, in rank order: all ranks adopt its state.
    """

    state: State
    said: Said
    source: int


def without(state: State, ranks: Collection[int]) -> State:
    """Return the next generation, in which ``ranks`` are parked; it begins with new plans."""
    members = tuple(member for member in state.members if member not in ranks)
    return state._replace(
        generation=_after(state.generation, state),
        members=members,
        planner=state.planner if state.planner in members else members[0],
        phase=Phase.AWAY if state.me in ranks else state.phase,
        plans=(),
        again=(),
    )


def _after(generation: int, state: State) -> int:
    """Return the number of the next generation; that of an elastic team the coordinator counts."""
    return generation if state.is_elastic else generation + 1


def call(state: State, said: Said, *, tries: bool) -> tuple[float, ...]:
    """Return the body of a ``CALL`` row, for ``answer``.

    Args:
        state: That of a rank that works.
        said: What it says.
        tries: Whether it is time to try those that are parked; else they are parked again when the
            next epoch begins.
    """
    again = () if tries else sorted(state.away)
    return tuple(map(float, (said, state.planner, *again)))


def renewed(state: State, formation: Formation, me: int) -> State:
    """Return the state in which a generation of an elastic team begins, without plans.

    The first member plans: those that stay come first, in their order, so that the planner changes
    only if it is lost.

    Args:
        state: That of a rank of the generation before, or of one that joins.
        formation: The new one.
        me: The rank's number.
    """
    return state.release()._replace(
        me=me,
        generation=formation.generation,
        members=formation.numbers,
        absent=frozenset(range(state.world_size)) - frozenset(formation.numbers),
        planner=formation.numbers[0],
        window=formation.base,
        own=None,
        flight=None,
        applied=False,
        phase=Phase.OUT,
        again=(),
        leaving=(),
    )


def answer(state: State, rows: Mapping[int, Row]) -> Answer:
    """Return what follows from the rows at the door.

    Unless ``Said.STAY`` was said, the next generation has all ranks.

    Args:
        state: This rank's.
        rows: Of all ranks of the team, in rank order.

    Raises:
        CollectiveMismatchError: A rank that is not parked wanted something else.
    """
    calling = {rank: row for rank, row in rows.items() if row.purpose is not Purpose.AWAY}
    places = {(row.purpose, row.window, row.generation) for row in calling.values()}
    if len(places) != 1 or next(iter(places))[0] is not Purpose.CALL:
        raise CollectiveMismatchError(wording.mismatch(rows, {}))
    lowest, row = next(iter(calling.items()))
    known, planner, *again = map(int, row.body)
    stopping = state.stopping or any(other.stop for other in rows.values())
    said = Said(known)
    leaving = tuple(rank for rank, row in rows.items() if row.leaving)
    state = state._replace(own=None, stopping=stopping, leaving=leaving)
    if said is not Said.STAY:
        state = state._replace(
            generation=_after(row.generation, state),
            members=tuple(rows),
            window=row.window,
            phase=Phase.OUT if state.phase is Phase.AWAY else state.phase,
            led_out=said is Said.LEFT if state.phase is Phase.AWAY else state.led_out,
            plans=(),
            planner=planner,
            again=tuple(again),
        )
    return Answer(state, said, [*rows].index(lowest))
