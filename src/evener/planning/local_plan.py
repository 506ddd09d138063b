"""The plan of a window of CADENCE and ASYNC: the local steps of each rank. Pure."""

from dataclasses import dataclass

from evener.planning.guard import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """The work of each rank until the next averaging.

    Attributes:
        window: Global number of the window.
        epoch: Epoch whose samples it takes.
        window_s: Seconds from the last average until ranks should stop; ``inf`` when counts alone
            close the window. It is above 0, which is checked where a plan is received.
        blocking: Whether ranks wait for the average of this window at its end, also in ASYNC.
        steps: Local steps expected of each rank.
        most: Local steps that a rank does at most; with ``blocking`` off, also how many it may do
            of the next window before the average of this one has landed.
        queues: Batches that each rank's queue is filled up to when the window begins.
        least: Local steps that a rank does whatever the clock says, as far as its ``most`` goes.
        anchor: The anchor that it rests on.
        verdict: What the divergence guard has said.
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

    @property
    def total_steps(self) -> int:
        """Return the local steps expected of all ranks."""
        return sum(self.steps)
