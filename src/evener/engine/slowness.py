"""Names ranks that have become slow, on the main process."""

from collections.abc import Callable, Collection, Sequence
from typing import final

from evener.engine.results import WindowResult
from evener.observe.numbers import human_duration
from evener.planning.stragglers import Straggler, StragglerWatch
from evener.team.members import Member


@final
class Slowness:
    """Watches how fast the ranks of a team are.

    Args:
        members: What each rank is.
        warn: Tells the user something.
    """

    def __init__(self, members: Sequence[Member], *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.restart(members)

    def restart(self, members: Sequence[Member]) -> None:
        """Forget all windows, because other workers have these numbers now."""
        self._members = members
        self._watch = StragglerWatch(len(members))

    def judge(
        self, results: Sequence[WindowResult], *, away: Collection[int]
    ) -> tuple[Straggler, ...]:
        """Return the ranks that have become slow, or have stopped being slow, with some windows.

        Only the main process asks, and the user is told of them.

        Args:
            results: Of windows that were committed, in order.
            away: Ranks that are parked or gone by now: no rank waits for them any more.
        """
        if len(self._members) == 1:
            return ()  # no rank waits for it
        judged = [one for r in results for one in self._watch.observe(r.window, r.ranks)]
        found = tuple(one for one in judged if one.rank not in away)
        for one in found:
            self._warn(_describe(one, self._members[one.rank]))
        return found


def _describe(one: Straggler, member: Member) -> str:
    """Return a sentence about a rank that has become slow, or has stopped being slow."""
    name = f"rank {one.rank} ({member.host}, {member.device}, {member.device_name})"
    cost = f"windows would have ended {human_duration(one.delay_s)} sooner without that"
    if one.is_over:
        return (
            f"{name} is not a straggler any more: it was slow from window {one.since} to "
            f"{one.window}; {cost}"
        )
    return (
        f"straggler: {name} is {one.factor:.1f} times slower than its own past "
        f"({human_duration(one.compute_s)} instead of {human_duration(one.expected_s)} in window "
        f"{one.window}), since window {one.since}: {one.cause}. So far {cost}"
    )
