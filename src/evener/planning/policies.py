"""Policies: when the team averages, and how the work is divided until then.

Only one rank plans; the others receive the plan. So plans need not be bit-identical on other
machines, but they are deterministic, so that runs can be replayed. Pure.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from evener.planning.plans import WindowPlan
from evener.planning.report import Report


class ApplyPolicy(StrEnum):
    """The policy: the definition of a window, and what is averaged at its end."""

    SYNC = "sync"
    """One optimizer step over a fixed global batch; gradients are averaged."""

    CADENCE = "cadence"
    """Local optimizer steps; differences from consensus are averaged at the end of the window."""

    ASYNC = "async"
    """As CADENCE, with the average computed in the background, at most one window late."""

    @property
    def in_background(self) -> bool:
        """Return whether ranks continue while an average is computed."""
        return self is ApplyPolicy.ASYNC


#: Plans whose reasons are kept until their windows are committed.
_MOST_REASONS: Final = 8

#: Least windows for which a parked rank is out before it is tried again.
LEAST_APART: Final = 500


#: Seconds that a slow or idle rank must have cost in total before the user is warned.
NOTEWORTHY_S: Final = 2.0

#: Standard errors by which one forecast must be below another to count as better.
_CLEARLY: Final = 3.0


class Forecast(NamedTuple):
    """The predicted time of a window; zeros if unknown.

    Attributes:
        window_s: Seconds, those of the exchange included.
        exchange_s: Seconds of the exchange that backward does not hide.
        error_s: Standard error of ``window_s``, from the spread of the measurements.
    """

    window_s: float = 0.0
    exchange_s: float = 0.0
    error_s: float = 0.0

    def is_clearly_below(self, other: "Forecast") -> bool:
        """Return whether this window is shorter by more than the errors of both explain."""
        noise_s = _CLEARLY * math.hypot(self.error_s, other.error_s)
        return self.window_s < other.window_s - noise_s


class Parking(NamedTuple):
    """A decision to park ranks, with its forecasts.

    Attributes:
        alone: The ranks to park, with the samples per second of each alone; 0 if that could not be
            measured.
        before: The forecast with them.
        after: The forecast without them.
    """

    alone: Mapping[int, float]
    before: Forecast = Forecast()
    after: Forecast = Forecast()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks to park."""
        return tuple(self.alone)


class Planner:
    """Learns the speeds of members, and keeps them when the team changes.

    A member's id stays the same when ranks get new numbers. Only the plans of the planning rank
    count.

    Attributes:
        members: Member ids, by rank.
        micro_batch_sizes: Most samples in one forward and backward, by rank; ``None`` for a whole
            share in one.
    """

    def __init__(self, members: Sequence[str]) -> None:
        self.members = tuple(members)
        self.micro_batch_sizes: Sequence[int | None] = (None,) * len(members)
        self._reasons: deque[tuple[int, str]] = deque(maxlen=_MOST_REASONS)

    def why(self, window: int) -> str:
        """Return why the plan of a window differs from the previous one, as text.

        Args:
            window: One of the last planned windows.

        Returns:
            A clause; empty where nothing changed, or another rank has planned the window.
        """
        return dict(self._reasons).get(window, "")

    def _give_reason(self, window: int, reason: str) -> None:
        """Keep why a window is planned as it is; see ``why``."""
        self._reasons.append((window, reason))

    @property
    def is_calibrated(self) -> bool:
        """Return whether every member's speed is known to some degree, or need not be."""
        return True

    def set_micro_batch_sizes(self, sizes: Sequence[int | None]) -> None:
        """Set how shares are computed; see ``micro_batch_sizes``."""
        self.micro_batch_sizes = tuple(sizes)

    def solo_speeds(self, batch_size: int) -> tuple[float, ...]:
        """Return the predicted samples per second of each rank if it did a whole batch alone.

        Args:
            batch_size: Samples of an optimizer step.

        Returns:
            Speeds by rank; 0.0 for a rank that has not been measured.
        """
        return (0.0,) * len(self.members)

    def forget(self, ranks: Collection[int]) -> None:
        """Start these ranks as new ones: others, on other devices, have their numbers now."""

    def state_dict(self) -> dict[str, Any]:
        """Return the learnt state, by member id, as plain JSON types; empty if there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, even of another team: members that are not here are ignored.

        Raises:
            CheckpointError: The state is of another policy, and this one cannot do without it.
        """

    def set_absent(self, ranks: frozenset[int]) -> None:
        """Give nothing to these numbers, which no member of an elastic team has."""


class Policy(Planner, ABC):
    """Plans SYNC windows, from reports of earlier ones if it learns."""

    def calibrate(self, speeds: Sequence[float]) -> None:
        """Set the speeds of the ranks until they are measured.

        Only a prior, which has no vote once a window of a rank was measured.

        Args:
            speeds: One a rank, relative to one another; larger is faster. Where one is not finite
                or not above 0, nothing is learnt.
        """
        return

    def observe(self, reports: Sequence[Report], plan: WindowPlan, sync_s: float) -> None:
        """Learn from a window.

        Args:
            reports: One report a rank, in rank order.
            plan: The plan that the window was computed by.
            sync_s: Seconds that the exchange of the window before took of the ranks with
                ``elapsed_s``, without waiting for the slowest one, and without what was hidden
                behind backward; NaN if unknown.
        """
        return

    @abstractmethod
    def plan(
        self, window: int, epoch: int, start: int, size: int, *, work_for_all: float = 0.0
    ) -> WindowPlan:
        """Plan a window.

        Args:
            window: Its global number.
            epoch: Epoch whose positions it takes.
            start: Its first position.
            size: Its samples over all ranks.
            work_for_all: By how many windows the epoch may be lengthened so that every rank that is
                not parked gets at least a sample of this one (two with batch statistics). 0 gives
                work only where it helps, ``inf`` always, where there are enough samples.
        """

    def set_parked(self, ranks: frozenset[int]) -> None:
        """Give these ranks nothing to do until further notice."""
        return

    def decide_parking(self, batch_size: int, main: int) -> Parking | None:
        """Return the ranks without which windows are predicted to be shorter, if there are any.

        Asked once a window. At least one rank stays.

        Args:
            batch_size: Samples of a window.
            main: The main process; it stays where others are hardly faster.
        """
        return None

    def forecast(self, batch_size: int, away: frozenset[int]) -> Forecast:
        """Return what a window is predicted to take if these ranks are away, and no others."""
        return Forecast()

    def windows_apart(self, batch_size: int, change_s: float) -> int:
        """Return after how many windows ranks that are parked now are to be tried again.

        Args:
            batch_size: Samples of a window.
            change_s: Seconds that it took to call ranks back; 0 if unknown.
        """
        return LEAST_APART
