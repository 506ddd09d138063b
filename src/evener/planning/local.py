"""What a window of CADENCE and ASYNC is: how many local steps each rank makes. Pure."""

from dataclasses import dataclass

from evener.errors import ProtocolError
from evener.planning.guard import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What each rank does until the next averaging.

    Attributes:
        window: Global number of the window.
        epoch: Epoch whose samples it takes.
        window_s: Seconds from the last average until ranks should stop; ``inf`` when counts alone
            close the window.
        blocking: Whether ranks wait for the average of this window at its end, also in ASYNC.
        steps: Local steps expected of each rank.
        most: Local steps that a rank does at most; with ``blocking`` off, also how many it may do
            of the next window before the average of this one has landed.
        queues: Batches that each rank's queue is filled up to when the window begins.
        least: Local steps that a rank does whatever the clock says, as far as its ``most`` goes.
        anchor: The anchor that it rests on.
        verdict: What the divergence guard has said.

    Raises:
        ProtocolError: A number is out of range, or tuples are not of one length.
    """

    window: int
    epoch: int
    window_s: float
    blocking: bool
    steps: tuple[int, ...]
    most: tuple[int, ...]
    queues: tuple[int, ...]
    least: int = 0
    anchor: int = 1
    verdict: Verdict = Verdict.STABLE

    def __post_init__(self) -> None:
        """Refuse a plan that makes no sense, wherever it comes from."""
        whole = (
            self.window,
            self.epoch,
            self.least,
            self.anchor,
            *self.steps,
            *self.most,
            *self.queues,
        )
        if min(whole) < 0 or not self.window_s > 0:
            raise ProtocolError(f"{self} holds a number that is out of range")
        if len({len(self.steps), len(self.most), len(self.queues)}) != 1:
            raise ProtocolError(f"{self} does not speak of one number of ranks")

    @property
    def total_steps(self) -> int:
        """Local steps expected of all ranks."""
        total = 0
        for count in self.steps:
            total += count
        return total
