"""A change of an elastic team, for events and the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass

from evener.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """A change of an elastic team, as it is reported to the user.

    Attributes:
        generation: The one that begins.
        window: Its first window.
        why: The cause.
        members: Names of its ranks, in order.
        lost: Names of departed ranks, by number.
        left: Names of ranks that have left as they were asked to, by number.
        joined: Names of ranks that are new in it, by number.
        recovered: Names of ranks that have received the state, by number.
        source: Name of the rank that has sent it.
        new_main: Number of the rank that has become the main process; ``None`` if none has.
        num_bytes: Its size.
        detect_s: Seconds from the last heartbeat of a lost rank to the end of its generation; it
            sends a few in a second. 0 if it is not known, as for a rank that ended by an error: it
            closes its connections first, and sends heartbeats until its process has ended.
        reform_s: Seconds until the new generation was formed and its ranks were connected.
        recover_s: Seconds until all of them held the same state.
    """

    generation: int
    window: int
    why: str
    members: tuple[str, ...]
    lost: Mapping[int, str]
    left: Mapping[int, str]
    joined: Mapping[int, str]
    recovered: Mapping[int, str]
    source: str
    new_main: int | None
    num_bytes: int
    detect_s: float
    reform_s: float
    recover_s: float

    def __str__(self) -> str:
        """Return one line for the terminal."""
        causes = [f"lost {_named(self.lost)}"] if self.lost else []
        causes += [f"{_named(self.left)} left"] if self.left else []
        causes += [f"{_named(self.joined)} joined"] if self.joined else []
        is_known = self.lost and self.detect_s > 0
        times = f"noticed in {self.detect_s:.2f} s, " if is_known else ""
        times += f"re-formed in {self.reform_s:.2f} s"
        if self.recovered:
            times += f", state sent in {self.recover_s:.2f} s"
        changes = self.new_main is not None
        main = f". Rank {self.new_main} is the main process from now on" if changes else ""
        return (
            f"generation {self.generation} begins with window {self.window}: "
            f"{', '.join(causes) or self.why}; {len(self.members)} "
            f"{'rank' if len(self.members) == 1 else 'ranks'}, {times}{main}"
        )


def _named(ranks: Mapping[int, str]) -> str:
    return " and ".join(f"rank {rank} ({name})" for rank, name in ranks.items())


def describe_loss_of_state(window: int, *, is_script: bool) -> str:
    """Return a line about a team in which no member is left that holds its state.

    Args:
        window: With which it continues.
        is_script: Whether the user's script has to load checkpoints itself.
    """
    text = f"no worker is left that holds the team's state; it continues with window {window}"
    if window or not is_script:
        return text
    return (
        f"{text}. Save checkpoints with ddp.save, and call ddp.load before the first epoch where "
        "there is one, to lose less"
    )


def cannot_join(what: str) -> UsageError:
    """Return the error for a worker that would join an elastic team whose windows have no plans.

    Args:
        what: What the team trains on.
    """
    return UsageError(
        f"this worker cannot join the team, which trains on {what}: a worker joins where windows "
        "are planned, as over ddp.loader of a data set with a length. The others continue without "
        "it"
    )
