"""Slows a rank on purpose, so that unequal devices can be tried on equal ones."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from evener.errors import ConfigError

#: Longest time that a rank which is emulated slower does not look whether it was told to stop.
SLICE_S = 0.1


#: Set by ``evener launch --emulate-slow``: its texts, with commas between them.
EMULATE_SLOW = "EVENER_EMULATE_SLOW"


def parse_emulation(specs: Sequence[str], world_size: int | None = None) -> dict[int, float]:
    """Reads ``--emulate-slow RANK:FACTOR`` options.

    Args:
        specs: One text per option, such as ``"1:3"`` (rank 1 takes three times as long).
        world_size: Ranks in the team; ``None`` where that is not known yet.

    Returns:
        Factor (>= 1) per rank named.

    Raises:
        ConfigError: A text is no ``RANK:FACTOR``, names a rank that is not there or one twice, or
            has a factor below 1.
    """
    factors: dict[int, float] = {}
    for spec in specs:
        rank, factor = _parse_one(spec)
        if world_size is not None and rank >= world_size:
            there = "rank 0 only" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise ConfigError(
                f"--emulate-slow {spec}: there is no rank {rank}, this team has {there}; "
                "name one of these or start more ranks with --nproc"
            )
        if rank in factors:
            raise ConfigError(
                f"--emulate-slow {spec}: rank {rank} was already given factor {factors[rank]:g}; "
                "name each rank once"
            )
        factors[rank] = factor
    return factors


def emulation_of_launcher(
    environ: Mapping[str, str], world_size: int
) -> tuple[dict[int, float], list[int]]:
    """What ``evener launch --emulate-slow`` asks of a script's ranks.

    Args:
        environ: The process's environment.
        world_size: Ranks in the team.

    Returns:
        Factors of ranks of the team, and the ranks that it does not have: the launcher cannot know
        how large a team the script makes.
    """
    given = environ.get(EMULATE_SLOW)
    factors = parse_emulation(given.split(",")) if given else {}
    absent = [rank for rank in factors if rank >= world_size]
    return {rank: factors[rank] for rank in factors if rank < world_size}, absent


def _parse_one(spec: str) -> tuple[int, float]:
    rank_text, colon, factor_text = spec.partition(":")
    try:
        rank, factor = int(rank_text), float(factor_text)
    except ValueError:
        rank, factor = -1, math.nan
    if not colon or rank < 0 or math.isnan(factor):
        raise ConfigError(
            f"--emulate-slow {spec!r} is not RANK:FACTOR; write 1:3 for a rank 1 that takes three "
            "times as long"
        )
    if not 1 <= factor < math.inf:
        raise ConfigError(
            f"--emulate-slow {spec}: the factor is {factor:g}, but a rank can only be slowed: "
            "give 1 or more"
        )
    return rank, factor


def compute_clock(device: str) -> Callable[[], float]:
    """The clock that measures compute on a torch device, such as ``cpu`` or ``cuda:0``."""
    return time.thread_time if device.startswith("cpu") else time.perf_counter


def patient_sleep(stop_requested: Callable[[], bool]) -> Callable[[float], None]:
    """A sleep that ends within ``SLICE_S`` of a request to stop, however long it was to be.

    Args:
        stop_requested: Whether this rank was told to stop; a signal's handler may make it true.
    """

    def sleep(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not stop_requested():
            time.sleep(min(left_s, SLICE_S))

    return sleep


class Started(NamedTuple):
    """When some compute began: on the clock of compute, and on that of the wall."""

    compute_s: float
    wall_s: float


class Slowdown:
    """Stretches measured compute by a factor.

    Compute is measured on a clock of its own. On a CPU rank that is the processor time of the
    calling thread: the slower device needs the factor times that, and a wait for a core that ranks
    of one machine share is part of it, as long as it lasts no longer. (A real slow device would not
    know of that wait.)

    Args:
        factor: How many times as long compute shall take; 1 adds nothing.
        clock: Seconds of compute so far, such as ``time.perf_counter`` for work on a GPU.
        wall: Seconds that have gone by.
        sleep: Waits for that many seconds; a test passes its own.

    Raises:
        ConfigError: The factor is below 1 or not finite.
    """

    def __init__(
        self,
        factor: float,
        *,
        clock: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 1 <= factor < math.inf:
            raise ConfigError(f"slow-down factor is {factor}; give a finite number of 1 or more")
        self.factor = factor
        self._clock = clock
        self._wall = wall
        self._sleep = sleep

    def start(self) -> Started:
        """The readings before some compute, for ``after``."""
        return Started(self._clock(), self._wall()) if self.factor > 1 else _NOT_SLOWED

    def after(self, start: Started) -> float:
        """Sleeps as long as the slower device would still compute.

        Args:
            start: What ``start`` returned, on this thread.

        Returns:
            Seconds slept: what is missing to ``factor`` times the compute since then. The caller
            adds them to its compute time.
        """
        if self.factor == 1:
            return 0.0
        due_s = self.factor * (self._clock() - start.compute_s)
        extra_s = max(0.0, due_s - (self._wall() - start.wall_s))
        if extra_s > 0:
            self._sleep(extra_s)
        return extra_s


_NOT_SLOWED = Started(0.0, 0.0)
