"""Slows a rank on purpose, so that unequal devices can be tried on equal ones."""

import math
import time
from collections.abc import Callable, Sequence

from evener.errors import ConfigError


def parse_emulation(specs: Sequence[str], world_size: int) -> dict[int, float]:
    """Reads ``--emulate-slow RANK:FACTOR`` options.

    Args:
        specs: One text per option, such as ``"1:3"`` (rank 1 takes three times as long).
        world_size: Ranks in the team.

    Returns:
        Factor (>= 1) per rank named.

    Raises:
        ConfigError: A text is no ``RANK:FACTOR``, names a rank that is not there or one twice, or
            has a factor below 1.
    """
    factors: dict[int, float] = {}
    for spec in specs:
        rank, factor = _parse_one(spec)
        if rank >= world_size:
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


class Slowdown:
    """Stretches measured compute by a factor.

    Args:
        factor: How many times as long compute shall take; 1 adds nothing.
        sleep: Waits for that many seconds; a test passes its own.

    Raises:
        ConfigError: The factor is below 1 or not finite.
    """

    def __init__(self, factor: float, sleep: Callable[[float], None] = time.sleep) -> None:
        if not 1 <= factor < math.inf:
            raise ConfigError(f"slow-down factor is {factor}; give a finite number of 1 or more")
        self.factor = factor
        self._sleep = sleep

    def after(self, compute_s: float) -> float:
        """Sleeps as long as the slower device would still compute.

        Args:
            compute_s: Seconds that the compute just done has taken here.

        Returns:
            Seconds slept, ``(factor - 1) * compute_s``; the caller adds them to its compute time.
        """
        extra_s = (self.factor - 1) * compute_s
        if extra_s > 0:
            self._sleep(extra_s)
        return extra_s
