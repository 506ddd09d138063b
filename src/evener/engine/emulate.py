"""Slows a rank on purpose, so that unequal devices can be tried on equal ones."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

from evener.errors import ConfigError

#: Longest time that a rank which is emulated slower does not look whether it was asked to stop.
SLICE_S = 0.1

#: Set by ``evener launch --emulate-slow``: its texts, with commas between them.
EMULATE_SLOW = "EVENER_EMULATE_SLOW"

#: When some compute began: on the clock of compute, and on that of the wall.
Started = tuple[float, float]


def parse_emulation(specs: Sequence[str], world_size: int | None = None) -> dict[int, float]:
    """Read ``--emulate-slow RANK:FACTOR`` options.

    Args:
        specs: One text per option, such as ``"1:3"`` (rank 1 takes three times as long).
        world_size: Ranks in the team; ``None`` where that is not known yet.

    Returns:
        Factor (>= 1) per rank named.

    Raises:
        ConfigError: A text is not ``RANK:FACTOR`` with a factor of 1 or more, or names a rank that
            is not there.
    """
    factors: dict[int, float] = {}
    for spec in specs:
        rank_text, _, factor_text = spec.partition(":")
        try:
            rank, factor = int(rank_text), float(factor_text)
        except ValueError:
            rank, factor = -1, math.nan
        if rank < 0 or not 1 <= factor < math.inf:
            raise ConfigError(
                f"--emulate-slow {spec!r} is not RANK:FACTOR with a factor of 1 or more; write 1:3 "
                "for a rank 1 that takes three times as long"
            )
        if world_size is not None and rank >= world_size:
            raise ConfigError(
                f"--emulate-slow {spec}: there is no rank {rank} in a team of {world_size}; name "
                f"a rank below {world_size}, or start more (--nproc, or MAX of --elastic)"
            )
        factors[rank] = factor
    return factors


def emulation_of_launcher(environ: Mapping[str, str]) -> dict[int, float]:
    """Return the factors that ``evener launch --emulate-slow`` asks for, by rank of a script."""
    given = environ.get(EMULATE_SLOW)
    return parse_emulation(given.split(",")) if given else {}


def compute_clock(device: str) -> Callable[[], float]:
    """Return the clock that measures compute on a torch device, such as ``cpu`` or ``cuda:0``."""
    return time.thread_time if device.startswith("cpu") else time.perf_counter


class Slowdown:
    """Stretches measured compute by a factor.

    Compute is measured on a clock of its own. On a CPU rank that is the processor time of the
    calling thread: the slower device needs the factor times that. A wait for a core that ranks of
    one machine share is part of it, as long as it lasts no longer. (A device that is really slow
    would not have that wait.)

    Args:
        factor: How many times as long compute shall take; 1 adds nothing.
        clock: Seconds of compute so far, such as ``time.perf_counter`` for work on a GPU.
        stop_requested: Whether this rank was asked to stop; a signal's handler may make it true.
            Then a sleep ends within ``SLICE_S``, however long it was to be.
    """

    def __init__(
        self,
        factor: float,
        *,
        clock: Callable[[], float] = time.thread_time,
        stop_requested: Callable[[], bool] | None = None,
    ) -> None:
        self.factor = factor
        self._clock = clock
        self._stop_requested = stop_requested or (lambda: False)

    def start(self) -> Started:
        """Return the readings before some compute, for ``after``."""
        # A clock of a thread may take half a millisecond to read.
        return (self._clock(), time.perf_counter()) if self.factor > 1 else (0.0, 0.0)

    def after(self, start: Started) -> float:
        """Sleep as long as the slower device would still compute.

        Args:
            start: What ``start`` returned, on this thread.

        Returns:
            Seconds slept: what is missing to ``factor`` times the compute since then. The caller
            adds them to its compute time.
        """
        extra_s = self.ahead_s(start)
        if extra_s:
            self._sleep(extra_s)
        return extra_s

    def ahead_s(self, start: Started) -> float:
        """Return how many seconds after now the slower device would be as far; see ``after``."""
        if self.factor == 1:
            return 0.0
        compute_s, wall_s = start
        due_s = self.factor * (self._clock() - compute_s)
        return max(0.0, due_s - (time.perf_counter() - wall_s))

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self._stop_requested():
            time.sleep(min(left_s, SLICE_S))
