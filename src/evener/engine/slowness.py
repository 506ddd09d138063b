"""Names ranks that have become slow, and finds out why this one is."""

from collections.abc import Callable, Collection, Sequence
from typing import final

from evener.engine.results import WindowResult
from evener.observe.numbers import human_duration
from evener.observe.slow_causes import SlowDiagnosis
from evener.planning.stragglers import SlowCause, Straggler, StragglerWatch
from evener.team.members import Member


@final
class Slowness:
    """Watches how fast the ranks of a team are, on one of them.

    Args:
        rank: This rank.
        members: What each rank is.
        diagnosis: Asked why this rank is slow, as long as it is suspected.
        warn: Tells the user something.

    Attributes:
        because: Why this rank is slow; its next report says so.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        *,
        diagnosis: SlowDiagnosis,
        warn: Callable[[str], None],
    ) -> None:
        self._diagnosis = diagnosis
        self._warn = warn
        self.restart(rank, members)

    def restart(self, rank: int, members: Sequence[Member]) -> None:
        """Forget all windows, because other workers have these numbers now; on all ranks together.

        Args:
            rank: This rank, which may have come back under another number.
            members: What each rank is.
        """
        self._rank, self._members = rank, members
        self._watch = StragglerWatch([_kind(member) for member in members])
        self.because, self._is_looking = SlowCause.UNKNOWN, False
        self._diagnosis.forget()

    def judge(
        self, results: Sequence[WindowResult], *, away: Collection[int], speaks: bool
    ) -> tuple[Straggler, ...]:
        """Return the ranks that have become slow, or have stopped being slow, with some windows.

        Args:
            results: Of windows that were committed, in order.
            away: Ranks that are parked or gone by now: no rank waits for them any more.
            speaks: Whether this rank tells the user of them.
        """
        judged = [one for r in results for one in self._watch.observe(r.window, r.ranks)]
        found = [one for one in judged if one.rank not in away]
        if self._watch.is_suspected(self._rank):
            self.because = self._diagnosis.look()
            self._is_looking = True
        elif self._is_looking:
            self.because, self._is_looking = SlowCause.UNKNOWN, False
            self._diagnosis.forget()
        for one in found if speaks else ():
            self._warn(describe_straggler(one, _name(self._members[one.rank])))
        return tuple(found)


def _kind(member: Member) -> str:
    """Return what ranks that are expected to be as fast as one another have in common."""
    if not member.device:
        return f"number {member.rank}, which no worker has"
    return (
        f"{member.device_name}, {member.threads} threads, {member.precision}, {member.emulated:g}"
    )


def _name(member: Member) -> str:
    where = f" ({member.host}, {member.device}, {member.device_name})" if member.device else ""
    return f"rank {member.rank}{where}"


def describe_straggler(one: Straggler, name: str) -> str:
    """Return a sentence about a rank that has become slow, or has stopped being slow."""
    cost = f"windows would have ended {human_duration(one.delay_s)} sooner without that"
    if one.is_over:
        return (
            f"{name} is not a straggler any more: it was slow from window {one.since} to "
            f"{one.window}; {cost}"
        )
    return (
        f"straggler: {name} is {one.factor:.1f} times slower than {one.against} "
        f"({human_duration(one.compute_s)} instead of {human_duration(one.expected_s)} in window "
        f"{one.window}), since window {one.since}: {one.cause.words}. So far {cost}"
    )
